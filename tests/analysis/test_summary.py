from infembed_ray.analysis.material import read
from infembed_ray.analysis.summary import summarise
from infembed_ray.storage import resolve
from tests.analysis.samples import ROWS, Rows, kept, publish


def test_topics_and_sources_are_those_of_the_kept_records(tmp_path):
    rows = Rows([*ROWS.kept, kept("x", source="elsewhere")], ROWS.rejected, ROWS.dead_letter)
    summary = summarise(read(resolve(publish(tmp_path / "out", rows)), "records"))
    assert list(summary.topics.items()) == [("tea", 2), ("bread", 1)]
    assert list(summary.sources.items()) == [("sample", 3), ("elsewhere", 1)]
