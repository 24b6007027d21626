"""The texts, tokens and FLOPs of a step, against the code that trains and against counts by hand."""

import json
from pathlib import Path

import pytest
import torch

from infembed_ray.config.planning import PlanTrainSettings
from infembed_ray.errors import InputError
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.planning.backbones import as_stand_in, load
from infembed_ray.planning.workload import workload
from infembed_ray.training.collate import collate
from infembed_ray.training.losses import Objective
from infembed_ray.training.observability.flops import Workload as Counter
from tests.modeling import backbones
from tests.training.test_collate import record

CPU = torch.device("cpu"), torch.float32


def of(settings, workers=1):
    return workload(settings, load(settings), workers, *CPU)


@pytest.mark.integration
def test_a_batch_of_the_records_that_are_there_is_what_training_would_read(tmp_path):
    path = backbones.write("llama", tmp_path)
    rows = [record(n) for n in range(4)]
    file = Path(path) / "records.jsonl"
    file.write_text("".join(json.dumps(vars(row)) + "\n" for row in rows))
    settings = PlanTrainSettings(records=str(file), model=path, records_per_step=4, epochs=3, objective="uni{P}")
    found = of(settings)
    encoder = InstructionEncoder.from_pretrained(path).train()
    batch = collate(encoder, [rows], 0, Objective.parse("uni{P}"))
    counter = Counter(encoder)
    for side in (batch.queries, batch.passages):
        for _, layout in encoder.layouts(side, 10_000):
            counter.add(layout)
    slots, tokens, flops = counter.take().tolist()
    assert (found.queries, found.passages, found.passes, found.steps) == (len(batch.queries), 12, 2, 3)
    assert found.slots == pytest.approx(slots, rel=0.02)  # prefixes meet in another order
    assert found.tokens == pytest.approx(tokens, rel=0.02)
    assert found.flops == pytest.approx(flops, rel=0.02)


@pytest.mark.integration
def test_negatives_add_the_texts_that_the_objective_says():
    base = {"model": "intfloat/e5-base-v2", "records_per_step": 16}
    only = of(PlanTrainSettings(**base, objective="uni{P}"), workers=2)
    assert (only.own, only.queries, only.passages) == (24, 24, 24)
    # Of each record two rows' poisoned instruction is the other's own text; all else is new: 3 k + 1 texts.
    more = of(PlanTrainSettings(**base, objective="multi{P,I}", instruction_negatives=5), workers=2)
    assert more.queries == pytest.approx(8 * (3 * 5 + 1), rel=0.05)


@pytest.mark.integration
def test_gradcache_bounds_the_graphs_and_accumulation_divides_them():
    base = {"model": "Qwen/Qwen2.5-1.5B", "records_per_step": 16}
    whole = of(PlanTrainSettings(**base))
    chunked = of(PlanTrainSettings(**base, grad_cache_tokens=1024))
    halves = of(PlanTrainSettings(**base, accumulation=2))
    assert chunked.graph_slots <= 1024 < whole.graph_slots
    assert chunked.passes > whole.passes == 2
    assert halves.graph_slots < 0.7 * whole.graph_slots
    assert (whole.steps, halves.steps) == (2 * -(-38_759 // 16),) * 2


@pytest.mark.integration
def test_as_many_records_are_made_up_as_a_batch_of_tokens_needs():
    mix = {"instruction": 4, "query": 2, "passage": 4}
    base = {"model": "intfloat/e5-base-v2", "mix": mix, "objective": "uni{P}"}
    few, many = (of(PlanTrainSettings(**base, tokens_per_step=n), workers=16) for n in (24_000, 96_000))
    assert few.records > 512  # fewer are made up where that is enough
    assert many.records == pytest.approx(4 * few.records, abs=4)
    assert many.graph_slots > 3 * few.graph_slots
    assert not many.whole_epoch


def test_a_batch_holds_no_more_than_there_is():
    found = of(PlanTrainSettings(model="intfloat/e5-base-v2", records_per_step=16, mix={"records": 6}))
    assert (found.records, found.whole_epoch, found.own) == (6, True, 18)


def test_more_gpus_than_records_a_batch_are_refused():
    with pytest.raises(InputError, match=r"records_per_step=4: 4 records a batch leave some of the 8 GPUs without any"):
        of(PlanTrainSettings(model="intfloat/e5-base-v2", records_per_step=4), workers=8)


def test_stand_in_texts_are_as_long_as_tokens_and_equal_where_texts_are():
    text = "For nurses, in plain words, without any brand names, as of 2024 and no earlier than that"
    assert len(as_stand_in(text).split()) == round(len(text.split()) * 1.35)
    assert as_stand_in(text) == as_stand_in(text) != as_stand_in(text.replace("nurses", "doctors"))
    shared = [a == b for a, b in zip(as_stand_in(text).split(), as_stand_in(text + " at all").split(), strict=False)]
    assert all(shared[: len(text.split()) // 2])
