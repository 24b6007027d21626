"""Model directories: what tells them apart, what is refused, and what they must not give away."""

import shutil

import pytest
import torch

from infembed_ray.config.training import Lora
from infembed_ray.errors import InputError
from infembed_ray.modeling import adapters
from infembed_ray.modeling.checkpoint import ADAPTERS, locate
from infembed_ray.modeling.encoder import InstructionEncoder


def test_copies_have_one_fingerprint(minilm, tmp_path):
    original = InstructionEncoder.from_pretrained(minilm)
    shutil.copytree(minilm, tmp_path / "copy")
    (tmp_path / "copy" / "manifest.json").write_text("{}")
    assert InstructionEncoder.from_pretrained(str(tmp_path / "copy")).fingerprint() == original.fingerprint()


@pytest.mark.integration
def test_weights_tokenizer_and_template_change_the_fingerprint(minilm, tmp_path):
    """Each differs from the same saved checkpoint in one thing only."""
    encoder = InstructionEncoder.from_pretrained(minilm)
    encoder.save_pretrained(tmp_path / "saved")
    with torch.no_grad():
        next(encoder.parameters()).add_(1.0)
    encoder.save_pretrained(tmp_path / "weights")
    shutil.copytree(tmp_path / "saved", tmp_path / "tokenizer")
    tokenizer = tmp_path / "tokenizer" / "tokenizer_config.json"
    tokenizer.write_text(tokenizer.read_text().replace('"do_lower_case": true', '"do_lower_case": false'))
    prints = [
        InstructionEncoder.from_pretrained(str(tmp_path / n)).fingerprint() for n in ("saved", "weights", "tokenizer")
    ]
    prints.append(InstructionEncoder.from_pretrained(str(tmp_path / "saved"), template="query_first").fingerprint())
    assert len(set(prints)) == 4


def test_every_override_that_changes_embeddings_changes_the_fingerprint(backbone_path):
    asked = [
        {},
        {"query_prefix": "query: "},
        {"passage_prefix": "passage: "},
        {"pooling": "mean"},
        {"append_eos": False},
        {"bidirectional": True, "pooling": "last"},
        {"share_encoder": False},
        {"dimensions": 16},
        {"passage_length": 32},
    ]
    encoders = [InstructionEncoder.from_pretrained(backbone_path("qwen2"), **options) for options in asked]
    assert len({encoder.fingerprint() for encoder in encoders}) == len(asked)


def test_the_fingerprint_has_the_weights_of_both_encoders_but_not_of_merged_adapters(backbone_path, tmp_path):
    encoder = InstructionEncoder.from_pretrained(backbone_path("qwen2"), share_encoder=False)
    encoder.save_pretrained(tmp_path / "a")
    with torch.no_grad():
        next(encoder.passage_backbone.parameters()).add_(1.0)
    encoder.save_pretrained(tmp_path / "b")
    shutil.copytree(tmp_path / "a", tmp_path / "c")
    (tmp_path / "c" / ADAPTERS).mkdir()
    (tmp_path / "c" / ADAPTERS / "adapter_model.safetensors").write_bytes(b"")
    a, b, c = (InstructionEncoder.from_pretrained(str(tmp_path / name)).fingerprint() for name in "abc")
    assert a == c != b


@pytest.mark.parametrize("share_encoder", [True, False])
def test_a_checkpoint_names_no_path_of_the_machine_that_wrote_it(backbone_path, tmp_path, share_encoder):
    encoder = InstructionEncoder.from_pretrained(backbone_path("qwen2"), share_encoder=share_encoder)
    adapters.add(encoder.backbones, Lora(rank=2))
    encoder.save_pretrained(tmp_path)
    for file in tmp_path.rglob("*"):
        assert not file.is_file() or backbone_path("qwen2").encode() not in file.read_bytes(), file


def test_a_router_with_other_routes_than_query_and_document_is_refused(backbone_path, tmp_path):
    InstructionEncoder.from_pretrained(backbone_path("qwen2"), share_encoder=False).save_pretrained(tmp_path)
    file = tmp_path / "router_config.json"
    file.write_text(file.read_text().replace('"document": [', '"image": ['))
    with pytest.raises(InputError, match="a Router over query, image is not supported"):
        InstructionEncoder.from_pretrained(str(tmp_path))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("/no/such/dir", "no such model directory"),
        ("./none", "no such model directory"),
        ("org/none", "cannot be loaded from a directory or from the hub"),
    ],
)
def test_the_error_names_a_missing_model(model, message):
    with pytest.raises(InputError, match=message):
        locate(model, "model")


def test_the_error_names_a_directory_without_a_model(tmp_path):
    with pytest.raises(InputError, match=r"no config.json in this directory"):
        locate(str(tmp_path), "model")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match=r"no \*.safetensors in this directory"):
        locate(str(tmp_path), "model")
    with pytest.raises(InputError, match="cannot be loaded"):
        InstructionEncoder.from_pretrained(str(tmp_path))


@pytest.mark.parametrize("given", ["", ".0123456789ab.partial"])
def test_the_error_names_an_unfinished_training_and_the_command_that_finishes_it(tmp_path, given):
    (tmp_path / ".0123456789ab.partial" / "states").mkdir(parents=True)
    (tmp_path / ".0123456789ab.lock").touch()
    message = rf"unfinished training; run the same `infembed train \.\.\. output={tmp_path}` again"
    with pytest.raises(InputError, match=message):
        locate(str(tmp_path / given), "models.ours")
