"""`infembed plan index`: sizes of a shard by hand and against the memory by which the build chooses, and what it chooses."""

import json
import math
import re
from pathlib import Path

import pytest

from infembed_ray.cli.main import main
from infembed_ray.config.planning import PlanIndexSettings
from infembed_ray.errors import InputError
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.planning.index import as_json, as_text, plan, shard_size
from infembed_ray.retrieval import faiss_index as factories
from infembed_ray.retrieval.chunks import Cutter
from infembed_ray.storage.steps import GIB

README = Path(__file__).parents[2] / "README.md"


def test_sizes_of_a_seven_b_model_by_hand():
    memory, disk = shard_size("HNSW32", 3584, 10**7, 400)
    assert memory == pytest.approx(10**7 * (4 * 3584 + 8 * 32 + 16), rel=0.002)
    assert disk == pytest.approx(memory + 10**7 * 456, rel=0.002)
    codes, with_vectors = shard_size("IVF65536_HNSW32,RaBitQ", 3584, 10**9, 400)
    assert codes == pytest.approx(10**9 * 464, rel=0.01)
    assert with_vectors == pytest.approx(codes + 10**9 * (456 + 2 * 3584))  # the vectors, for reranking
    half, on_disk = shard_size("HNSW32_SQfp16", 3584, 10**7, 400)
    assert half == pytest.approx(memory - 10**7 * 2 * 3584)
    assert on_disk == pytest.approx(half + 10**7 * 456, rel=0.002)


@pytest.mark.parametrize("vectors", [100, 10**6, 10**9])
def test_memory_is_what_the_build_chooses_by(vectors):
    for factory in factories.candidates(vectors):
        assert shard_size(factory, 384, vectors, 400)[0] == factories.memory(factory, 384, vectors)


MILLION = {"model": "intfloat/e5-base-v2", "passages": 10**6}


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("memory_gib", [None, 2.0, 0.5])
def test_the_build_agrees(shards, memory_gib):
    planned = plan(PlanIndexSettings.from_mapping(MILLION | {"shards": shards, "memory_gib": memory_gib}))
    assert planned.chosen == factories.choose(math.ceil(10**6 / shards), 768, memory_gib, shards)
    (chosen,) = (sizes for sizes in planned.types if sizes.factory == planned.chosen)
    assert memory_gib is None or chosen.memory <= memory_gib * GIB * shards


CUT = MILLION | {"passage_tokens": 900, "chunk_tokens": 256, "chunk_overlap": 32}


def test_the_chunks_are_planned_not_the_passages_and_the_assumption_is_named():
    whole, cut = (plan(PlanIndexSettings.from_mapping(settings)) for settings in (MILLION, CUT))
    assert (whole.vectors, whole.assumed, "assumed" in as_text(whole)) == (10**6, "", False)
    assert cut.vectors == pytest.approx(10**6 * ((900 - 32) / (256 - 12 - 32) + 0.5), abs=1)
    as_many = plan(PlanIndexSettings.from_mapping(MILLION | {"passages": cut.vectors}))
    for some, other in zip(cut.types, as_many.types, strict=True):
        assert (some.factory, some.memory) == (other.factory, pytest.approx(other.memory, rel=1e-3))
    assert f"1,000,000 passages in shards=2; {cut.vectors:,} vectors, assumed: 4.59 chunks a passage" in as_text(cut)
    assert "of 900 tokens, each 12 below chunk_tokens" in json.loads(as_json(cut))["assumed"]


@pytest.mark.integration
@pytest.mark.parametrize(("tokens", "shared"), [(32, 16), (64, 0), (128, 32), (256, 128)])
def test_the_assumed_chunks_are_about_those_that_a_build_cuts(minilm, tokens, shared):
    texts, prose = InstructionEncoder.from_pretrained(minilm, device="meta").texts, README.read_text().split()
    passages = [" ".join(prose[start : start + 400]) for start in range(0, len(prose), 400)]
    mean = round(sum(map(len, texts.tokenize(passages, "passage", 10**6))) / len(passages))
    given = {"passages": len(passages), "passage_tokens": mean, "chunk_tokens": tokens, "chunk_overlap": shared}
    planned = plan(PlanIndexSettings.from_mapping(MILLION | given)).vectors
    cut = sum(len(Cutter(texts, tokens, shared).cut(passage)) // 2 for passage in passages)
    assert 0.9 < planned / cut < (1.7 if tokens == 32 else 1.25)


def test_text_and_json_agree(capsys):
    arguments = ["plan", "index", "model=intfloat/e5-base-v2", "passages=1000000"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert main([*arguments, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert re.search(rf"^>  {re.escape(values['chosen'])} ", text, re.MULTILINE)
    assert values["types"][-1]["factory"] == "Flat"


@pytest.mark.parametrize(
    ("change", "setting"),
    [
        ({"dimensions": 1000}, "dimensions"),
        ({"factory": "HNWS32"}, "factory"),
        ({"factory": "HNSW32", "memory_gib": 0.1}, "memory_gib"),
        ({"model": "/no/model"}, "model"),
        ({"pasages": 10}, "pasages"),
    ],
)
def test_bad_input_names_the_setting(change, setting):
    with pytest.raises(InputError) as error:
        plan(PlanIndexSettings.from_mapping(MILLION | change))
    assert [fault.setting for fault in error.value.faults] == [setting]
