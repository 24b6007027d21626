"""What a later start reads in place of the model, and that it needs neither torch nor transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from infembed_ray.config.serving import ServeSettings
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.serving.encoder.engine import EncodingEngine
from infembed_ray.serving.encoder.known import describe
from tests.modeling import backbones

pytestmark = pytest.mark.integration

SETTINGS = ServeSettings(index="none", runtime="onnx", dtype="float32")
TEXTS = [
    *(
        "",
        " ",
        "no",
        "How is Aspirin dosed?",
        "naïve façade – “quoted” … 10 µg/ml",
        "don't  [SEP] [MASK] </s>",
        "日本語とemoji 🙂",
    ),
    *("\tdef f(x):\n\treturn x", "word " * 700, "x" * 900),
]
INSTRUCTIONS = ["For nurses, in plain words.", None, "", "no [SEP] brands ", "só em português:"] * 2
SECOND_START = """
import asyncio, json, sys
from infembed_ray.config.serving import ServeSettings
from infembed_ray.serving import startup
startup.import_encoder_modules()
from infembed_ray.serving.encoder.engine import EncodingEngine
from infembed_ray.serving.encoder.known import describe
known = describe(sys.argv[1])
engine = EncodingEngine.load(sys.argv[1], ServeSettings(index="none", dtype="float32", runtime=sys.argv[2]), None, known)
texts, instructions = json.loads(sys.argv[3])
vectors = asyncio.run(engine.embed_queries(texts, instructions)).vectors
heavy = sorted({"torch", "transformers", "pandas"} & set(sys.modules))
print(json.dumps({"heavy": heavy, "runtime": engine.facts.candidate.runtime, "vectors": vectors.tolist()}))
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "infembed"


def test_a_start_with_a_graph_in_the_cache_imports_no_torch_and_gives_the_same_vectors(minilm: str) -> None:
    EncodingEngine.load(minilm, SETTINGS)
    asked = [text for text in TEXTS if text.strip()]
    arguments = [minilm, "onnx", json.dumps([asked, INSTRUCTIONS[: len(asked)]])]
    found = subprocess.run([sys.executable, "-c", SECOND_START, *arguments], capture_output=True, text=True, check=True)
    second = json.loads(found.stdout.splitlines()[-1])
    assert (second["heavy"], second["runtime"]) == ([], "onnx")
    expected = InstructionEncoder.from_pretrained(minilm).encode_queries(asked, INSTRUCTIONS[: len(asked)])
    np.testing.assert_allclose(np.array(second["vectors"]), expected, atol=1e-5)


@pytest.mark.parametrize("family", ["minilm", "modernbert", "qwen2"])
def test_a_described_encoder_tokenizes_as_transformers_does(
    family: str, minilm: str, tmp_path: Path, cache: Path
) -> None:
    path = minilm if family == "minilm" else str(backbones.write(family, tmp_path / family))
    first, again = describe(path), describe(path)
    (file,) = (cache / "encoders").iterdir()
    encoder = InstructionEncoder.from_pretrained(path)
    pad = encoder.tokenizer.pad_token_id
    for known in (first, again):
        assert (known.fingerprint, known.vocabulary) == (encoder.fingerprint(), len(encoder.tokenizer))
        assert known.texts.text == encoder.text
        for side in ("query", "passage"):
            cut = {"truncation": True, "max_length": getattr(encoder.text, f"{side}_length")}
            joint = [f"{i} {t}" if i else t for t, i in zip(TEXTS, INSTRUCTIONS, strict=True)]
            texts = joint if side == "query" else TEXTS
            tokens = (
                known.texts.tokenize_queries(TEXTS, INSTRUCTIONS)
                if side == "query"
                else known.texts.tokenize_passages(TEXTS)
            )
            assert [t.ids for t in tokens] == [ids or [pad] for ids in encoder.tokenizer(texts, **cut)["input_ids"]]
    assert again.texts.tokenize_queries(TEXTS, INSTRUCTIONS) == encoder.tokenize_queries(TEXTS, INSTRUCTIONS)

    file.write_bytes(file.read_bytes()[:-9])
    assert describe(path).fingerprint == first.fingerprint


def test_changed_files_and_other_dimensions_are_described_anew(tmp_path: Path) -> None:
    path = Path(backbones.write("modernbert", tmp_path / "model"))
    first, fewer = describe(str(path)), describe(str(path), 8)
    assert first.fingerprint != fewer.fingerprint
    settings = path / "sentence_bert_config.json"
    settings.write_text(json.dumps({"max_seq_length": 33}))
    changed = describe(str(path))
    assert changed.texts.text.query_length == 33
    assert changed.fingerprint not in (first.fingerprint, fewer.fingerprint)
