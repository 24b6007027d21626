"""Evaluation on a real Ray cluster with a real model, against the same figures computed without any of our code."""

import json
import math

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from infembed_ray.config import EvaluateSettings
from infembed_ray.errors import InputError
from infembed_ray.evaluation.distributed import run
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.records import columns_of
from tests.evaluation.test_tasks import record

KINDS = ("positive", "negative_instruction", "negative_query")
ANSWERS = ("document_positive", "hard_negative_document_1", "hard_negative_document_2")
ASKED = (
    ("instruction_positive", "query_positive"),
    ("instruction_negative", "query_positive"),
    ("instruction_positive", "query_negative"),
)


def read_jsonl(path):
    with open(path, encoding="utf-8") as lines:  # str.splitlines would also break at U+0085
        return [json.loads(line) for line in lines]


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    directory = tmp_path_factory.mktemp("evaluation")
    topics = ("tides", "bread", "comets", "tax law", "the violin")
    records = write_jsonl(directory / "records.jsonl", [columns_of(record(topic)) for topic in topics])
    noise = [{"id": str(n), "passage": f"a passage about something else, number {n}"} for n in range(60)]
    return records, write_jsonl(directory / "distractors.jsonl", noise)


@pytest.fixture(scope="module")
def query_first(minilm, tmp_path_factory):
    """MiniLM as a checkpoint that carries another template."""
    path = tmp_path_factory.mktemp("checkpoint")
    InstructionEncoder.from_pretrained(minilm, template="query_first").save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def settings(files, minilm, query_first, tmp_path_factory):
    records, distractors = files
    return EvaluateSettings(
        records=records,
        models={"base": minilm, "query first": query_first},
        distractors=distractors,
        max_distractors=50,
        output=str(tmp_path_factory.mktemp("results")),
    )


@pytest.fixture(scope="module")
def published(ray_cluster, settings):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("infembed_ray.evaluation.distributed.CHUNK", 32)  # several chunks, the last one short
        return run(settings)


def independent_scores(model, rows, distractors, template):
    """Query -> (nDCG@10, MAP, p-MRR) with sentence-transformers; every query has one answer, so its rank tells all."""
    from sentence_transformers import SentenceTransformer

    encoder = SentenceTransformer(str(model), device="cpu")
    answers = [r[name] for r in rows for name in ANSWERS]
    corpus = encoder.encode(answers + distractors, normalize_embeddings=True).astype(np.float64)
    texts = [template.format(i=r[i], q=r[q]) for r in rows for i, q in ASKED]
    scores = encoder.encode(texts, normalize_embeddings=True) @ corpus.T

    def rank(query, document):
        return 1 + int((scores[query] > scores[query, document]).sum())

    expected = {}
    for query in range(len(texts)):
        own = rank(query, query)
        og, new = own, rank({0: query + 1, 1: query - 1, 2: query}[query % 3], query)
        expected[f"record/{rows[query // 3]['id']}/{KINDS[query % 3]}"] = (
            1 / math.log2(own + 1) if own <= 10 else 0.0,
            1 / own,
            None if query % 3 == 2 else new / og - 1 if og >= new else 1 - og / new,
        )
    return expected


def per_query(published, model):
    rows = pq.read_table(published.path / "per_query.parquet").to_pylist()
    return {r["query"]: (r["ndcg_at_10"], r["map_at_1000"], r["p_mrr"]) for r in rows if r["model"] == model}


def assert_equal_scores(found, expected):
    assert found.keys() == expected.keys()
    for query, values in expected.items():
        assert found[query] == pytest.approx(values, abs=1e-9), query


@pytest.mark.ray
def test_scores_equal_those_computed_apart_and_a_checkpoint_keeps_its_own_template(published, files, settings):
    rows, noise = map(read_jsonl, files)
    distractors = [r["passage"] for r in noise[:50]]
    for model, template in (("base", "{i} {q}"), ("query first", "{q} {i}")):
        expected = independent_scores(settings.models[model], rows, distractors, template)
        assert_equal_scores(per_query(published, model), expected)
    assert per_query(published, "base") != per_query(published, "query first")


@pytest.mark.ray
def test_results_hold_figures_conventions_and_counts(published, settings):
    results = json.loads((published.path / "results.json").read_text())
    counts = {"queries": 15, "passages": 15 + 50, "distractors": 50, "changed_queries": 10}
    assert published.manifest["counts"] == counts
    assert counts.items() <= results["task"].items()
    assert results["baseline"] == "base"
    assert set(results["conventions"]) == {"ranking", "depth", "nDCG", "MAP", "p-MRR"}
    for label, figures in results["models"].items():
        scores = np.array(list(per_query(published, label).values()), dtype=float)
        assert figures["p_mrr"] == pytest.approx(np.nanmean(scores[:, 2]))
        assert figures["map_at_1000"] == pytest.approx(scores[:, 1].mean())
        assert list(figures["ndcg_at_10"].values()) == pytest.approx([scores[k::3, 0].mean() for k in range(3)])
        assert figures["model"] == settings.models[label]
    assert "| query first |" in (published.path / "table.md").read_text()


@pytest.mark.ray
def test_a_second_run_does_nothing_and_another_baseline_is_another_output(published, settings):
    again = run(settings)
    assert (again.fresh, again.path) == (False, published.path)
    swapped = settings.model_copy(update={"models": dict(reversed(settings.models.items()))})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("infembed_ray.evaluation.distributed.connect", pytest.fail)
        with pytest.raises(pytest.fail.Exception):  # it starts to work
            run(swapped)


@pytest.mark.ray
def test_figures_on_real_records_equal_those_computed_apart(ray_cluster, shared_data, minilm, tmp_path):
    rows = read_jsonl(shared_data / "infir_mini" / "dev.jsonl")[:20]
    seeds = shared_data / "msmarco_seeds" / "seeds.jsonl"
    published = run(
        EvaluateSettings(
            records=write_jsonl(tmp_path / "records.jsonl", rows),
            models={"base": minilm},
            distractors=str(seeds),
            max_distractors=40,
            output=str(tmp_path / "out"),
        )
    )
    known = {r[name] for r in rows for name in ANSWERS}
    distractors = [r["passage"] for r in read_jsonl(seeds) if r["passage"] not in known][:40]
    assert_equal_scores(per_query(published, "base"), independent_scores(minilm, rows, distractors, "{i} {q}"))


@pytest.mark.ray
def test_embeddings_that_are_not_finite_are_refused_and_nothing_is_published(ray_cluster, files, minilm, tmp_path):
    encoder = InstructionEncoder.from_pretrained(minilm)
    with torch.no_grad():
        next(encoder.backbone.parameters()).fill_(float("nan"))
    encoder.save_pretrained(tmp_path / "diverged")
    settings = EvaluateSettings(
        records=files[0], models={"diverged": str(tmp_path / "diverged")}, output=str(tmp_path / "out")
    )
    with pytest.raises(InputError, match=r"^models\.diverged=.*: 30 of 30 embeddings are not finite"):
        run(settings)
    assert not list((tmp_path / "out").glob("*/manifest.json"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"models": {}}, "models is empty"),
        ({"models": {"base": "/no/such/model"}}, "models.base=/no/such/model: no such model directory"),
        ({"records": "/no/such/records.jsonl"}, "records=/no/such/records.jsonl: no such file"),
        ({"distractors": "/no/such/passages.jsonl"}, "distractors=/no/such/passages.jsonl: no such file"),
        ({"split": "nowhere"}, "no row has split=nowhere"),
    ],
)
def test_bad_input_is_refused_in_one_line_before_work_starts(settings, change, message, monkeypatch):
    monkeypatch.setattr("infembed_ray.evaluation.distributed.connect", pytest.fail)
    with pytest.raises(InputError) as error:
        run(settings.model_copy(update=change))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_distractors_without_text_are_refused(settings, tmp_path):
    file = write_jsonl(tmp_path / "passages.jsonl", [{"id": "1", "body": "words"}])
    with pytest.raises(InputError, match=r"column text is missing .*columns?"):
        run(settings.model_copy(update={"distractors": file}))
