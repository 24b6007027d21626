"""`infembed plan train`: the texts, tokens and FLOPs of a step, memory, time and cost, and what it rejects."""

import json
from pathlib import Path

import pytest
import torch
import yaml

from infembed_ray.cli.main import main
from infembed_ray.config.planning import PlanTrainSettings
from infembed_ray.errors import InputError
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.planning import train
from infembed_ray.planning.backbones import load
from infembed_ray.planning.train import plan, step_work, synthetic
from infembed_ray.storage.steps import GIB
from infembed_ray.training.collate import collate
from infembed_ray.training.losses import Objective
from infembed_ray.training.observability.flops import Workload as Counter
from tests.modeling import backbones
from tests.training.test_collate import record

SEVEN_B = {"model": "Qwen/Qwen2.5-7B", "precision": "bf16", "records_per_step": 32, "workers": 8}
SMALL = SEVEN_B | {"model": "intfloat/e5-base-v2"}
CPU = torch.device("cpu"), torch.float32


def made(**settings):
    return plan(PlanTrainSettings.from_mapping(settings))


def work_of(**given):
    settings = PlanTrainSettings.from_mapping({"workers": 1, **given})
    encoder = load(settings)
    return step_work(settings, encoder, *CPU, synthetic(settings, encoder), settings.epoch_records)


@pytest.fixture(scope="module")
def small():
    return made(**SMALL)


@pytest.mark.integration
@pytest.mark.parametrize(("stage", "gib"), [(1, (82, 82)), (2, (40, 34)), (3, (38, 24))])
def test_memory_of_the_table_in_the_guide(stage, gib):
    """GiB without and with checkpointing on one node, docs/guides/plan.md."""
    both = [made(**SEVEN_B, zero_stage=stage, activation_checkpointing=again) for again in (False, True)]
    assert tuple(round(each.memory.total / GIB) for each in both) == gib
    assert all(each.fits == (stage > 1) for each in both)


@pytest.mark.integration
def test_32b_fits_on_32_gpus_only_under_zero_3():
    larger = SEVEN_B | {"model": "Qwen/Qwen2.5-32B", "workers": 32}
    whole, divided = made(**larger, zero_stage=2), made(**larger, zero_stage=3)
    assert divided.size.parameters == pytest.approx(32e9, rel=0.02)
    assert (whole.fits, divided.fits) == (False, True)


@pytest.mark.integration
def test_adapters_have_smaller_optimizer_states(small):
    states = [p.memory.master + p.memory.optimizer for p in (made(**SMALL, lora={}), small)]
    assert states[0] < 0.1 * states[1]


@pytest.mark.integration
def test_time_is_flops_over_peak_and_mfu(small):
    seconds = small.work.flops / (312e12 * 0.4)
    assert small.step_seconds == pytest.approx(small.work.flops / (312e12 * small.mfu))
    again = made(**SMALL, activation_checkpointing=True, gpu_usd_per_hour=2, mfu=0.4)
    assert again.mfu_source == "as set"
    assert again.step_seconds == pytest.approx(4 / 3 * seconds)
    assert again.hours == pytest.approx(4 / 3 * seconds * small.work.steps / 3600)
    assert (small.usd, again.usd) == (None, pytest.approx(2 * again.gpus * again.hours))


@pytest.mark.parametrize(
    ("parameters", "tokens", "row", "step"), [(1e8, 2476, 0, 0), (3e9, 1 << 20, 2, 1), (8e9, 2524, 3, 0)]
)
def test_mfu_is_the_measured_one_of_the_nearest_size_and_its_largest_step_at_most(parameters, tokens, row, step):
    measured = yaml.safe_load((Path(train.__file__).parent / "mfu.yaml").read_text())
    found, source = train.measured_mfu(parameters, tokens)
    assert found == pytest.approx(measured["models"][row]["steps"][step][1])
    assert all(
        part in source
        for part in (measured["models"][row]["name"], measured["device"], measured["models"][row]["commit"])
    )


def test_between_measured_steps_the_time_is_linear_in_the_tokens():
    times = [tokens / train.measured_mfu(3e9, tokens)[0] for tokens in (3000, 6000, 9000)]  # of equal FLOPs per token
    assert times[1] == pytest.approx((times[0] + times[2]) / 2)


@pytest.mark.integration
def test_text_and_json_agree(capsys):
    arguments = ["plan", "train", *(f"{k}={v}" for k, v in SMALL.items())]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert main([*arguments, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert f"memory: {values['memory']['total'] / GIB:.1f} GiB at the peak" in text
    assert f"at mfu={values['mfu']:.2f} ({values['mfu_source']})" in text
    assert values["fits"]


@pytest.mark.parametrize(
    ("change", "setting"),
    [
        ({"gpu": "a100"}, "gpu"),
        ({"objective": "multi{P,X}"}, "objective"),
        ({"precision": "bf16", "zero_stage": 0}, "precision=bf16: zero_stage=0"),
        ({"model": "/no/model"}, "/no/model"),
        ({"workers": 64, "records_per_step": 32}, "records_per_step"),
    ],
)
def test_bad_input_names_the_setting(change, setting):
    with pytest.raises(InputError) as error:
        made(**{"model": "intfloat/e5-base-v2"} | change)
    assert setting in str(error.value)


@pytest.mark.integration
def test_a_batch_of_given_records_is_what_training_would_read(tmp_path):
    path = backbones.write("llama", tmp_path)
    rows = [record(n) for n in range(4)]
    settings = PlanTrainSettings(model=path, records_per_step=4, epochs=3, objective="uni{P}", workers=1)
    work = step_work(settings, load(settings), *CPU, rows, len(rows))
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
    base = {"model": "intfloat/e5-base-v2", "records_per_step": 16, "workers": 2}
    only = work_of(**base, objective="uni{P}")
    assert (only.queries, only.passages) == (24, 24)
    # Of each record two rows' poisoned instruction is the other's own text; all else is new: 3 k + 1 texts.
    more = work_of(**base, objective="multi{P,I}", instruction_negatives=5)
    assert more.queries == pytest.approx(8 * (3 * 5 + 1), rel=0.05)


@pytest.mark.integration
def test_gradcache_bounds_the_graphs():
    base = {"model": "Qwen/Qwen2.5-1.5B", "records_per_step": 16}
    whole, chunked = work_of(**base), work_of(**base, grad_cache_tokens=1024)
    assert chunked.graph_slots <= 1024 < whole.graph_slots
    assert chunked.passes > whole.passes == 2
    assert whole.steps == 2 * -(-38_759 // 16)
