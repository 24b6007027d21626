"""The model card: read by the hub's own reader, and its example run as it stands."""

import re

import pytest
from huggingface_hub import ModelCard

from infembed_ray.modeling import model_card
from infembed_ray.modeling.checkpoint import describe
from infembed_ray.modeling.encoder import InstructionEncoder


def written(path, sources, base_model="/somewhere/secret/backbone", metrics=None):
    data = model_card.TrainingData("records.jsonl", "0123456789abcdef", sources)
    settings = {"objective": "multi{P,I}", "temperature": 0.05}
    model_card.write(path, describe(str(path)), base_model, data, settings, metrics or {"step": 7, "loss": 1.25})
    return ModelCard.load(path / model_card.FILE)


def test_the_card_has_training_data_settings_and_licence(minilm, tmp_path):
    InstructionEncoder.from_pretrained(minilm).save_pretrained(tmp_path)
    card = written(tmp_path, ["msmarco"] * 3 + ["own"])
    assert card.data.license == "other"
    assert card.data.to_dict()["license_name"] == "ms-marco-non-commercial"
    assert card.data.library_name == "sentence-transformers"
    for told in ("multi{P,I}", "records.jsonl", "0123456789abcdef", "| records from msmarco | 3 |", "| loss | 1.25 |"):
        assert told in card.text
    assert "secret" not in card.content
    other = written(tmp_path, ["own"], base_model="org/backbone")
    assert (other.data.license, other.data.base_model) == (None, "org/backbone")


def test_the_card_has_the_results_on_held_out_records_where_the_hub_reads_them(minilm, tmp_path):
    InstructionEncoder.from_pretrained(minilm).save_pretrained(tmp_path)
    metrics = {"step": 7, "validation_p_mrr": 31.5, "validation_ndcg_at_10": None}
    card = written(tmp_path, ["own"], metrics=metrics)
    (result,) = card.data.eval_results
    assert (result.task_type, result.metric_type, result.metric_value) == ("retrieval", "p_mrr", 31.5)
    assert "| p_mrr | 31.5 |" in card.text.split("## Results")[1].split("## Last step")[0]


@pytest.mark.parametrize("template", ["instruction_first", "query_first", "instruct_query"])
def test_the_cards_example_runs_and_gives_the_encoders_embeddings(minilm, tmp_path, template, monkeypatch):
    pytest.importorskip("sentence_transformers")
    encoder = InstructionEncoder.from_pretrained(minilm, template=template)
    encoder.save_pretrained(tmp_path)
    code = re.search(r"```python\n(.*?)```", written(tmp_path, ["own"]).content, re.DOTALL)[1]
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(code, names)
    expected = encoder.encode_queries([names["query"]], [names["instruction"]])
    assert (names["queries"] * expected).sum() >= 0.9999
