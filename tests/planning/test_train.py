"""`infembed plan train`: the texts, tokens and FLOPs of a step, which layout it chooses, what it prints and refuses."""

import json
from pathlib import Path

import pytest
import torch

from infembed_ray.cli.main import main
from infembed_ray.config.planning import PlanTrainSettings
from infembed_ray.errors import InputError
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.planning.backbones import load
from infembed_ray.planning.memory import GIB
from infembed_ray.planning.train import plan, step_work
from infembed_ray.training.collate import collate
from infembed_ray.training.losses import Objective
from infembed_ray.training.observability.flops import Workload as Counter
from tests.modeling import backbones
from tests.training.test_collate import record

SEVEN_B = {"model": "Qwen/Qwen2.5-7B", "precision": "bf16", "records_per_step": 32, "workers": 8}
SMALL = SEVEN_B | {"model": "intfloat/e5-base-v2"}
CPU = torch.device("cpu"), torch.float32


def of(settings, workers=1):
    return step_work(settings, load(settings), workers, *CPU)


@pytest.fixture(scope="module")
def small():
    return plan(PlanTrainSettings.from_mapping(SMALL))


@pytest.mark.integration
def test_the_first_that_fits_is_chosen():
    made = plan(PlanTrainSettings.from_mapping(SEVEN_B))
    assert (made.chosen, made.as_set) == (0, 0)
    assert made.layouts[0].overrides == "zero_stage=2 activation_checkpointing=false"
    assert {layout.zero_stage for layout in made.layouts} == {1, 2, 3}  # bf16 has no ZeRO-0
    # The table of docs/guides/plan.md: GiB without and with checkpointing of ZeRO-1, 2 and 3 on one node.
    gib = {
        (layout.zero_stage, layout.activation_checkpointing): round(layout.memory.total / GIB)
        for layout in made.layouts
        if not layout.offload
    }
    assert [gib[stage, checkpointing] for stage in (1, 2, 3) for checkpointing in (False, True)] == [
        70, 58, 41, 32, 35, 23
    ]  # fmt: skip


@pytest.mark.integration
def test_32b_trains_on_32_gpus():
    made = plan(PlanTrainSettings.from_mapping(SEVEN_B | {"model": "Qwen/Qwen2.5-32B", "workers": 32}))
    assert made.size.parameters == pytest.approx(32e9, rel=0.02)
    best = made.layouts[made.chosen]
    assert (best.zero_stage, best.offload) == (3, None)


@pytest.mark.integration
def test_less_memory_needs_another_layout_or_fits_nowhere(small):
    best = small.layouts[small.chosen]

    def chosen(gib):
        made = plan(PlanTrainSettings.from_mapping(SMALL | {"gpu_gib": gib}))
        return None if made.chosen is None else made.layouts[made.chosen]

    limit = 0.7 * best.memory.total / GIB
    other = chosen(limit)
    assert other.memory.total <= limit * GIB
    assert other.activation_checkpointing
    assert chosen(1) is None


@pytest.mark.integration
def test_adapters_have_smaller_optimizer_states(small):
    lora = plan(PlanTrainSettings.from_mapping(SMALL | {"lora": {}}))
    states = [p.memory.master + p.memory.optimizer for p in (lora.layouts[lora.as_set], small.layouts[small.as_set])]
    assert states[0] < 0.1 * states[1]


@pytest.mark.integration
def test_time_is_flops_over_peak_and_mfu(small):
    seconds = small.work.flops / (312e12 * 0.4)
    plain = small.layouts[small.chosen]
    assert plain.step_seconds == pytest.approx(seconds)
    again = next(layout for layout in small.layouts if layout.activation_checkpointing)
    assert again.step_seconds == pytest.approx(4 / 3 * seconds)
    hours = seconds * small.work.steps / 3600
    assert small.totals(plain) == pytest.approx({"hours": hours, "usd": hours * 8 * 3.4})


@pytest.mark.integration
def test_text_and_json_agree(capsys):
    arguments = ["plan", "train", *(f"{k}={v}" for k, v in SMALL.items())]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert main([*arguments, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    best = values["layouts"][values["chosen"]]
    assert f"First that fits: {best['overrides']}: {best['memory']['total'] / GIB:.1f} GiB per GPU" in text
    assert "8 x a100-80g" in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gpu": "a100"}, "gpu=a100: unknown GPU; did you mean a100-80g"),
        ({"objective": "multi{P,X}"}, "no such objective"),
        ({"precision": "bf16", "zero_stage": 0}, "precision=bf16: zero_stage=0"),
        ({"model": "/no/model"}, "/no/model"),
        ({"workers": 64, "records_per_step": 32}, "32 records a step leave some of the 64"),
    ],
)
def test_bad_input_is_one_line(change, message):
    with pytest.raises(InputError, match=message):
        plan(PlanTrainSettings.from_mapping({"model": "intfloat/e5-base-v2"} | change))


@pytest.mark.integration
def test_a_batch_of_the_records_that_are_there_is_what_training_would_read(tmp_path):
    path = backbones.write("llama", tmp_path)
    rows = [record(n) for n in range(4)]
    file = Path(path) / "records.jsonl"
    file.write_text("".join(json.dumps(vars(row)) + "\n" for row in rows))
    settings = PlanTrainSettings(records=str(file), model=path, records_per_step=4, epochs=3, objective="uni{P}")
    work = of(settings)
    encoder = InstructionEncoder.from_pretrained(path).train()
    batch = collate(encoder, [rows], 0, Objective.parse("uni{P}"))
    counter = Counter(encoder)
    for side in (batch.queries, batch.passages):
        for _, layout in encoder.layouts(side, 10_000):
            counter.add(layout)
    slots, tokens, flops = counter.take().tolist()
    assert (work.queries, work.passages, work.passes, work.steps) == (len(batch.queries), 12, 2, 3)
    assert work.slots == pytest.approx(slots, rel=0.02)  # prefixes meet in another order
    assert work.tokens == pytest.approx(tokens, rel=0.02)
    assert work.flops == pytest.approx(flops, rel=0.02)


@pytest.mark.integration
def test_negatives_add_the_texts_that_the_objective_says():
    base = {"model": "intfloat/e5-base-v2", "records_per_step": 16}
    only = of(PlanTrainSettings(**base, objective="uni{P}"), workers=2)
    assert (only.own, only.queries, only.passages) == (24, 24, 24)
    # Of each record two rows' poisoned instruction is the other's own text; all else is new: 3 k + 1 texts.
    more = of(PlanTrainSettings(**base, objective="multi{P,I}", instruction_negatives=5), workers=2)
    assert more.queries == pytest.approx(8 * (3 * 5 + 1), rel=0.05)


@pytest.mark.integration
def test_gradcache_bounds_the_graphs():
    base = {"model": "Qwen/Qwen2.5-1.5B", "records_per_step": 16}
    whole = of(PlanTrainSettings(**base))
    chunked = of(PlanTrainSettings(**base, grad_cache_tokens=1024))
    assert chunked.graph_slots <= 1024 < whole.graph_slots
    assert chunked.passes > whole.passes == 2
    assert whole.steps == 2 * -(-38_759 // 16)


def test_a_batch_holds_no_more_than_there_is():
    work = of(PlanTrainSettings(model="intfloat/e5-base-v2", records_per_step=16, epoch_records=6))
    assert (work.records, work.whole_epoch, work.own) == (6, True, 18)
