"""Evaluation on a Ray cluster with a real model, compared with figures computed without the package."""

import json
import os
import re
import subprocess
import sys
import time
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import pytrec_eval
import ray
import torch

from infembed_ray.cli.main import main
from infembed_ray.config.evaluation import EvaluateSettings, GateSettings, RetrieverSettings
from infembed_ray.errors import GateError
from infembed_ray.evaluation import results, tables
from infembed_ray.evaluation.chunks import TEXTS, of_queries, store_of
from infembed_ray.evaluation.distributed import ComputeChunk, run
from infembed_ray.evaluation.inputs import EvaluatedModel
from infembed_ray.evaluation.obedience import CONDITIONS
from infembed_ray.evaluation.retrievers import baselines, runs
from infembed_ray.evaluation.tasks import catalogue
from infembed_ray.evaluation.tasks.task import Query, score
from infembed_ray.modeling.encoder import InstructionEncoder
from tests.evaluation import published as layouts
from tests.evaluation.retrievers import models
from tests.evaluation.tasks.test_infir import record
from tests.modeling import backbones
from tests.support.files import write_jsonl
from tests.support.pages import Page


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    directory = tmp_path_factory.mktemp("evaluation")
    topics = ("tides", "bread", "comets", "tax law", "the violin")
    noise = [{"id": str(n), "passage": f"a passage about something else, number {n}"} for n in range(60)]
    records = write_jsonl(directory / "records.jsonl", [vars(record(topic)) for topic in topics])
    return str(records), str(write_jsonl(directory / "distractors.jsonl", noise))


@pytest.fixture(scope="module")
def query_first(minilm, tmp_path_factory):
    """MiniLM as a checkpoint with another template than the settings'."""
    path = tmp_path_factory.mktemp("checkpoint")
    InstructionEncoder.from_pretrained(minilm, template="query_first").save_pretrained(path)
    return str(path)


BENCHMARKS = ("bright/leetcode", "followir/core17")


FIRST = 5
"""Documents of BM25 that rerankers score for a task without candidates."""


@pytest.fixture(scope="module", autouse=True)
def one_foreign_instruction():
    """Ask each query under one foreign instruction: four cost as many more pairs and show nothing more."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("infembed_ray.evaluation.obedience._SHUFFLES", 1)
        yield


@pytest.fixture(scope="module")
def settings(files, query_first, tmp_path_factory):
    records, distractors = files
    mirror = tmp_path_factory.mktemp("mirror")
    layouts.followir_like(mirror)
    layouts.bright_like(mirror)
    return EvaluateSettings(
        tasks=BENCHMARKS,
        data=str(mirror),
        records=records,
        models={"query first": query_first, "bm25": models.BM25, "cross": models.cross_encoder(mirror)},
        first_stage="bm25",
        rerank=FIRST,
        distractors=distractors,
        max_distractors=50,
        output=str(tmp_path_factory.mktemp("results")),
    )


@pytest.fixture(scope="module")
def published(ray_cluster, settings):
    with small_chunks():
        return run(settings)


@contextmanager
def small_chunks():
    """Several chunks of passages and of queries, the last one short."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("infembed_ray.evaluation.chunks.TEXTS", 32)
        yield


@pytest.mark.ray
def test_candidates_exclusions_rerankers_and_bm25_rank_as_in_one_process(published, settings):
    evaluated = results.read(published.path).scores
    base, bm25, cross = (baselines.resolve(name, settings.models[name]) for name in ("query first", "bm25", "cross"))
    loaded = {"base": baselines.load(base), "bm25": partial(baselines.rank, bm25), "cross": baselines.load(cross)}
    for name in BENCHMARKS:
        task = catalogue.load(name, settings.data)
        assert task.excluded or task.candidates
        for label, ranked in in_one_process(task, **loaded).items():
            label = "query first" if label == "base" else label
            written = runs.read(
                published.path / "runs" / runs.file_name(label) / f"{runs.file_name(name)}.run.gz", "runs"
            )
            for query in task.queries:  # whole rankings, whatever the cut-off of the figures
                assert written[query.id] == pytest.approx(ranked[query.id], abs=1e-5), (label, name)
            # Scores of other batches differ in the last digits, which can swap two passages: figures are of those written.
            for figure, values in score(task, written).items():
                assert evaluated[label][name][figure] == pytest.approx(values, abs=1e-6), (label, name, figure)


def in_one_process(task, base, bm25, cross):
    """Return the rankings of three retrievers, computed without chunks or Ray."""
    texts = dict(zip(task.corpus["id"].to_pylist(), task.corpus["text"].to_pylist(), strict=True))
    products = base.encode_queries(task.queries) @ base.encode_passages(list(texts.values())).T
    rankings = {"base": {}, "bm25": bm25(task, 1000), "cross": {}}
    for query, row in zip(task.queries, products.tolist(), strict=True):
        candidates = None if task.candidates is None else task.candidates[query.id]
        allowed = [d for d in candidates or texts if d not in task.excluded.get(query.id, ())]
        of_document = dict(zip(texts, row, strict=True))
        rankings["base"][query.id] = {d: of_document[d] for d in allowed}
        reranked = [d for d in allowed if candidates or d in list(rankings["bm25"][query.id])[:FIRST]]
        scores = cross.score([(query, texts[d]) for d in reranked])
        rankings["cross"][query.id] = dict(zip(reranked, scores.tolist(), strict=True))
    return rankings


@pytest.mark.ray
def test_published_counts_tasks_and_models(published, settings):
    evaluated = results.read(published.path)
    counted = [asked.about for asked in evaluated.tasks.values()]
    assert list(evaluated.tasks) == [*BENCHMARKS, "records"]
    assert counted[2].items() >= {"queries": 15, "passages": 15 + 50, "distractors": 50}.items()
    totals = {name: sum(about[name] for about in counted) for name in ("queries", "passages")}
    assert published.manifest["counts"] == {"tasks": 3, **totals}
    assert published.manifest["figures"] == evaluated.figures
    assert evaluated.models["query first"]["model"] == settings.models["query first"]
    assert "| query first |" in (published.path / "table.md").read_text()
    assert "query first" in Page((published.path / "report.html").read_text()).text


def test_two_runs_are_compared_without_ray(tmp_path, monkeypatch):
    """Values and significance by pytrec_eval and by all exchanges of the five differences."""
    monkeypatch.setattr("infembed_ray.evaluation.distributed.connect", lambda: pytest.fail("no cluster is needed"))
    rng = np.random.default_rng(1)
    qrels = {f"q{q}": {f"d{d}": int(rng.integers(0, 3)) for d in range(8)} | {"d0": 1} for q in range(5)}
    rankings = {
        name: {q: {f"d{d}": float(rng.random()) for d in range(12)} for q in qrels} for name in ("theirs", "mine")
    }
    write_jsonl(tmp_path / "corpus.jsonl", [{"_id": f"d{d}", "text": f"passage {d}"} for d in range(12)])
    write_jsonl(tmp_path / "queries.jsonl", [{"_id": q, "text": f"query {q}"} for q in qrels])
    judged = [{"query-id": q, "corpus-id": d, "score": grade} for q in qrels for d, grade in qrels[q].items()]
    (tmp_path / "qrels").mkdir()
    write_jsonl(tmp_path / "qrels" / "test.jsonl", judged)
    for name, ranking in rankings.items():
        lines = [f"{q} Q0 {d} 0 {score!r} x\n" for q, docs in ranking.items() for d, score in docs.items()]
        (tmp_path / f"{name}.run").write_text("".join(lines))
    given = {name: {"kind": "run", "model": str(tmp_path / f"{name}.run")} for name in rankings}
    task = str(tmp_path)
    settings = {"tasks": [task], "measures": ["nDCG@10"], "models": given}

    done = run(EvaluateSettings(**settings, output=str(tmp_path / "out")))

    evaluated = results.read(done.path)
    evaluator = pytrec_eval.RelevanceEvaluator(qrels, {"ndcg_cut.10"})
    for name, ranking in rankings.items():
        expected = {q: values["ndcg_cut_10"] for q, values in evaluator.evaluate(ranking).items()}
        assert evaluated.scores[name][task]["nDCG@10"] == pytest.approx(expected, abs=1e-9)
    changes = [
        evaluated.scores["mine"][task]["nDCG@10"][q] - evaluated.scores["theirs"][task]["nDCG@10"][q] for q in qrels
    ]
    sums = [abs(sum(s * c for s, c in zip(signs, changes, strict=True))) for signs in product((1, -1), repeat=5)]
    p_value = sum(total >= abs(sum(changes)) - 1e-12 for total in sums) / 32
    column = tables.columns(evaluated)[task][0]
    assert tables.cells(evaluated, column)["mine"].p == pytest.approx(p_value)
    assert "Where the models differ most" in Page((done.path / "report.html").read_text()).text


def stored(directory):
    """Return every array of a store with its time of writing."""
    return {file: file.stat().st_mtime_ns for file in directory.rglob("*.npy")}


@pytest.mark.ray
def test_stored_chunks_are_reused(published, settings, query_first, tmp_path):
    root = Path(settings.output) / "embeddings"
    before = stored(store_of(root, baselines.identity(baselines.resolve("x", query_first))))
    gone, *_ = sorted(before)
    content = gone.read_bytes()
    gone.unlink()
    change = {
        "models": {"query first": query_first},
        "first_stage": None,
        "output": str(tmp_path),
        "embeddings": str(root),
    }
    with small_chunks():
        again = run(settings.model_copy(update=change))
    assert again.manifest["figures"]["query first"] == published.manifest["figures"]["query first"]
    assert gone.read_bytes() == content
    after = stored(root)
    assert {file for file in before if after[file] != before[file]} == {gone}


@pytest.mark.ray
def test_controls_are_asked_of_every_model_and_are_in_every_report(published, settings):
    evaluated = results.read(published.path)
    assert list(evaluated.obedience) == list(settings.models)  # BM25 is a model here
    assert all(list(of_model) == ["followir/core17", "records"] for of_model in evaluated.obedience.values())
    means = evaluated.obedience_means
    for label in settings.models:
        own = means[label]["records"]
        assert list(own) == list(CONDITIONS)
        assert own["as given"]["p-MRR"] == evaluated.figures[label]["records"]["p-MRR"]
        assert own["query only"]["p-MRR"] == 0
        assert own["inverted"]["p-MRR"] == pytest.approx(-own["as given"]["p-MRR"])
        assert own["shuffled"]["p-MRR"] != own["generic"]["p-MRR"]
    text = (published.path / "table.md").read_text()
    assert "## Obedience, records" in text
    assert "| *query first* |" in text
    assert "| shuffled |" in text
    assert "Obedience, followir/core17" in (published.path / "report.html").read_text()


@pytest.mark.ray
def test_a_gate_of_a_finished_evaluation_exits_with_a_line_per_failure(published, settings, capsys):
    given = {"gate": "cross", "gates": GateSettings(tolerance=0, foreign_share=0)}
    with pytest.raises(GateError) as failed:
        run(settings.model_copy(update=given))
    assert all(line.endswith(": fails") for line in failed.value.args)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "infembed_ray.evaluation.distributed.run", lambda settings: run(settings.model_copy(update=given))
        )
        arguments = [f"--config={settings_file(settings)}"]
        assert main(["evaluate", *arguments]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert sum(line.startswith("infembed evaluate: gate=cross: ") for line in lines) == len(failed.value.args)


@pytest.mark.ray
def test_published_runs_give_the_same_figures_without_the_model(published, settings, tmp_path):
    folder = published.path / "runs"
    again = run(
        settings.model_copy(
            update={
                "models": {"again": RetrieverSettings(kind="run", model=str(folder / "query_first"))},
                "first_stage": None,
                "output": str(tmp_path / "again"),
            }
        )
    )
    before, evaluated = results.read(published.path), results.read(again.path)
    assert evaluated.scores["again"] == before.scores["query first"]
    assert evaluated.obedience["again"] == before.obedience["query first"]
    assert list(evaluated.obedience) == ["again", "BM25"]
    assert evaluated.obedience["BM25"]["records"].keys() == set(CONDITIONS)


def settings_file(settings):
    file = Path(settings.output) / "settings.json"
    file.write_text(settings.model_dump_json(exclude_unset=True))
    return file


@pytest.mark.ray
def test_embeddings_that_are_not_finite_are_rejected_and_not_stored(ray_cluster, minilm, tmp_path):
    encoder = InstructionEncoder.from_pretrained(minilm)
    with torch.no_grad():  # finite weights whose products are not: others cannot be saved
        for name, weight in encoder.backbone.named_parameters():
            weight.fill_(3e38) if name.endswith("LayerNorm.weight") else None
    encoder.save_pretrained(tmp_path / "diverged")
    model = EvaluatedModel("diverged", baselines.resolve("diverged", str(tmp_path / "diverged")), {}, {})
    chunks = ray.put(of_queries([Query("1", "what is bread")]))
    row = ComputeChunk(model, tmp_path / "store", chunks, "cpu", 1024)({"id": 0})
    assert re.match(r"models\.diverged=.*: its embedding of query 'what is bread' is not finite", row["fault"])
    assert not stored(tmp_path / "store")


def evaluate_on_nodes(root, task, model, kill):
    """Evaluate on three nodes, one of which may be killed at half of the chunks; return the files of the store."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": 80 * 2**20})
    nodes = [cluster.add_node(num_cpus=1, object_store_memory=80 * 2**20) for _ in range(3)]
    settings = {"tasks": f"[{task}]", "models.tiny": model, "output": root / "out", "embeddings": root, "actors": 3}
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "infembed_ray.cli", "evaluate", *(f"{k}={v}" for k, v in settings.items())],
            env=os.environ | {"RAY_ADDRESS": cluster.address},
        )
        while process.poll() is None:
            time.sleep(0.05)
            if kill and len(stored(root)) >= CHUNKS // 2:
                cluster.remove_node(nodes[0], allow_graceful=False)
                kill = False
        assert not kill
        assert process.returncode == 0
    finally:
        cluster.shutdown()
    (manifest,) = (root / "out").glob("*/manifest.json")
    files = {file.relative_to(root): file.read_bytes() for file in stored(root)}
    return files, json.loads(manifest.read_text())["figures"]


CHUNKS = 24


@pytest.mark.slow
def test_a_node_killed_while_it_encodes_changes_nothing(tmp_path):
    task = tmp_path / "task"
    (task / "qrels").mkdir(parents=True)
    words = ["aspirin", "bread", "nurses", "passage", "dosed", "brand", "plain", "names"]
    passages = [" ".join(words[n // 8**k % 8] for k in range(12)) + f" {n}" for n in range((CHUNKS - 1) * TEXTS)]
    write_jsonl(task / "corpus.jsonl", [{"_id": str(n), "title": "", "text": text} for n, text in enumerate(passages)])
    write_jsonl(task / "queries.jsonl", [{"_id": "q", "text": "aspirin for nurses"}])
    (task / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq\t0\t1\n")
    model = backbones.write("modernbert", tmp_path / "model")
    files, figures = evaluate_on_nodes(tmp_path / "undisturbed", task, model, kill=False)
    assert len(files) == CHUNKS
    assert evaluate_on_nodes(tmp_path / "disturbed", task, model, kill=True) == (files, figures)
