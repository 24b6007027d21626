import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from infembed_ray.errors import InputError
from infembed_ray.evaluation import results
from infembed_ray.evaluation.metrics import CONVENTIONS, Change
from infembed_ray.evaluation.obedience import Controls
from infembed_ray.evaluation.results import PER_QUERY_FILE, RESULTS_FILE, Results, TaskSummary
from infembed_ray.evaluation.tasks.task import CORPUS, Figure, Query, Task, score
from infembed_ray.storage.object_store import Folder
from tests.support.object_store import upload

TASK = Task(
    name="small",
    corpus=pa.table({"id": ["a", "b"], "text": ["x", "y"]}, schema=CORPUS),
    queries=(Query("1-og", "q", "i", "og", "1"), Query("1-changed", "q", "j", "changed", "1"), Query("2", "r")),
    qrels={"1-og": {"a": 1}, "1-changed": {"b": 1}, "2": {"a": 1}},
    figures=(Figure("p-MRR", "p-MRR"), Figure("nDCG@10 og", "nDCG@10", "og"), Figure("MAP@1000", "MAP@1000")),
    changes=(Change("1-og", "1-changed", ("a",)),),
    about={"data": "made up"},
)
RUNS = {
    "base": {q: {"a": 2.0, "b": 1.0} for q in TASK.qrels},
    "ours": {"1-og": {"a": 2.0, "b": 1.0}, "1-changed": {"a": 1.0, "b": 2.0}, "2": {"b": 1.0}},
}


def made(**change):
    scores = {label: {"small": score(TASK, run)} for label, run in RUNS.items()}
    values = {
        "tasks": {"small": TaskSummary.from_task(TASK, "0f3a")},
        "models": {"base": {"model": "m"}, "ours": {"model": "n"}},
    }
    return Results(**(values | {"scores": scores, "depth": 1000} | change))


@pytest.fixture
def written(tmp_path):
    results.write(tmp_path, made())
    return tmp_path


def test_results_come_back_as_they_were_written(written):
    back = results.read(written)
    assert back == made()
    assert list(back.models) == ["base", "ours"]  # the first is the baseline
    assert back.figures["ours"]["small"]["p-MRR"] == pytest.approx(0.5)


def test_the_values_of_the_controls_come_back_with_their_means_and_conventions(tmp_path):
    controls = Controls.from_task(TASK)
    obedience = {label: {"small": controls.measure(TASK, run)} for label, run in RUNS.items()}
    obedience["BM25"] = obedience["base"]
    with_controls = made(obedience=obedience)
    results.write(tmp_path, with_controls)
    assert results.read(tmp_path) == with_controls
    plain = json.loads((tmp_path / RESULTS_FILE).read_text())
    assert plain["obedience"] == with_controls.obedience_means
    assert plain["obedience"]["ours"]["small"]["as given"]["p-MRR"] == pytest.approx(0.5)
    assert "violation" in plain["conventions"]


def test_the_file_names_the_conventions_of_its_measures_and_no_others(written):
    plain = json.loads((written / RESULTS_FILE).read_text())
    assert plain["conventions"] == {kind: CONVENTIONS[kind] for kind in ("ranking", "nDCG", "MAP", "p-MRR")}
    assert plain["depth"] == 1000
    assert plain["tasks"]["small"]["content"] == "0f3a"
    assert plain["tasks"]["small"]["about"] == {
        "queries": 3,
        "passages": 2,
        "judgements": 3,
        "changed_queries": 1,
        "data": "made up",
    }


def test_a_figure_without_values_is_null(tmp_path):
    nothing = {label: {"small": {"p-MRR": {}}} for label in RUNS}
    asked = TaskSummary(TASK.figures[:1], {})
    results.write(tmp_path, made(tasks={"small": asked}, scores=nothing))
    assert json.loads((tmp_path / RESULTS_FILE).read_text())["figures"]["base"]["small"]["p-MRR"] is None
    assert results.read(tmp_path).scores == nothing


def test_values_of_an_unknown_model_are_rejected(written):
    file = written / PER_QUERY_FILE
    rows = pq.read_table(file).to_pylist()
    rows = [*rows, rows[0] | {"model": "other"}]
    pq.write_table(pa.Table.from_pylist(rows, schema=results.PER_QUERY), file)
    with pytest.raises(InputError, match="damaged"):
        results.read(written)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (RESULTS_FILE, None, r"no results\.json there"),
        (
            RESULTS_FILE,
            b'{"format": "infembed-results/0"}',
            "format is 'infembed-results/0', expected 'infembed-results/2'",
        ),
        *((RESULTS_FILE, content, "damaged") for content in (b"", b"[]", b"{}", b'{"format": "infembed-results/2"}')),
        (PER_QUERY_FILE, None, r"damaged .*per_query\.parquet"),
        (PER_QUERY_FILE, b"PAR1", "damaged"),
    ],
)
def test_a_missing_or_damaged_file_is_rejected_in_one_line(written, file, content, message):
    (written / file).unlink() if content is None else (written / file).write_bytes(content)
    with pytest.raises(InputError, match=f"^results.0=.*{message}") as caught:
        results.read(written, "results.0")
    assert "\n" not in str(caught.value)


def test_results_in_an_object_store_are_read_in_place(written, bucket, tmp_path):
    folder = Folder.open(f"{bucket}/{tmp_path.name}", "results")
    upload(written, folder)
    assert results.read(folder) == made()
    folder.delete(PER_QUERY_FILE)
    with pytest.raises(InputError, match=r"results=s3://.*per_query.parquet"):
        results.read(folder)
