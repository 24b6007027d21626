from infembed_ray.analysis.duplicates import Repeated, duplicates
from tests.analysis.samples import record


def test_texts_that_stand_twice_are_found_across_positive_and_negative_columns():
    rows = [
        record("a", query_positive="How tall is it?"),
        record("b", query_negative="how  tall\nis it?"),
        record("c", query_positive="HOW TALL IS IT?", document_positive="answer of a"),
    ]
    instructions, queries, passages = duplicates(rows)
    assert (instructions.texts, instructions.distinct, instructions.repeated, instructions.examples) == (6, 6, 0, [])
    assert (queries.texts, queries.distinct, queries.repeated) == (6, 4, 1)
    assert queries.examples == [Repeated("how tall is it?", 3)]
    assert (passages.texts, passages.distinct, passages.repeated) == (9, 8, 1)


def test_only_the_most_frequent_are_shown():
    rows = [record(f"{n}-{copy}", query_positive=f"query {n}") for n in range(9) for copy in range(n + 1)]
    queries = duplicates(rows)[1]
    assert queries.repeated == 8  # the first stands once
    assert [e.times for e in queries.examples] == [9, 8, 7, 6, 5]
