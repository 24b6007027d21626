import bz2
import gzip
import struct
from dataclasses import replace
from functools import partial

import pyarrow as pa
import pytest
import pytrec_eval
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from infembed_ray.errors import InputError
from infembed_ray.evaluation.metrics import ranks
from infembed_ray.evaluation.obedience import Controls
from infembed_ray.evaluation.retrievers import baselines, runs
from infembed_ray.evaluation.tasks.infir import instruction_following
from infembed_ray.evaluation.tasks.task import CORPUS, Query, Task, score
from tests.evaluation.tasks.test_infir import record

RUN = {"1": {"a": 0.5, "b": 1 / 3, "c": -2.0}, "2": {"c": 1e-12}}
TASK = Task(
    "followir/core17",
    pa.table({"id": ["a", "b", "c"], "text": list("xyz")}, schema=CORPUS),
    (Query("1", "one"), Query("2", "two"), Query("3", "three")),
    {},
    (),
)


def ranker(path):
    return partial(baselines.rank, baselines.resolve("x", {"kind": "run", "model": str(path)}))


def written(directory, run=RUN, model="multi{P,I}", task=TASK.name):
    runs.write(directory, model, task, run)
    (file,) = directory.rglob("*.run.gz")
    return file


ids = st.text(min_size=1, max_size=6).filter(lambda text: text.isprintable() or text.isspace())


def of_floats(width):
    floats = st.floats(allow_nan=False, allow_infinity=False, width=width)
    return st.dictionaries(ids, st.dictionaries(ids, floats, min_size=1), min_size=1)


@given(of_floats(64) | of_floats(32))
def test_a_run_comes_back_with_its_order_ties_and_precision_whatever_its_ids(tmp_path_factory, run):
    back = runs.read(written(tmp_path_factory.mktemp("runs"), run), "runs")
    assert back.keys() == run.keys()
    for query, documents in run.items():
        assert list(ranks(back[query]).items()) == list(ranks(documents).items())
        assert len(set(back[query].values())) == len(set(documents.values()))
        if back[query] != documents:
            assert {d: struct.unpack("f", struct.pack("f", s))[0] for d, s in back[query].items()} == documents


def test_trec_eval_reads_what_we_write_in_our_order(tmp_path):
    text = gzip.decompress(written(tmp_path).read_bytes()).decode()
    assert pytrec_eval.parse_run(text.splitlines()) == RUN
    ranked = [line.split()[2:4] for line in text.splitlines() if line.startswith("1 ")]
    assert ranked == [[document, str(rank)] for document, rank in ranks(RUN["1"]).items()]


def test_the_ids_of_another_systems_run_are_taken_as_they_are(tmp_path):
    file = tmp_path / "bm25.txt"
    file.write_text("1 Q0 http://x/a%20b 1 2.5 other\n\n1\tQ0\tb 2 1 other\n")
    assert runs.read(file, "runs") == {"1": {"http://x/a%20b": 2.5, "b": 1.0}}


def test_a_run_ranks_its_task_from_its_file_or_from_a_folder_of_an_evaluation(tmp_path):
    file = written(tmp_path)
    assert file.relative_to(tmp_path).as_posix() == "multi{P,I}/followir_core17.run.gz"
    for path in (file, file.parent):
        assert ranker(path)(TASK, 10) == RUN
    assert ranker(file)(TASK, 1) == {"1": {"a": 0.5}, "2": {"c": 1e-12}}
    restricted = replace(TASK, excluded={"1": frozenset({"a"})})
    assert list(ranker(file)(restricted, 10)["1"]) == ["b", "c"]


@pytest.mark.parametrize(
    ("run", "counts"),
    [
        ({"1": {"a": 1.0}, "2": {"b": 1.0}, "3": {"c": 1.0}}, (0, 0)),
        ({"1": {"a": 1.0}}, (2, 0)),
        ({"1": {"a": 1.0, "x": 0.5}, "2": {"x": 1.0, "y": 0.5}}, (1, 2)),
        ({"1": {"x": 1.0}, "3": {"a": 1.0}}, (1, 1)),
        ({"1": {}, "2": {"a": 1.0}}, (2, 0)),
    ],
)
def test_queries_without_results_and_unknown_documents_are_counted(run, counts):
    counted = runs.coverage(replace(TASK, qrels={query: {"a": 1} for query in "123"}), run, "x")
    assert (counted["judged_queries"], counted["without_results"], counted["unknown_documents"]) == (3, *counts)


def test_a_run_of_unknown_documents_alone_is_refused_and_any_form_is_read(tmp_path):
    with pytest.raises(InputError, match=r"none of its documents is in the corpus of followir/core17, such as A"):
        runs.coverage(TASK, {"1": {"A": 1.0, "B": 0.5}}, "x")
    text = "\ufeff1 Q0 a 1 2 x\r\n2\tQ0\tan id\t1\t+1.0\tx\r\n".encode()
    for suffix, compress in {
        ".txt": bytes,
        ".gz": gzip.compress,
        ".zst": zstandard.compress,
        ".bz2": bz2.compress,
    }.items():
        (tmp_path / f"run{suffix}").write_bytes(compress(text))
        assert runs.read(tmp_path / f"run{suffix}", "model") == {"1": {"a": 2.0}, "2": {"an id": 1.0}}


def test_a_run_without_the_control_queries_has_as_given_and_inverted_only():
    task = instruction_following([record("tides"), record("bread")])
    controls = Controls.from_task(task)
    run = {query.id: dict.fromkeys(task.qrels[query.id], 1.0) for query in task.queries}
    measured = controls.measure(task, run)
    assert list(measured) == ["as given", "inverted"]
    assert measured["as given"]["p-MRR"] == score(task, run)["p-MRR"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("1 Q0 a 1 0.5\n", "line 1 is not `query Q0 document rank score name`"),
        ("1 Q0 a 1 0.5 x\n1 Q0 b 2 much x\n", "line 2 is not"),
        ("1 Q0 a 1 nan x\n", "document a of query 1 has the score nan"),
        ("1 Q0 a 1 1 x\n1 Q0 a 2 0.5 x\n", "line 2: document a of query 1 occurs twice"),
        ("", "is empty"),
    ],
)
def test_a_damaged_run_is_refused_with_its_line(tmp_path, content, message):
    file = tmp_path / "run.txt"
    file.write_text(content)
    with pytest.raises(InputError) as refused:
        runs.read(file, "runs")
    assert message in str(refused.value)
    assert str(refused.value).startswith(f"runs={file}: ")


def test_a_run_of_another_task_or_a_missing_one_is_refused(tmp_path):
    with pytest.raises(InputError, match="none of the queries of followir/core17, such as 1; its first is 7"):
        ranker(written(tmp_path, {"7": {"a": 1.0}}))(TASK, 10)
    with pytest.raises(InputError, match=r"models\.x\.model=.*nowhere"):
        ranker(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"no followir_core17\.run\.gz in this directory"):
        ranker(tmp_path)(TASK, 10)
    cut = tmp_path / "cut.gz"
    cut.write_bytes(gzip.compress(b"1 Q0 a 1 0.5 x\n")[:-6])
    with pytest.raises(InputError, match="copy it again"):
        runs.read(cut, "runs")
