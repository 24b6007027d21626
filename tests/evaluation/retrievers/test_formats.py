from infembed_ray.config import RetrieverSettings
from infembed_ray.evaluation.retrievers import formats
from infembed_ray.evaluation.tasks.task import Query

E5 = RetrieverSettings(
    instructed_query="query: {query} {instruction}", plain_query="query: {query}", passage="p: {passage}"
)


def test_a_query_is_written_by_the_format_for_what_it_has():
    assert formats.query_text(E5, Query("1", "what is bread", "for bakers")) == "query: what is bread for bakers"
    assert formats.query_text(E5, Query("1", "what is bread")) == "query: what is bread"
    assert formats.query_text(E5, Query("1", "what is bread", "")) == "query: what is bread"
    assert formats.passage_text(E5, "bread") == "p: bread"
    assert formats.passage_text(RetrieverSettings(), "bread") == "bread"


def test_places_inside_the_texts_themselves_mean_nothing():
    query = Query("1", "what does {instruction} mean in {braces}", "{query} {passage}")
    assert formats.query_text(E5, query) == "query: what does {instruction} mean in {braces} {query} {passage}"
    assert formats.passage_text(E5, "{passage} {0}") == "p: {passage} {0}"


def test_a_format_is_divided_at_a_place():
    assert formats.split("A {instruction} B {query} C", "query", instruction="{query}") == ("A {query} B ", " C")
