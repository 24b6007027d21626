"""Training of rerankers (`head=score`) against plain transformers in float64, and what it publishes in other libraries."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from infembed_ray.config.training import TrainSettings
from infembed_ray.errors import InputError
from infembed_ray.evaluation.retrievers import baselines
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.modeling.formats import Question
from infembed_ray.modeling.tokenizer import TextFormat
from infembed_ray.records.tuples import Example
from infembed_ray.serving.reranking import PLAIN_CLASSIFIER
from infembed_ray.training import export as exporting
from infembed_ray.training.backbone import load_encoder
from infembed_ray.training.collate import collate, contrasted
from infembed_ray.training.launch import run
from infembed_ray.training.losses import Objective, marginal_loss
from infembed_ray.training.observability.logs import read_metrics
from infembed_ray.training.scores import score_batch
from tests.evaluation.retrievers import models
from tests.modeling import backbones
from tests.support.files import write_jsonl
from tests.training.checkpoints.runs import Run, run_all
from tests.training.test_collate import record

EXAMPLE = Example("e", "what is bread", ("baked from flour", "flour and water"), ("aspirin", "a drug", "no brand"))
SCORE = {"head": "score", "objective": "uni{P}", "temperature": 1.0, "instruction_negatives": 5}


def settings_of(model="-", **changes):
    return TrainSettings.from_mapping({"records": "-", "output": "-", "model": str(model), "head": "score"} | changes)


FAMILIES = {
    "bert": lambda path: models.bert(path, 0),
    "a trained bert": lambda path: models.bert(path, 1),
    "llama": models.llama,
    "qwen2": lambda path: backbones.write("qwen2", path),
    "modernbert": lambda path: backbones.write("modernbert", path),
}


@pytest.mark.integration
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_match_plain_transformers_in_float64(family, tmp_path):
    """Each row is a softmax over its passages; only transformers' tokenizer, classifier and cross-entropy are used."""
    path = FAMILIES[family](tmp_path)
    long = replace(record(2), document_positive="bread is baked from flour " * 9)
    settings = settings_of(path, hard_negatives=None)
    encoder = load_encoder(settings).eval()
    mark = "\nPassage:\n" if family in ("llama", "qwen2") else ""  # decoders have no token between two texts
    plain = AutoModelForSequenceClassification.from_config(encoder.backbone.config, attn_implementation="eager")
    plain.load_state_dict(encoder.backbone.state_dict())
    plain, tokenizer = plain.double().eval(), AutoTokenizer.from_pretrained(path)
    rows = [("what is bread", ["baked from flour", "aspirin", "a drug", "no brand"])]
    for r in (record(1), long):
        passages = [r.document_positive, r.hard_negative_document_1, r.hard_negative_document_2]
        rows.append((f"{r.instruction_positive} {r.query_positive}", passages))
        rows.append((f"{r.instruction_negative} {r.query_positive}", [passages[n] for n in (1, 0, 2)]))
        rows.append((f"{r.instruction_positive} {r.query_negative}", [passages[n] for n in (2, 0, 1)]))
    of_rows = []
    for asked, passages in rows:
        logits = [plain(**tokenizer([asked], [mark + p], return_tensors="pt")).logits[0, 0] for p in passages]
        of_rows.append(torch.nn.functional.cross_entropy(torch.stack(logits), torch.tensor(0)))
    expected = torch.stack(of_rows).mean()
    expected.backward()

    objective = Objective.from_settings(settings)
    batch = collate(encoder, [[record(7)], [EXAMPLE, record(1), long]], 1, objective)
    [(order, layout)] = encoder.layouts(batch.passages, 1 << 40)
    scores = score_batch(objective, batch, torch.empty(0), encoder(layout)[torch.tensor(order).argsort()])
    loss = marginal_loss(objective, scores.positive, scores.negatives, settings.temperature)
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert scores.negatives["P"].mask.sum(dim=1).tolist() == [3, 2, 2, 2, 2, 2, 2]
    for (name, wanted), got in zip(plain.named_parameters(), encoder.backbone.parameters(), strict=True):
        torch.testing.assert_close(got.grad, wanted.grad.float(), rtol=1e-3, atol=1e-5, msg=name)


@given(st.permutations(range(3)), st.integers(0, 2))
def test_candidates_do_not_depend_on_the_order_of_passages_and_never_answer_the_row(order, shared):
    shuffled = replace(EXAMPLE, negatives=tuple(EXAMPLE.negatives[n] for n in order))
    (row,) = contrasted(shuffled)
    assert contrasted(EXAMPLE) == [row]
    assert set(row.negatives) == set(EXAMPLE.negatives)
    # Rows that ask the same have each other's passages as further answers.
    plain = record(1)
    asks = [{}, {"instruction_negative": plain.instruction_positive}, {"query_negative": plain.query_positive}][shared]
    rows = contrasted(replace(plain, **asks))
    answers = {
        (t.instruction, t.query): {o.passage for o in rows if (o.instruction, o.query) == (t.instruction, t.query)}
        for t in rows
    }
    for t in rows:
        assert set(t.negatives) == {o.passage for o in rows} - answers[t.instruction, t.query]


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Settings and output of a short training."""
    root = tmp_path_factory.mktemp("reranker")
    settings = settings_of(
        models.bert(root / "model", 0),
        records=str(write_jsonl(root / "records.jsonl", map(vars, map(record, range(3))))),
        output=str(root / "out"),
        launcher="process",
        workers=1,
        learning_rate=1e-3,
    )
    return settings, run(settings)


@pytest.mark.integration
def test_the_published_reranker_scores_alike_in_sentence_transformers_and_in_evaluate_and_serve(published, monkeypatch):
    from sentence_transformers import CrossEncoder

    settings, output = published
    asked = [Question("query 9", "for nurses"), Question("query 9", "in plain words"), Question("query 9")]
    pairs = [(q, passage) for q in asked for passage in ("aspirin drug r9", "bread flour r9", "")]
    texts = [(f"{q.instruction} {q.query}" if q.instruction else q.query, passage) for q, passage in pairs]
    formats = {"instructed_query": "{instruction} {query}", "plain_query": "{query}"}
    ours = baselines.load(baselines.resolve("x", {"kind": "classifier", "model": str(output.path), **formats})).score(
        pairs
    )
    np.testing.assert_allclose(CrossEncoder(str(output.path), device="cpu").predict(texts), ours, atol=1e-5)
    assert ours.std() > 0.01
    card = (output.path / "README.md").read_text()
    monkeypatch.chdir(output.path)
    exec(re.search(r"```python\n(.*?)```", card, re.DOTALL)[1], {})
    assert "pipeline_tag: text-ranking" in card
    assert run(settings).path == output.path  # finished, so it trains nothing

    with pytest.raises(InputError, match="is a reranker"):
        InstructionEncoder.from_pretrained(str(output.path))
    again = load_encoder(settings.model_copy(update={"model": str(output.path)}))  # goes on with its own head
    saved = load_file(output.path / "model.safetensors")
    assert all(torch.equal(weight, saved[name]) for name, weight in again.backbone.state_dict().items())


@pytest.mark.integration
@pytest.mark.parametrize("family", ["llama", "qwen2", "bert"])
def test_training_evaluation_and_serving_read_pairs_alike_as_the_checkpoint_says(family, tmp_path):
    encoder = load_encoder(settings_of(FAMILIES[family](tmp_path / "model"), passage_length=24)).eval()
    encoder.save_pretrained(tmp_path / "saved")
    asked = [Question("what is bread", "for nurses"), Question("how is aspirin dosed " * 20)]
    passages = ["", "aspirin is a drug", "bread is baked from flour and water " * 9]
    pairs = [(query, passage) for query in asked for passage in passages]
    texts = [(f"{q.instruction} {q.query}" if q.instruction else q.query, passage) for q, passage in pairs]
    expected = encoder.tokenize_pairs(texts)
    assert max(map(len, expected)) == 24
    if family == "qwen2":
        assert encoder.tokenizer.decode(expected[1].ids) == "for nurses what is bread\nPassage:\naspirin is a drug"

    def ids(path, **changes):
        given = {**PLAIN_CLASSIFIER, "model": str(path), **changes}
        reranker = baselines.load(baselines.resolve("x", given))
        return [row["input_ids"] for row in reranker.tokenized(pairs)]

    assert ids(tmp_path / "saved") == [tokens.ids for tokens in expected]
    assert max(map(len, ids(tmp_path / "saved", pair_length=16))) == 16
    again = load_encoder(settings_of(tmp_path / "saved"), "meta")  # goes on as it was trained
    assert again.text == encoder.text
    assert load_encoder(settings_of(tmp_path / "saved", passage_length=48), "meta").text.passage_length == 48

    (tmp_path / "saved" / "infembed.json").write_text('{"head": "score"}')  # an earlier version wrote this
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    plain = tokenizer([text for text, _ in texts[:3]], passages)
    assert ids(tmp_path / "saved")[:3] == plain["input_ids"]
    assert load_encoder(settings_of(tmp_path / "saved"), "meta").text == TextFormat()


@pytest.mark.integration
def test_a_trained_reranker_is_trained_on_and_written_file_by_file(tmp_path, monkeypatch):
    model = models.bert(tmp_path / "model", 1)
    rows = write_jsonl(tmp_path / "records.jsonl", map(vars, map(record, range(3))))
    settings = settings_of(
        model, records=str(rows), output=str(tmp_path / "out"), launcher="process", workers=1, passage_length=40
    )
    monkeypatch.setattr(exporting, "_export_whole", None)
    output = run(settings).path
    before, after = (load_file(f"{path}/model.safetensors") for path in (model, output))
    assert before.keys() == after.keys()
    assert not torch.equal(before["classifier.weight"], after["classifier.weight"])
    assert 'CrossEncoder(".", max_length=40)' in (output / "README.md").read_text()
    scorer = baselines.load(baselines.resolve("x", {**PLAIN_CLASSIFIER, "model": str(output)}))
    assert scorer.score([(Question("what is bread"), "flour")]).shape == (1,)


@pytest.mark.integration
def test_resumed_runs_and_runs_of_more_workers_give_the_same_reranker(tmp_path):
    tiny = backbones.write("modernbert", tmp_path / "tiny")

    def of(name, **changes):
        return Run(tmp_path / name, SCORE | {"zero_stage": 2} | changes)

    died = of("resumed")
    died.dies_after = 2
    assert run_all(tiny, 1, [of("one"), died, of("resumed")]) == [None, "died", None]
    assert run_all(tiny, 2, [of("two"), of("zero-3", zero_stage=3, grad_cache_tokens=64)]) == [None, None]
    one, resumed = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "resumed"))
    assert one.keys() == resumed.keys()
    assert all(torch.equal(weight, resumed[name]) for name, weight in one.items())
    # Weights of the new head differ more, because AdamW amplifies the rounding of its small gradients.
    for name in ("two", "zero-3"):
        for figure, tolerance in (("loss", 1e-5), ("grad_norm", 1e-3)):
            got, wanted = ([line[figure] for line in read_metrics(tmp_path / n)] for n in (name, "one"))
            np.testing.assert_allclose(got, wanted, rtol=tolerance)


@pytest.mark.parametrize(
    "changes",
    [
        *({"objective": name} for name in ("multi{P,I}", "uni{IQ}")),
        {"pooling": "cls"},
        {"matryoshka": (8,)},
        {"interpolation": 0.7},
        {"share_encoder": False},
        {"lora": {}},
        {"distillation": {}},
        {"iq_negatives": "ik"},
        {"validation": {"records": "dev.jsonl"}},
    ],
)
def test_settings_of_embeddings_are_refused(changes):
    with pytest.raises(InputError, match=rf"{next(iter(changes))}.*head=score"):
        settings_of(**changes)


def test_an_encoder_decoder_is_refused_before_its_weights_are_read(tmp_path):
    model = models.t5(tmp_path / "model")
    with pytest.raises(InputError, match=r"is an encoder-decoder, .*; give an encoder or a decoder") as refused:
        load_encoder(settings_of(model), "meta")
    assert (refused.value.faults[0].setting, refused.value.faults[0].value) == ("model", model)


def test_a_classifier_of_several_classes_and_records_without_negatives_are_refused(tmp_path):
    settings = settings_of(
        models.bert(tmp_path / "model", 3), output=str(tmp_path / "out"), launcher="process", workers=1
    )
    with pytest.raises(InputError, match="is a classifier of 3 classes"):
        load_encoder(settings, "meta")
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"query": "a", "positive": "b"}, {"query": "c", "positive": "d"}])
    other = settings.model_copy(update={"model": models.bert(tmp_path / "bert", 0), "records": str(rows)})
    with pytest.raises(InputError, match="no record has hard negatives"):
        run(other)
