"""`infembed plan train`: which layout it chooses, what it prints, what it refuses."""

import json

import pytest

from infembed_ray.cli.main import main
from infembed_ray.config.planning import PlanTrainSettings
from infembed_ray.errors import InputError
from infembed_ray.planning.capacity import GIB
from infembed_ray.planning.train import plan

SEVEN_B = {"model": "Qwen/Qwen2.5-7B", "precision": "bf16", "records_per_step": 32}
SMALL = SEVEN_B | {"model": "intfloat/e5-base-v2"}


@pytest.fixture(scope="module")
def small():
    return plan(PlanTrainSettings.from_mapping(SMALL))


@pytest.mark.integration
def test_the_fastest_that_fits_is_chosen():
    report = plan(PlanTrainSettings.from_mapping(SEVEN_B))
    best = report.plans[report.chosen]
    assert not best.obstacles
    assert best.step_seconds == min(p.step_seconds for p in report.plans if not p.obstacles)
    assert {p.zero_stage for p in report.plans} == {1, 2, 3}  # bf16 has no ZeRO-0
    assert report.plans[report.asked].zero_stage == 2
    for p in report.plans:
        fits = p.memory.total <= report.cluster.memory and p.host.memory <= report.cluster.host_memory
        assert fits == (not p.obstacles)
    # The table of docs/guides/plan.md: GiB without and with checkpointing of ZeRO-1, 2 and 3 on one node.
    gib = [round(p.memory.total / GIB) for p in report.plans if not p.offload]
    assert gib == [70, 58, 41, 32, 35, 23]


@pytest.mark.integration
def test_32b_trains_on_four_nodes_of_eight_gpus():
    report = plan(PlanTrainSettings.from_mapping(SEVEN_B | {"model": "Qwen/Qwen2.5-32B", "hardware": {"nodes": 4}}))
    assert report.weights.parameters == pytest.approx(32e9, rel=0.02)
    assert report.plans[report.chosen].zero_stage == 3
    assert not report.plans[report.chosen].offload


@pytest.mark.integration
def test_less_memory_needs_a_slower_layout_or_fits_nowhere(small):
    best = small.plans[small.chosen]

    def chosen(gib):
        made = plan(PlanTrainSettings.from_mapping(SMALL | {"hardware": {"memory_gib": gib}}))
        return None if made.chosen is None else made.plans[made.chosen]

    limit = 0.9 * best.memory.total / GIB
    other = chosen(limit)
    assert other.memory.total <= limit * GIB
    assert other.step_seconds > best.step_seconds
    assert chosen(1) is None


@pytest.mark.integration
def test_adapters_have_smaller_optimizer_states(small):
    lora = plan(PlanTrainSettings.from_mapping(SMALL | {"lora": {}}))
    states = [p.memory.master + p.memory.optimizer for p in (lora.plans[lora.asked], small.plans[small.asked])]
    assert states[0] < 0.1 * states[1]


@pytest.mark.integration
def test_a_measured_mfu_scales_all_times(small, tmp_path):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"step": n, "mfu": 0.1}) + "\n" for n in range(1, 10)))
    found = plan(PlanTrainSettings.from_mapping(SMALL | {"measured": str(tmp_path)}))
    assert (small.speed, found.speed) == ("assumed", "measured")
    assert found.totals(found.plans[found.asked])["mfu"] == pytest.approx(0.1)
    slower = [a.step_seconds / b.step_seconds for a, b in zip(found.plans, small.plans, strict=True)]
    assert slower == pytest.approx([slower[0]] * len(slower))


@pytest.mark.integration
def test_text_and_json_agree(capsys):
    arguments = ["plan", "train", *(f"{k}={v}" for k, v in SMALL.items()), "hardware.nodes=2"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert main([*arguments, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    best = next(p for p in values["plans"] if p["chosen"])
    assert f"Fastest that fits: {best['overrides']}: {best['memory']['total'] / GIB:.1f} GiB a GPU" in text
    assert "2 x 8 a100-80g" in text
    assert "assumed" in text
    assert len(values["plans"]) == sum(
        line.split()[:1] != [] and " GiB" not in line for line in text.splitlines()[5:-4]
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"hardware": {"device": "a100"}},
            "hardware.device=a100: not in planning/hardware.yaml: did you mean a100-80g",
        ),
        ({"hardware": {"node": 2}}, "hardware.node: unknown key; did you mean nodes"),
        ({"objective": "multi{P,X}"}, "no such objective"),
        ({"precision": "bf16", "zero_stage": 0}, "precision=bf16: zero_stage=0"),
        ({"mfu": 0.3, "measured": "runs"}, "mfu=0.3: measured=runs gives it too"),
        ({"measured": "/no/run"}, "measured=/no/run: no such file or directory"),
        ({"model": "/no/model"}, "/no/model"),
        ({"teacher": "intfloat/e5-large-v2"}, "teacher=intfloat/e5-large-v2: is not planned for; leave it out"),
        ({"hardware": {"nodes": 8}, "records_per_step": 32}, "32 records a batch leave some of the 64 GPUs"),
    ],
)
def test_bad_input_is_one_line(change, message):
    with pytest.raises(InputError, match=message):
        plan(PlanTrainSettings.from_mapping({"model": "intfloat/e5-base-v2"} | change))
