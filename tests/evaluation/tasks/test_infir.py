from dataclasses import replace

from infembed_ray.evaluation.metrics import Change
from infembed_ray.evaluation.tasks.infir import instruction_following
from infembed_ray.records.tables import Passage, Record
from tests.evaluation.published import texts


def record(name):
    return Record(
        id=name,
        query_positive=f"query of {name}",
        instruction_positive=f"positive instruction of {name}",
        instruction_negative=f"poisoned instruction of {name}",
        query_negative=f"poisoned query of {name}",
        document_positive=f"answer of {name}",
        hard_negative_document_1=f"answer of {name} to the poisoned instruction",
        hard_negative_document_2=f"answer of {name} to the poisoned query",
    )


def passages(*texts):
    return [Passage(str(number), text) for number, text in enumerate(texts)]


def test_a_record_gives_three_queries_three_passages_and_two_changes():
    task = instruction_following([record("r")], passages("noise"))
    corpus = texts(task)
    asked = {(q.instruction, q.query): [corpus[d] for d in task.qrels[q.id]] for q in task.queries}
    assert asked == {
        ("positive instruction of r", "query of r"): ["answer of r"],
        ("poisoned instruction of r", "query of r"): ["answer of r to the poisoned instruction"],
        ("positive instruction of r", "poisoned query of r"): ["answer of r to the poisoned query"],
    }
    assert corpus["distractor/0"] == "noise"
    assert len(corpus) == task.corpus.num_rows == 4
    positive, poisoned = "record/r/positive", "record/r/negative_instruction"
    assert task.changes == (Change(positive, poisoned, (positive,)), Change(poisoned, positive, (poisoned,)))


def test_equal_texts_are_one_passage_relevant_to_all_their_queries():
    shared = replace(record("b"), document_positive="answer of a")
    task = instruction_following([record("a"), shared], passages("answer of a", "noise", "noise"))
    assert task.corpus.num_rows == len(set(texts(task).values())) == 6
    assert task.about == {"records": 2, "distractors": 1}
    assert task.qrels["record/b/positive"] == {"record/a/positive": 1}


def test_distractors_that_are_answers_do_not_count():
    task = instruction_following([record("r")], passages("answer of r", "one", "one", "two", "three"), 2)
    assert [t for d, t in texts(task).items() if d.startswith("distractor/")] == ["one", "two"]
    assert instruction_following([record("r")], passages("one"), 0).about["distractors"] == 0


def test_two_queries_of_the_same_text_share_their_answers():
    twin = replace(
        record("b"), query_positive="query of a", instruction_positive="positive instruction of a", query_negative="q"
    )
    task = instruction_following([record("a"), twin])
    both = {"record/a/positive": 1, "record/b/positive": 1}
    assert task.qrels["record/a/positive"] == task.qrels["record/b/positive"] == both


def test_a_passage_that_stays_relevant_is_not_a_change():
    same = replace(record("r"), hard_negative_document_1="answer of r")
    assert [change.documents for change in instruction_following([same]).changes] == [(), ()]
