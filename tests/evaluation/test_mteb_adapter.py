"""mteb and our evaluation give the same values for the same files and models."""

import importlib.util
from statistics import fmean

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from infembed_ray.config.evaluation import EvaluateSettings
from infembed_ray.errors import InputError
from infembed_ray.evaluation import mteb_adapter, results
from infembed_ray.evaluation.distributed import run as evaluate
from infembed_ray.evaluation.metrics import trec_measures
from infembed_ray.evaluation.retrievers import baselines, runs
from infembed_ray.evaluation.search import exact_search
from infembed_ray.evaluation.tasks import catalogue
from infembed_ray.evaluation.tasks.task import Query, means, score
from infembed_ray.modeling.encoder import InstructionEncoder
from tests.evaluation import published
from tests.evaluation.in_mteb import NAMES, in_mteb, theirs

pytestmark = pytest.mark.integration

ROUNDING = 0.5e-5 + 1e-9
"""mteb rounds means of nDCG, MAP and recall to 5 decimals."""


# ----------------------------------------------------------------------------------------------------- both sides


@pytest.fixture(scope="module", autouse=True)
def _import_mteb():
    """Import mteb, which takes seconds, only when a test runs."""
    global mteb
    mteb = pytest.importorskip("mteb", reason="pip install 'mteb'")


@pytest.fixture(scope="module")
def checkpoint(minilm, tmp_path_factory):
    """MiniLM with another template than mteb's."""
    path = tmp_path_factory.mktemp("checkpoint") / "trained"
    InstructionEncoder.from_pretrained(minilm, template="instruct_query").save_pretrained(path)
    return str(path)


class Remembering:
    """Encodes each distinct text once, for mteb and for us."""

    def __init__(self, encoder):
        self.encoder = encoder
        self.embeddings = {}

    def encode_queries(self, queries):
        return self._all([(q.query, q.instruction) for q in queries], queries, self.encoder.encode_queries)

    def encode_passages(self, texts):
        return self._all(texts, texts, self.encoder.encode_passages)

    def _all(self, keys, texts, encode):
        new = {key: text for key, text in zip(keys, texts, strict=True) if key not in self.embeddings}
        if new:
            self.embeddings |= dict(zip(new, encode(list(new.values())), strict=True))
        return np.stack([self.embeddings[key] for key in keys])


@pytest.fixture(scope="module")
def loaded(checkpoint):
    return mteb_adapter.load(checkpoint)


@pytest.fixture(scope="module")
def encoder(loaded):
    return mteb_adapter.MtebEncoder(Remembering(loaded.encoder), loaded.mteb_model_meta)


@pytest.fixture(scope="module")
def mirror(tmp_path_factory):
    import datasets

    root = tmp_path_factory.mktemp("mirror")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", root / "cache")
        published.followir_like(root)
        published.bright_like(root)
        published.mfollowir_like(root)
        published.ifir_like(root, ["fiqa", "nfcorpus"])
        published.nevir_like(root)
        yield published.instructir_like(root)


def ours(task, encoder):
    """Run a task in one process; return rankings and values."""
    ids = [query.id for query in task.queries]
    rankings = exact_search(
        encoder.encoder.encode_queries(task.queries),
        encoder.encoder.encode_passages(task.corpus["text"].to_pylist()),
        task.corpus["id"],
        candidates=None if task.candidates is None else [task.candidates[query] for query in ids],
        excluded=[task.excluded.get(query, ()) for query in ids],
    )
    run = dict(zip(ids, rankings, strict=True))
    return run, score(task, run)


def assert_same_rankings(mine, other):
    assert mine.keys() == other.keys()
    for query, ranking in mine.items():
        assert ranking == pytest.approx(other[query], abs=1e-6), query  # the same documents, too


def assert_same_values(task, run, seen):
    """Return every value that mteb computed, per query."""
    names = {"nDCG@10": "ndcg_cut_10", "nDCG@5": "ndcg_cut_5", "MAP@1000": "map_cut_1000"}
    values = trec_measures(task.qrels, run, list(names))
    assert values.keys() == seen.keys()
    for query, of_query in values.items():
        assert {names[m]: value for m, value in of_query.items()} == pytest.approx(seen[query], abs=1e-6), query


# --------------------------------------------------------------------------------------------------- they agree


def compared(name, mirror, encoder):
    """Evaluate a task in both; rankings and values must agree. Return it with our run and means, and mteb's task and scores."""
    task, other = catalogue.load(name, str(mirror)), in_mteb(name, mirror)
    scores = theirs(other, encoder)
    run, scored = ours(task, encoder)
    assert_same_rankings(run, other.run)
    assert_same_values(task, run, other.seen)
    return task, run, means(scored), other, scores


@pytest.mark.parametrize("name", ["followir/news21", "followir/core17", "mfollowir/rus", "mfollowir-cross/eng-zho"])
def test_followir_agrees_with_mteb(name, mirror, encoder):
    task, run, averages, _, scores = compared(name, mirror, encoder)
    main, beside = task.figures
    assert averages[main.name] == pytest.approx(scores["p-MRR"], abs=1e-6)
    assert averages[main.name] != 0
    key = beside.measure.lower().replace("@", "_at_")
    assert averages[beside.name] == pytest.approx(scores["og"][key], abs=ROUNDING)
    # mteb's figure of the whole task is over both versions of the queries: another number.
    both = fmean(v[beside.measure] for v in trec_measures(task.qrels, run, [beside.measure]).values())
    assert both == pytest.approx(scores[key], abs=ROUNDING)
    assert abs(both - averages[beside.name]) > 1e-3


@pytest.mark.parametrize("subset", ["biology", "leetcode"])
def test_bright_agrees_with_version_1_1_of_mteb(subset, mirror, encoder):
    task, _, averages, other, scores = compared(f"bright/{subset}", mirror, encoder)
    assert averages["nDCG@10"] == pytest.approx(scores["ndcg_at_10"], abs=ROUNDING)
    assert bool(task.excluded) == (subset == "leetcode")
    assert not any(task.excluded.get(query, frozenset()) & ranking.keys() for query, ranking in other.run.items())


def test_instructir_agrees(mirror, encoder):
    _, _, averages, _, scores = compared("instructir", mirror, encoder)
    assert averages["Robustness@10"] == pytest.approx(scores["robustness_at_10"], abs=1e-6)
    assert averages["nDCG@10"] == pytest.approx(scores["ndcg_at_10"], abs=ROUNDING)
    assert 0 < averages["Robustness@10"] < averages["nDCG@10"]


@pytest.mark.parametrize("name", ["ifir/fiqa", "ifir/nfcorpus"])
def test_ifir_agrees_over_all_queries_and_by_level(name, mirror, encoder):
    _, _, averages, _, scores = compared(name, mirror, encoder)
    assert averages.pop("nDCG@20") == pytest.approx(scores["ndcg_at_20"], abs=ROUNDING)
    levels = {f"nDCG@20 v{key[-1]}": value for key, value in scores.get("level_scores", {}).items()}
    assert averages == pytest.approx(levels, abs=1e-6)
    assert len(set(averages.values())) == (3 if name == "ifir/fiqa" else 0)


def test_nevir_agrees(mirror, encoder):
    _, _, averages, _, scores = compared("nevir", mirror, encoder)
    assert 0 < averages["paired accuracy"] < 1
    assert averages["paired accuracy"] == pytest.approx(scores["paired_accuracy"], abs=1e-6)


def test_mtebs_rankings_as_run_files_have_its_figures(mirror, encoder, ray_cluster, tmp_path):
    figures = {"followir/core17": "p-MRR", "instructir": "Robustness@10", "nevir": "paired accuracy"}
    keys = ("p-MRR", "robustness_at_10", "paired_accuracy")
    expected = {}
    for name, key in zip(figures, keys, strict=True):
        *_, other, scores = compared(name, mirror, encoder)
        runs.write(tmp_path / "runs", "theirs", name, other.run)
        expected[name] = scores[key]
    models = {"theirs": {"kind": "run", "model": str(tmp_path / "runs" / "theirs")}}
    done = evaluate(
        EvaluateSettings(tasks=list(figures), data=str(mirror), models=models, output=str(tmp_path / "out"))
    )
    measured = results.read(done.path).figures["theirs"]
    assert {name: measured[name][figure] for name, figure in figures.items()} == pytest.approx(expected, abs=1e-6)
    table = (done.path / "table.md").read_text()
    assert all(figure in table for figure in figures.values())


# ------------------------------------------------------------------------------------------- what the model is given


class Recorder:
    """An encoder that records its inputs."""

    def __init__(self):
        self.queries, self.passages = [], []

    def encode_queries(self, queries):
        self.queries += queries
        return np.eye(len(queries), 3, dtype=np.float32)

    def encode_passages(self, texts):
        self.passages += texts
        return np.eye(len(texts), 3, dtype=np.float32)


def test_mteb_passes_query_and_instruction_separately(tmp_path, monkeypatch):
    # Beside the other mirror's, these files would not be read: `datasets` goes by a directory's name.
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    published.followir_like(tmp_path)
    (file,) = (tmp_path / published.FOLLOWIR["core17"] / "corpus").iterdir()
    rows = pq.read_table(file).to_pylist()
    rows[0] |= {"title": "", "text": f"  {rows[0]['text']}"}
    rows[1] |= {"text": f"{rows[1]['text']} \n"}
    pq.write_table(pa.Table.from_pylist(rows), file)
    task = catalogue.load("followir/core17", str(tmp_path))
    recorder = Recorder()
    meta = mteb.get_model_meta("mteb/baseline-random-encoder")
    theirs(in_mteb("followir/core17", tmp_path), mteb_adapter.MtebEncoder(recorder, meta))
    assert recorder.queries == [Query("", query.query, query.instruction) for query in task.queries]
    assert recorder.passages == task.corpus["text"].to_pylist()


def test_similarity_is_the_inner_product(encoder):
    assert isinstance(encoder, mteb.EncoderProtocol)
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(4, 5)).astype(np.float32), rng.normal(size=(4, 5)).astype(np.float32)
    assert encoder.similarity(a, b).numpy() == pytest.approx(a @ b.T, abs=1e-6)
    assert encoder.similarity(a[0], b).shape == (1, 4)
    assert encoder.similarity_pairwise(a, b).numpy() == pytest.approx(np.diag(a @ b.T), abs=1e-6)


def test_mtebs_description_names_the_checkpoint_and_its_weights(loaded, checkpoint):
    meta = loaded.mteb_model_meta
    expected = baselines.identity(baselines.resolve("x", checkpoint))
    assert (meta.name, meta.revision) == ("infembed/trained", expected)


def test_our_tasks_read_the_repositories_and_commits_of_mtebs():
    for name, there in NAMES.items():
        entry = catalogue.TASKS[name]
        metadata = mteb.get_task(there).metadata
        assert {"path": entry.repositories[0], "revision": entry.revision} == metadata.dataset, name
        if name.startswith("bright-pro/"):
            assert {"query": entry.options["instruction"]} == metadata.prompt


@pytest.mark.parametrize(
    ("model", "fault"),
    [("bm25", "model=bm25: is no encoder"), ("./absent", "no such model directory")],
)
def test_what_is_no_model_of_mteb_is_rejected(model, fault):
    with pytest.raises(InputError, match=fault):
        mteb_adapter.load(model)


def test_without_mteb_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install 'mteb"):
        mteb_adapter.load("x")
