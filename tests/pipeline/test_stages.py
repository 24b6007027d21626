"""Stages in order, what they pass on, and where a gate stops them."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from ray.core.generated.common_pb2 import ActorDiedErrorContext
from ray.exceptions import ActorDiedError, RayTaskError

from infembed_ray.cli.main import main
from infembed_ray.config.analysis import AnalyzeSettings
from infembed_ray.config.pipeline import PipelineSettings
from infembed_ray.config.serving import ServeSettings
from infembed_ray.config.verbs import Verb
from infembed_ray.errors import ClusterError, GateError, InputError, StartError
from infembed_ray.pipeline import stages
from infembed_ray.serving import distributed
from infembed_ray.storage.leases import is_held
from infembed_ray.storage.steps import Step, read_manifest, resolve
from tests.analysis.samples import publish

ALL = {
    "output": "/out",
    "synthesize": {"seeds": "/seeds.jsonl"},
    "analyze": {"clean": True},
    "train": {"model": "/backbone"},
    "evaluate": {"records": "/heldout.jsonl"},
    "index": {"corpus": "/corpus.jsonl"},
    "serve": {"port": 8001},
}


def test_a_stage_gets_the_addresses_of_the_outputs_before_it():
    settings = PipelineSettings.from_mapping(ALL)
    made = {stage: f"/made/{stage}" for stage in settings.stages}
    sections = {stage: stages.section(settings, stage, made) for stage in settings.stages}
    assert list(sections) == ["synthesize", "analyze", "train", "evaluate", "index", "serve"]
    assert sections["analyze"].records == "/made/synthesize"
    assert sections["train"].records == "/made/analyze"
    assert sections["evaluate"].models == {"base": "/backbone", "trained": "/made/train"}
    assert sections["evaluate"].gate == "trained"
    assert sections["index"].model == "/made/train"
    assert (sections["serve"].index, sections["serve"].port) == ("/made/index", 8001)
    assert [sections[stage].output for stage in ("synthesize", "train")] == ["/out/synthesize", "/out/train"]


def test_without_an_output_the_folder_of_its_stage_stands_for_the_newest():
    settings = PipelineSettings.from_mapping(ALL | {"index": {"corpus": "/c", "output": "milvus+http://host:1/a"}})
    assert stages.section(settings, "train", {}).records == "/out/analyze"
    assert stages.section(settings, "serve", {}).index == "milvus+http://host:1/a"


def test_a_uri_may_end_in_a_slash():
    settings = PipelineSettings.from_mapping(ALL | {"output": "s3://bucket/out/?endpoint_override=host"})
    assert stages.output_of(settings, "train") == "s3://bucket/out/train?endpoint_override=host"


def test_a_gate_stops_the_pipeline_and_a_lower_limit_goes_on_from_there(tmp_path, capsys):
    records = str(publish(tmp_path / "records"))

    def settings(least):
        analyze = {"records": records, "gates": {"min_kept": least}}
        return PipelineSettings.from_mapping({"output": str(tmp_path / "out"), "analyze": analyze})

    with pytest.raises(GateError, match=r"^analyze: gates\.min_kept=0\.5: the share of seeds kept is 0\.4286, "):
        stages.run(settings(0.5))
    assert not (tmp_path / "out" / "release").exists()
    capsys.readouterr()
    stages.run(settings(0.4))
    said = capsys.readouterr().out
    assert "pipeline: analyze (1 of 1)\nanalyze: nothing to do" in said
    release = read_manifest(resolve(tmp_path / "out" / "release"), "output")
    assert list(release["stages"]) == ["analyze"]
    report = release["stages"]["analyze"]
    assert report["report_only"]
    assert read_manifest(resolve(tmp_path / "out" / "analyze"), "output")["identity"] == report["identity"]
    assert report["address"].endswith(report["identity"])
    stages.run(settings(0.4))
    assert len(list((tmp_path / "out" / "release").glob("*/manifest.json"))) == 1


PASSED = {"figures": {"trained: records: p-MRR above the base's": "+2.00, > 0"}}
STAGES = {"train": {"model": "m", "records": "r"}, "evaluate": {"tasks": ["t"]}}
GATED = {  # sections -> gates of the output of `evaluate`, what is said, and whether an alias takes it as it is
    "passed": (STAGES, PASSED, "every gate is passed", True),
    "another limit": (
        STAGES,
        {"figures": dict.fromkeys(PASSED["figures"], "+2.00, > 1")},
        "every gate is passed",
        True,
    ),
    "off": (
        STAGES,
        {"off": ["evaluate.gate=null"]},
        "gate off: evaluate.gate=null; `runs promote` needs --ungated",
        False,
    ),
    "no evaluation": ({"train": STAGES["train"]}, {}, "gate off: no stage `evaluate`; `runs promote` needs", False),
    "nothing to gate": ({"index": {"model": "m", "corpus": "c"}}, {}, "no gate has a limit", True),
}


def test_gates_figures_and_waivers_are_part_of_a_release_and_a_waived_one_needs_a_flag(tmp_path, capsys):
    step = Step("evaluate", AnalyzeSettings(records="r", output=str(tmp_path)), str(tmp_path / "evaluate"), {})
    with step.publish():
        pass
    identities = set()
    for sections, gates, said, free in GATED.values():
        settings = PipelineSettings.from_mapping({"output": str(tmp_path / "out"), **sections})
        released = stages._publish_release(settings, {"evaluate": replace(step.published(), gates=gates)}).published()
        assert f"pipeline: {said}" in capsys.readouterr().out
        identities.add(released.manifest["identity"])
        assert released.manifest["gates"]["figures"] == {
            f"evaluate: {n}": f for n, f in gates.get("figures", {}).items()
        }
        alias = str(tmp_path / "live.release")
        assert main(["runs", "promote", released.address, alias]) == (0 if free else 2)
        assert free or "its gates are off (" in capsys.readouterr().err
        assert main(["runs", "promote", released.address, alias, "--ungated"]) == 0
    assert len(identities) == len(GATED)


def test_a_pipeline_that_runs_is_shown_as_running_and_a_second_one_is_refused(tmp_path, monkeypatch, capsys):
    analyze = {"records": str(publish(tmp_path / "records"))}
    settings = PipelineSettings.from_mapping({"output": str(tmp_path / "out"), "analyze": analyze})

    def run(*_, **__):
        assert main(["runs", str(tmp_path / "out")]) == 0
        with pytest.raises(InputError, match=rf"^output={tmp_path}/out: process \d+ on .* wait for it, or stop it"):
            stages.run(settings)
        raise InputError("stop")

    monkeypatch.setattr(Verb, "run", run)
    with pytest.raises(InputError, match="stop"):
        stages.run(settings)
    assert "running  pipeline pipeline" in capsys.readouterr().out
    assert main(["runs", str(tmp_path / "out")]) == 0
    assert "failed  pipeline pipeline" in capsys.readouterr().out


def died(message):
    """Return an error of Ray with a report of several lines."""
    return ActorDiedError(ActorDiedErrorContext(error_message=f"{message}\nline 2", class_name="C", actor_id=b"1" * 16))


FAILED_STARTS = {
    "bad input": (InputError("index=/none: bad"), InputError, "^serve: index=/none: bad$"),
    "two faults": (InputError("a=1: bad", "b=2: bad"), InputError, "^serve: a=1: bad; serve: b=2: bad$"),
    "no start": (StartError("the API did not start"), StartError, "^serve: the API did not start$"),
    "a dead actor": (died("killed"), ClusterError, r"^serve: a process of the run ended .*killed line 2.*$"),
    "input of a replica": (
        RayTaskError("f", "Traceback", InputError("model=x: bad")),
        InputError,
        "^serve: model=x: bad$",
    ),
    "a fault of ours": (ZeroDivisionError("x"), ZeroDivisionError, "^x$"),
    "Ctrl-C": (KeyboardInterrupt(), KeyboardInterrupt, "^$"),
}


@pytest.mark.parametrize(("failure", "kind", "said"), FAILED_STARTS.values(), ids=FAILED_STARTS)
@pytest.mark.parametrize("before", [True, False])
def test_latest_names_a_release_once_the_api_answers_with_it(tmp_path, monkeypatch, failure, kind, said, before):
    releases = tmp_path / "out" / "release"
    given = {"output": str(tmp_path / "out"), "analyze": {"records": str(publish(tmp_path / "records"))}}
    if before:
        stages.run(PipelineSettings.from_mapping(given))
    served = resolve(releases)

    def serve(settings, ready):
        assert resolve(releases) == served
        if failure is not None:
            raise failure
        assert is_held(tmp_path / "out", "pipeline")
        ready()
        assert resolve(releases) != served
        assert not is_held(tmp_path / "out", "pipeline")  # another pipeline may take the API over

    monkeypatch.setattr("infembed_ray.serving.distributed.run", serve)
    monkeypatch.setattr(stages, "_check_own", lambda *_: None)
    settings = PipelineSettings.from_mapping(given | {"serve": {"index": "/none"}})
    with pytest.raises(kind, match=said):
        stages.run(settings)
    assert resolve(releases) == served
    assert len(list(releases.glob("*/manifest.json"))) == 1 + before
    failure = None
    stages.run(settings)
    assert read_manifest(resolve(releases), "output")["settings"]["serve"]["index"] == "/none"
    assert len(list(releases.glob("*/manifest.json"))) == 1 + before


def test_a_file_for_serve_and_an_api_that_is_already_served_are_ready(tmp_path, monkeypatch):
    plan = SimpleNamespace(url="http://x", release=SimpleNamespace(fingerprint="0123"), write_config=lambda path: None)
    monkeypatch.setattr(distributed.Plan, "resolve", lambda settings: plan)
    monkeypatch.setattr(distributed, "served_fingerprint", lambda url: "0123")
    for settings in (ServeSettings(index="i", config_file="f.yaml"), ServeSettings(index="i")):
        called = []
        distributed.run(settings, ready=lambda called=called: called.append(True))
        assert called == [True]


def test_bad_input_of_a_stage_names_the_stage(tmp_path):
    settings = PipelineSettings.from_mapping({"output": str(tmp_path), "analyze": {"records": str(tmp_path / "none")}})
    with pytest.raises(InputError, match=r"^analyze.records="):
        stages.run(settings)


def test_the_command_checks_named_files_before_the_first_stage(tmp_path, capsys):
    assert main(["pipeline", f"output={tmp_path}", "synthesize.seeds=/none.jsonl", "train.model=/none"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "infembed pipeline: synthesize.seeds=/none.jsonl: no such file or directory",
        "infembed pipeline: train.model=/none: no such file or directory",
    ]


def test_check_reports_the_stages_that_can_be_checked_and_those_that_wait(tmp_path, capsys):
    records = publish(tmp_path / "records")
    given = [f"output={tmp_path / 'out'}", f"analyze.records={records}", "train.model=/m", f"train.records={records}"]
    assert main(["pipeline", *given, f"index.corpus={records}", "--dry-run"]) == 2
    said = capsys.readouterr()
    assert "pipeline: index: waits for train; its other settings are valid" in said.out
    assert "pipeline: analyze: " in said.out
    assert "infembed pipeline: train.model=/m: " in said.err


LATE_FAULTS = {
    "train": {"model": "/backbone", "offload": "all"},
    "evaluate": {"records": "/heldout.jsonl", "gate": "trianed", "tasks": ["followri"]},
    "index": {"corpus": "/corpus.jsonl", "metadata": {"text": "string"}},
    "serve": {"host": "0.0.0.0"},
}


def test_faults_of_later_stages_are_found_before_the_first_one(tmp_path, monkeypatch):
    monkeypatch.delenv("INFEMBED_API_KEYS", raising=False)
    settings = PipelineSettings.from_mapping(ALL | LATE_FAULTS | {"output": str(tmp_path / "out")})
    with pytest.raises(InputError) as error:
        stages.run(settings)
    assert {fault.setting for fault in error.value.faults} == {
        "train.offload",
        "train.model",
        "evaluate.models.base.model",
        "evaluate.tasks",
        "evaluate.gate",
        "index.metadata.text",
        "index.corpus",
        "serve.host",
    }
    assert stages.NOT_MADE not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_a_stage_waits_for_an_unfinished_one(tmp_path, monkeypatch):
    monkeypatch.setattr(Verb, "describe", lambda *_: iter(()))
    settings = PipelineSettings.from_mapping(ALL | {"output": str(tmp_path)})
    (tmp_path / "train" / ".0123.partial").mkdir(parents=True)
    (tmp_path / "train" / ".0123.partial" / "data").write_text("half")
    lines = list(stages.describe(settings))
    assert "index: waits for train; its other settings are valid" in lines
