"""mteb and our evaluation give the same values for the same files and models."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from statistics import fmean

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from infembed_ray.cli import main as cli
from infembed_ray.config.evaluation import EvaluateSettings, retriever_settings
from infembed_ray.errors import InputError
from infembed_ray.evaluation import distributed, mteb_adapter, results
from infembed_ray.evaluation.metrics import trec_measures
from infembed_ray.evaluation.results import Results, TaskSummary
from infembed_ray.evaluation.retrievers import baselines
from infembed_ray.evaluation.scoring import means, score
from infembed_ray.evaluation.search import exact_search
from infembed_ray.evaluation.tasks import catalogue, registry
from infembed_ray.evaluation.tasks.task import Figure, Query
from infembed_ray.modeling.encoder import InstructionEncoder
from tests.evaluation import published
from tests.evaluation.in_mteb import in_mteb, mteb_class, mteb_task, theirs
from tests.evaluation.retrievers import models

pytestmark = pytest.mark.integration

ROUNDING = 0.5e-5 + 1e-9
"""mteb rounds means of nDCG, MAP and recall to 5 decimals."""
FOLLOWIR = [f"followir/{name}" for name in published.FOLLOWIR]
ONE_OF_EACH = ["followir/core17", "mair/dd-15", "bright/leetcode", "instructir"]


# ----------------------------------------------------------------------------------------------------- both sides


@pytest.fixture(scope="module", autouse=True)
def _import_mteb():
    """Import mteb, which takes seconds, only when a test runs."""
    global mteb
    mteb = pytest.importorskip("mteb", reason="pip install 'infembed-ray[mteb]'")


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
        self.identity = encoder.identity
        self.known = {}

    def encode_queries(self, queries):
        return self._all([(q.query, q.instruction) for q in queries], queries, self.encoder.encode_queries)

    def encode_passages(self, texts):
        return self._all(texts, texts, self.encoder.encode_passages)

    def _all(self, keys, texts, encode):
        new = {key: text for key, text in zip(keys, texts, strict=True) if key not in self.known}
        if new:
            self.known |= dict(zip(new, encode(list(new.values())), strict=True))
        return np.stack([self.known[key] for key in keys])


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
        published.mair_like(root)
        published.bright_like(root)
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


@pytest.mark.parametrize("name", FOLLOWIR)
def test_followir_agrees_with_mteb(name, mirror, encoder):
    task = catalogue.load(name, str(mirror))
    other = in_mteb(name, mirror)
    scores = theirs(other, encoder)
    run, found = ours(task, encoder)
    assert_same_rankings(run, other.run)
    assert_same_values(task, run, other.seen)
    main, beside = task.figures
    averages = means(found)
    assert averages[main.name] == pytest.approx(scores["p-MRR"], abs=1e-6)
    assert averages[main.name] != 0
    key = beside.measure.lower().replace("@", "_at_")
    assert averages[beside.name] == pytest.approx(scores["og"][key], abs=ROUNDING)
    # mteb's figure of the whole task is over both versions of the queries: another number.
    both = fmean(v[beside.measure] for v in trec_measures(task.qrels, run, [beside.measure]).values())
    assert both == pytest.approx(scores[key], abs=ROUNDING)
    assert abs(both - averages[beside.name]) > 1e-3


def test_mair_agrees_with_a_task_of_mteb_over_the_same_files(mirror, encoder):
    task = catalogue.load("mair/dd-15", str(mirror))
    other = in_mteb("mair/dd-15", mirror)
    scores = theirs(other, encoder)
    run, found = ours(task, encoder)
    assert_same_rankings(run, other.run)
    assert_same_values(task, run, other.seen)
    assert means(found)["nDCG@10"] == pytest.approx(scores["ndcg_at_10"], abs=ROUNDING)
    assert 0.1 < scores["ndcg_at_10"] < 1


@pytest.mark.parametrize("subset", ["biology", "leetcode"])
def test_bright_agrees_with_version_1_1_of_mteb(subset, mirror, encoder):
    task = catalogue.load(f"bright/{subset}", str(mirror))
    other = in_mteb(f"bright/{subset}", mirror)
    scores = theirs(other, encoder)
    run, found = ours(task, encoder)
    assert_same_rankings(run, other.run)
    assert_same_values(task, run, other.seen)
    assert means(found)["nDCG@10"] == pytest.approx(scores["ndcg_at_10"], abs=ROUNDING)
    assert bool(task.excluded) == (subset == "leetcode")
    assert not any(task.excluded.get(query, frozenset()) & ranking.keys() for query, ranking in other.run.items())


def test_bright_differs_from_mtebs_first_version_only_in_excluded_documents(mirror, encoder):
    task = catalogue.load("bright/leetcode", str(mirror))
    other = mteb_task(mteb_class("BrightRetrieval"), mirror / published.BRIGHT, eval_langs={"leetcode": ["eng-Latn"]})()
    with pytest.warns(DeprecationWarning, match=r"v1\.1"):
        theirs(other, encoder)
    run, _ = ours(task, encoder)
    assert all(task.excluded[query] <= other.run[query].keys() for query in task.excluded)
    without = {q: {d: s for d, s in other.run[q].items() if d not in task.excluded[q]} for q in other.run}
    assert_same_rankings(run, without)


def test_instructir_agrees(mirror, encoder):
    task = catalogue.load("instructir", str(mirror))
    other = in_mteb("instructir", mirror)
    scores = theirs(other, encoder)
    run, found = ours(task, encoder)
    assert_same_rankings(run, other.run)
    assert_same_values(task, run, other.seen)
    averages = means(found)
    assert averages["Robustness@10"] == pytest.approx(scores["robustness_at_10"], abs=1e-6)
    assert averages["nDCG@10"] == pytest.approx(scores["ndcg_at_10"], abs=ROUNDING)
    assert 0 < averages["Robustness@10"] < averages["nDCG@10"]


@pytest.mark.parametrize("kind", ["classifier", "seq2seq"])
def test_rerankers_of_ours_have_the_same_scores_and_figures_in_mteb(kind, mirror, tmp_path, monkeypatch):
    path = models.bert(tmp_path / "bert", 1) if kind == "classifier" else models.t5(tmp_path / "t5")
    values = {"kind": kind, "model": path, "plain_query": "{query}", "instructed_query": "{query} {instruction}"}
    if kind == "seq2seq":
        values |= {"pair": "Query: {query} Document: {passage} Relevant:", "answers": ("▁true", "▁false")}
    settings = retriever_settings(values, "models.x")
    monkeypatch.setattr(baselines, "resolve", lambda *_: settings)
    adapted = mteb_adapter.load(path)
    assert isinstance(adapted, mteb.CrossEncoderProtocol)
    assert adapted.mteb_model_meta.is_cross_encoder
    assert adapted.mteb_model_meta.n_parameters == sum(p.numel() for p in adapted.reranker.model.parameters())
    task, other = catalogue.load("followir/core17", str(mirror)), in_mteb("followir/core17", mirror)
    scores = theirs(other, adapted)
    texts = published.texts(task)
    run = {}
    for query in task.queries:  # pair by pair, in one process
        pairs = [(query, texts[document]) for document in task.candidates[query.id]]
        run[query.id] = dict(zip(task.candidates[query.id], adapted.reranker.score(pairs).tolist(), strict=True))
    for query, ranking in run.items():
        assert ranking == pytest.approx(other.run[query], rel=1e-3), query  # other batches
    found = means(score(task, other.run))
    assert found["p-MRR"] == pytest.approx(scores["p-MRR"], abs=1e-6)
    assert found["p-MRR"] != 0
    assert found["MAP@1000"] == pytest.approx(scores["og"]["map_at_1000"], abs=ROUNDING)


@pytest.mark.ray
@pytest.mark.slow
def test_infembed_evaluate_agrees_with_mteb_on_the_same_checkpoint(mirror, checkpoint, encoder, ray_cluster, tmp_path):
    settings = {
        "tasks": ONE_OF_EACH,
        "data": str(mirror),
        "models": {"ours": checkpoint},
        "output": str(tmp_path / "out"),
    }
    found = results.read(distributed.run(EvaluateSettings(**settings)).path)
    for name in ONE_OF_EACH:
        other = in_mteb(name, mirror)
        theirs(other, encoder)
        expected = score(catalogue.load(name, str(mirror)), other.run)
        for figure, values in found.scores["ours"][name].items():
            assert values == pytest.approx(expected[figure], abs=1e-6), (name, figure)
    mteb_adapter.write(tmp_path, found)
    (of_model,) = mteb.ResultCache(tmp_path).load_results(validate_and_filter=True).model_results
    assert len(of_model.task_results) == 3


# ------------------------------------------------------------------------------------------- what the model is given


class Recorder:
    """An encoder that records its inputs."""

    identity = "0123456789abcdef"

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
    theirs(in_mteb("followir/core17", tmp_path), mteb_adapter.MtebEncoder(recorder, _meta()))
    assert recorder.queries == [Query("", query.query, query.instruction) for query in task.queries]
    assert recorder.passages == task.corpus["text"].to_pylist()


def _meta():
    return mteb.get_model_meta("mteb/baseline-random-encoder")


def test_texts_of_tasks_without_sides_are_queries():
    from torch.utils.data import DataLoader

    recorder = Recorder()
    loader = DataLoader([{"text": text} for text in "abc"], batch_size=2)
    adapted = mteb_adapter.MtebEncoder(recorder, _meta())
    metadata = mteb.get_task("STSBenchmark").metadata
    embeddings = adapted.encode(loader, task_metadata=metadata, hf_split="test", hf_subset="default")
    assert recorder.queries == [Query("", text) for text in "abc"]
    assert embeddings.shape == (3, 3)


def test_similarity_is_the_inner_product(encoder):
    assert isinstance(encoder, mteb.EncoderProtocol)
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(4, 5)).astype(np.float32), rng.normal(size=(4, 5)).astype(np.float32)
    assert encoder.similarity(a, b).numpy() == pytest.approx(a @ b.T, abs=1e-6)
    assert encoder.similarity(a[0], b).shape == (1, 4)
    assert encoder.similarity_pairwise(a, b).numpy() == pytest.approx(np.diag(a @ b.T), abs=1e-6)


# -------------------------------------------------------------------------------------------- commands and files


def test_mteb_run_from_the_shell_takes_a_checkpoint_of_ours(mirror, checkpoint, encoder, tmp_path, monkeypatch):
    name = "Core17InstructionRetrieval"
    local = mteb_task(mteb_class(name), mirror / published.FOLLOWIR["core17"])
    monkeypatch.setitem(importlib.import_module("mteb.get_tasks")._TASKS_REGISTRY, name, local)
    arguments = ["-m", checkpoint, "-t", name, "--output-folder", str(tmp_path), "--no-co2-tracker", "-v", "0"]
    assert cli.main(["mteb", "run", *arguments]) == 0
    (of_model,) = mteb.ResultCache(tmp_path).load_results().model_results
    assert of_model.model_name == "infembed/trained"
    assert of_model.model_revision == encoder.encoder.identity
    (result,) = of_model.task_results
    _, found = ours(catalogue.load("followir/core17", str(mirror)), encoder)
    assert result.get_score() == pytest.approx(means(found)["p-MRR"], abs=1e-6)


def test_mtebs_description_of_a_checkpoint_is_correct(loaded, checkpoint):
    meta = loaded.mteb_model_meta
    model = loaded.encoder.encoder
    assert (meta.name, meta.revision) == ("infembed/trained", loaded.encoder.identity)
    assert (meta.embed_dim, meta.max_tokens) == (384, 256)
    assert meta.n_parameters == sum(p.numel() for p in model.parameters())
    assert meta.memory_usage_mb == pytest.approx(meta.n_parameters * 4 / 2**20)
    registered = mteb.get_model(mteb_adapter.register(checkpoint)).mteb_model_meta
    assert registered.revision == meta.revision
    assert registered.to_dict()["loader"] == "infembed_ray"


def test_mteb_reads_our_figures_as_its_own_results(mirror, encoder, tmp_path):
    tasks = {name: catalogue.load(name, str(mirror)) for name in ONE_OF_EACH}
    scores = {name: ours(task, encoder)[1] for name, task in tasks.items()}
    found = Results(
        tasks={name: TaskSummary.from_task(task, name) for name, task in tasks.items()},
        models={"ours": {"identity": "abc"}},
        scores={"ours": scores},
        depth=1000,
    )
    mteb_adapter.write(tmp_path, found)
    (of_model,) = mteb.ResultCache(tmp_path).load_results(validate_and_filter=True).model_results
    assert (of_model.model_name, of_model.model_revision) == ("infembed/ours", "abc")
    read = {result.task_name: result for result in of_model.task_results}
    assert read.keys() == {"Core17InstructionRetrieval", "BrightLeetcodeRetrieval", "InstructIR"}
    assert read["Core17InstructionRetrieval"].get_score() == means(scores["followir/core17"])["p-MRR"]
    (core17,) = read["Core17InstructionRetrieval"].scores["test"]
    assert core17["og"] == {"map_at_1000": means(scores["followir/core17"])["MAP@1000"]}
    assert read["BrightLeetcodeRetrieval"].get_score() == means(scores["bright/leetcode"])["nDCG@10"]
    assert read["InstructIR"].get_score() == means(scores["instructir"])["Robustness@10"]
    file = next(tmp_path.rglob("model_meta.json"))
    mteb.models.ModelMeta.model_validate_json_resolved(file.read_text())


def test_figures_without_values_are_left_out_of_mtebs_results(tmp_path):
    figures = {name: (Figure("p-MRR", "p-MRR"), Figure("MAP@1000", "MAP@1000", "og")) for name in FOLLOWIR}
    values = {name: {"p-MRR": {"1-og": 0.5}, "MAP@1000": {"1-og": 0.25}} for name in FOLLOWIR}
    values["followir/news21"]["MAP@1000"] = values["followir/core17"]["p-MRR"] = {}
    asked = {name: TaskSummary(figures=of_task, groups={}) for name, of_task in figures.items()}
    mteb_adapter.write(tmp_path, Results(asked, {"ours": {}}, {"ours": values}, 1000))
    (of_model,) = mteb.ResultCache(tmp_path).load_results(validate_and_filter=True).model_results
    read = {result.task_name: result for result in of_model.task_results}
    assert read.keys() == {"Robust04InstructionRetrieval", "News21InstructionRetrieval"}
    assert read["News21InstructionRetrieval"].get_score() == 0.5
    assert "og" not in read["News21InstructionRetrieval"].scores["test"][0]


def test_the_version_in_result_files_is_the_one_that_these_tests_compare_with():
    assert mteb.__version__ == mteb_adapter.VERSION


def test_names_of_our_tasks_in_mteb_are_mtebs():
    for name, there in mteb_adapter.TASKS.items():
        metadata = mteb.get_task(there.name).metadata
        assert there.split in metadata.eval_splits, name
        assert there.main_score == metadata.main_score, name
        (source,) = registry.TASKS[name].sources
        assert {"path": source.repository, "revision": source.revision} == metadata.dataset, name


# ------------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["-m", "bm25"], "model=bm25: neither an encoder nor a reranker"),
        (["-m", "./absent"], "no such model directory"),
        ([], "-m is missing"),
        (["-m", "./absent", "--model-revision", "abc"], "--model-revision abc: give -m the directory of that revision"),
        (["-m", "./absent", "-t", "Core17InstructionRetrival"], "Did you mean: 'Core17InstructionRetrieval'"),
    ],
)
def test_bad_arguments_are_rejected_in_one_line(arguments, fault, capsys):
    assert cli.main(["mteb", "run", "-t", "Core17InstructionRetrieval", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert fault in line


def test_without_arguments_mteb_prints_its_help(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["mteb"])
    assert ended.value.code == 0
    assert "available-tasks" in capsys.readouterr().out


def test_without_mteb_the_module_still_writes_results(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "mteb", None)
    spec = importlib.util.spec_from_file_location("without_mteb", mteb_adapter.__file__)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "without_mteb", module)
    spec.loader.exec_module(module)
    for call in (lambda: module.load("x"), lambda: module.run(["available-tasks"])):
        with pytest.raises(InputError, match=r"infembed-ray\[mteb\]"):
            call()
    asked = TaskSummary(figures=(Figure("Robustness@10", "Robustness@10"),), groups={})
    values = {"instructir": {"Robustness@10": {"1": 0.5}}}
    module.write(tmp_path, Results({"instructir": asked}, {"ours": {}}, {"ours": values}, 1000))
    assert json.loads(next(tmp_path.rglob("InstructIR.json")).read_text())["task_name"] == "InstructIR"
