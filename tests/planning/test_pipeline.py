"""`infembed plan pipeline`: each stage has the figures of its own planner, and what one stage makes is what the next one takes."""

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from infembed_ray.cli.check import check
from infembed_ray.cli.main import main
from infembed_ray.config.planning import PlanIndexSettings, PlanPipelineSettings, PlanServeSettings, PlanTrainSettings
from infembed_ray.config.synthesis import SynthesizeSettings
from infembed_ray.errors import InputError
from infembed_ray.planning import index, serve, train
from infembed_ray.planning.pipeline import plan

MODEL = "intfloat/e5-base-v2"
SYNTHESIS = {"generator": {"model": "gpt-4o-mini", "max_tokens": 75}, "judge": {"model": "o4-mini", "max_tokens": 200}}


def planned(**sections):
    return plan(PlanPipelineSettings.from_mapping({"nodes": [1], **sections}))


def stages_of(made, nodes=None):
    return {stage.name: stage for stage in made.stages[nodes or made.nodes]}


@pytest.mark.integration
@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seeds=st.integers(10_000, 10_000_000),
    per_step=st.sampled_from([64, 256]),
    nodes=st.integers(1, 4),
    passages=st.integers(100_000, 50_000_000),
    qps=st.sampled_from([5, 50, 200]),
)
def test_every_stage_has_the_figures_of_its_own_planner(seeds, per_step, nodes, passages, qps):
    found = stages_of(
        planned(
            synthesize={"seed_count": seeds},
            train={"model": MODEL, "records_per_step": per_step},
            index={"passages": passages},
            serve={"qps": qps, "p99_ms": 500},
            hardware={"nodes": nodes},
        )
    )
    hardware, model = {"nodes": nodes}, {"model": MODEL}
    records = {"records": round(0.388 * seeds)}
    training = {**model, "records_per_step": per_step, "hardware": hardware, "mix": records}
    trained = train.plan(PlanTrainSettings.from_mapping(training))
    totals = trained.totals(trained.plans[trained.chosen])
    assert (found["train"].hours, found["train"].usd) == pytest.approx((totals["hours"], totals["usd"]))
    served = serve.plan(
        PlanServeSettings.from_mapping({**model, "passages": passages, "qps": qps, "p99_ms": 500, "index": ""})
    )
    best = served.options[served.chosen]
    assert found["serve"].usd == best.usd_month
    layout = {"factory": best.shard.factory, "dimensions": best.shard.dimension, "shards": best.shards}
    indexed = index.plan(
        PlanIndexSettings.from_mapping({**model, "passages": passages, "hardware": hardware, **layout})
    )
    built = indexed.options[indexed.asked]
    assert found["index"].layout == built.overrides
    one_after_another = indexed.encoding["hours"] + built.shards * built.shard.build_hours
    assert indexed.encoding["hours"] < found["index"].hours <= one_after_another * (1 + 1e-9)
    assert found["index"].usd >= indexed.encoding["usd"]


def test_a_synthesis_takes_the_calls_and_tokens_that_its_check_finds(tmp_path, capsys):
    words = {"query": " ".join(["words"] * 8), "passage": " ".join(["words"] * 56)}
    rows = [json.dumps({"id": str(n), **words, "passage": f"{words['passage'][:-2]}{n:02}"}) for n in range(20)]
    (tmp_path / "seeds.jsonl").write_text("\n".join(rows))
    own = {**SYNTHESIS, "seeds": str(tmp_path / "seeds.jsonl"), "output": str(tmp_path / "out")}
    said = "\n".join(
        check("synthesize", SynthesizeSettings.from_mapping(own | {"endpoint": {"api_key_env": None}}), False)
    )
    work = stages_of(planned(synthesize={**SYNTHESIS, "seed_count": 20}))["synthesize"].work
    assert "calls: 160 at most" in said
    assert "160 calls" in work
    million = stages_of(planned(synthesize={**SYNTHESIS, "seed_count": 10**6}))["synthesize"]
    (line,) = (line for line in said.splitlines() if line.startswith("tokens: "))
    prompts = int(line.split()[2].replace(",", "")) / 20
    answers = 48 + 48 + 11 + 2 * 75 + 3 * 200  # Table 1, and the cap of the verdicts
    assert f"{prompts + answers:,.0f} M tokens" in million.work


def test_the_first_limit_of_a_synthesis_is_named():
    def slowest(**changes):
        stage = stages_of(planned(synthesize={**SYNTHESIS, "seed_count": 10**6, **changes}))["synthesize"]
        return stage.bottleneck, stage.hours

    assert slowest()[0] == "latency with 64 requests in flight"
    assert slowest(limits={"requests_per_minute": 600}) == ("limits.requests_per_minute", pytest.approx(8e6 / 600 / 60))
    assert slowest(limits={"tokens_per_minute": 1000})[0] == "limits.tokens_per_minute"
    assert slowest(in_flight=100_000, actors=4) == ("the driver's CPU", pytest.approx(8e6 * 0.06e-3 / 3600))
    assert slowest(batches={}) == ("the Batch API's window", pytest.approx(8 * 24))
    over = stages_of(planned(synthesize={**SYNTHESIS, "seed_count": 10**6, "limits": {"budget_usd": 1}}))
    assert over["synthesize"].obstacles == ("limits.budget_usd=1 ends it earlier",)


def test_a_canary_replaces_the_assumptions(tmp_path):
    forecast = {"seeds": 1000, "share_kept": [0.5, 0.4, 0.6], "calls": [7000, 1, 2], "tokens": [1e6, 1, 2]}
    file = tmp_path / "forecast.json"
    file.write_text(json.dumps(forecast | {"usd": [3.0, 1, 2], "hours": [0.5, 0.1, 1]}))
    made = planned(
        synthesize={**SYNTHESIS, "seed_count": 10_000, "measured": str(file)},
        train={"model": MODEL, "records_per_step": 100, "epochs": 1},
    )
    synthesis = stages_of(made)["synthesize"]
    assert (synthesis.usd, synthesis.hours, synthesis.bottleneck) == (30.0, 5.0, "latency, as measured")
    assert "5,000 records, 70,000 calls, 10 M tokens" in synthesis.work
    assert stages_of(made)["train"].work == "50 steps of 100 records"
    with pytest.raises(InputError, match=r"no forecast; give OUTPUT/latest/canary/forecast\.json"):
        planned(synthesize={**SYNTHESIS, "measured": str(tmp_path)})
    with pytest.raises(InputError, match="the speed of a served model is only known by measurement"):
        planned(synthesize={**SYNTHESIS, "endpoint": {"serve": {"model": "m"}}})


@pytest.mark.integration
def test_nodes_for_which_the_settings_do_not_work_have_a_row_with_the_reason():
    training = {"model": MODEL, "records": "/none", "records_per_step": 8}
    made = plan(PlanPipelineSettings.from_mapping({"train": training, "nodes": [1, 2]}))
    assert not stages_of(made)["train"].obstacles
    (row,) = made.stages[2]
    assert "records_per_step=8: 8 records a batch leave some of the 16 GPUs without any" in row.obstacles[0]
    with pytest.raises(InputError, match="16 GPUs without any"):
        plan(PlanPipelineSettings.from_mapping({"train": training, "hardware": {"nodes": 2}}))


@pytest.mark.integration
def test_the_pipelines_own_file_is_read_and_text_and_json_agree(capsys):
    file = Path(__file__).parents[2] / "jobs" / "configs" / "pipeline.yaml"
    arguments = [
        "plan",
        "pipeline",
        "--config",
        str(file),
        f"train.model={MODEL}",
        "index.passages=1000000",
        "nodes=[1]",
    ]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert main([*arguments, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert [stage["name"] for stage in values["stages"]["1"]] == ["synthesize", "train", "index", "serve"]
    assert "Not planned: analyze, clean, evaluate." in text
    for stage in values["stages"]["1"]:
        line = next(line for line in text.splitlines() if line.startswith(f"{stage['name']} "))
        assert f" {stage['usd']:,.0f} " in line
        assert stage["bottleneck"] in line


def test_a_pipeline_without_a_stage_to_plan_is_refused(capsys):
    assert main(["plan", "pipeline", "analyze.records=/r"]) == 2
    assert "no stage with a planner: analyze; add synthesize, train, index or serve" in capsys.readouterr().err
