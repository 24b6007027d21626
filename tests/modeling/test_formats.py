from infembed_ray.config.evaluation import RetrieverSettings
from infembed_ray.evaluation.tasks.task import Query
from infembed_ray.modeling.formats import passage_text, query_text

E5 = RetrieverSettings(
    model="e5", instructed_query="query: {query} {instruction}", plain_query="query: {query}", passage="p: {passage}"
)


def test_a_query_with_an_instruction_has_its_own_format():
    assert query_text(E5, Query("1", "what is bread", "for bakers")) == "query: what is bread for bakers"
    assert query_text(E5, Query("1", "what is bread")) == "query: what is bread"
    assert query_text(E5, Query("1", "what is bread", "")) == "query: what is bread"
    assert passage_text(E5.passage, "bread") == "p: bread"
    assert passage_text(None, "bread") == "bread"


def test_braces_inside_the_texts_are_plain_text():
    query = Query("1", "what does {instruction} mean in {braces}", "{query} {passage}")
    assert query_text(E5, query) == "query: what does {instruction} mean in {braces} {query} {passage}"
    assert passage_text(E5.passage, "{passage} {0}") == "p: {passage} {0}"
