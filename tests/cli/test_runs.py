"""Outputs found by their manifests, and what they were made from: real outputs of `Step`, here and in an object store."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from infembed_ray.cli.main import main
from infembed_ray.config.analysis import AnalyzeSettings
from infembed_ray.config.pipeline import PipelineSettings
from infembed_ray.pipeline import stages
from infembed_ray.progress import track
from infembed_ray.storage import steps
from infembed_ray.storage.leases import lease
from infembed_ray.storage.object_store import Folder
from infembed_ray.storage.places import address, listing, place_of, write_json
from infembed_ray.storage.steps import Step, fingerprint
from infembed_ray.synthesis import templates


def publish(stage, output, inputs, **facts):
    """Publish an output of a stage, and return its address."""
    step = Step(stage, AnalyzeSettings(records="", output=output), output, inputs)
    with step.publish() as staging:
        (staging.path / "data").write_text(stage)
        staging.facts |= facts
    return step.published().address


@pytest.fixture
def made(tmp_path):
    seeds = tmp_path / "seeds.jsonl"
    seeds.write_text("{}\n")
    records = publish("synthesize", str(tmp_path / "runs" / "records"), {"seeds": seeds}, usd=1.25)
    model = publish("train", str(tmp_path / "runs" / "model"), {"records": tmp_path / "runs" / "records"})
    index = publish("index", str(tmp_path / "runs" / "index"), {"model": tmp_path / "runs" / "model", "corpus": seeds})
    return {"seeds": str(seeds), "records": records, "model": model, "index": index}


def lines(capsys, *arguments):
    capsys.readouterr()
    assert main(list(arguments)) == 0
    return capsys.readouterr().out.splitlines()


def as_json(capsys, *arguments):
    return json.loads("\n".join(lines(capsys, *arguments, "--json")))


def test_a_run_shows_its_inputs_and_theirs_its_cost_and_the_next_command(made, tmp_path, capsys):
    shown = lines(capsys, "runs", "show", made["index"])
    assert shown[0].startswith("finished  index ")
    assert shown[1] == f"  next: infembed serve index={made['index']}"
    ancestry = [line for line in shown if re.match(" +[a-z]+: ", line)][1:]
    assert [((len(line) - len(line.lstrip())) // 2, line.split()[0]) for line in ancestry] == [
        (1, "model:"),
        (2, "records:"),
        (3, "seeds:"),
        (1, "corpus:"),
    ]
    assert "1.25 USD" in ancestry[1]
    assert made["seeds"] in ancestry[2]
    assert lines(capsys, "runs", "show", str(tmp_path / "runs" / "index")) == shown  # by `latest`
    values = as_json(capsys, "runs", "show", made["records"])
    expected = {"state": "finished", "stage": "synthesize", "usd": 1.25, "address": made["records"]}
    assert values | expected == values
    assert values["size"] == sum(file.stat().st_size for file in Path(made["records"]).iterdir())


def test_the_bundled_prompts_have_the_same_name_in_every_copy_of_the_package(tmp_path, monkeypatch, capsys):
    """The copy that `ray job submit` uploads is deleted after the job."""
    publish("synthesize", str(tmp_path / "runs"), {"prompts": templates.DIRECTORY})
    monkeypatch.chdir(tmp_path)
    assert lines(capsys, "runs", "show", "runs")[-1].split() == [
        "prompts:",
        "infembed_ray/synthesis/prompts",
        fingerprint(templates.DIRECTORY),
    ]


def test_all_outputs_are_listed_with_the_latest(made, tmp_path, capsys):
    again = publish("train", str(tmp_path / "runs" / "model"), {"records": tmp_path / "seeds.jsonl"})
    runs = as_json(capsys, "runs", str(tmp_path / "runs"))
    latest = {run["address"]: run["latest"] for run in runs if run["stage"] == "train"}
    assert latest == {made["model"]: False, again: True}
    shown = [line for line in lines(capsys, "runs", str(tmp_path / "runs")) if not line.startswith(" ")]
    assert [line.split()[0] for line in shown] == ["finished"] * 4


def test_a_next_step_that_is_done_is_not_suggested(tmp_path, capsys):
    where, stages_of = tmp_path / "runs", [("synthesize", "seeds"), ("train", "records"), ("index", "model")]
    (made := tmp_path / "seeds.jsonl").write_text("{}\n")
    for stage, name in stages_of:
        made = Path(publish(stage, str(where / stage), {name: made}))
        shown = lines(capsys, "runs", str(where))
        assert [line.startswith("  next: ") for line in shown[1:]] == [False] * (len(shown) - 2) + [True]
        assert str(made) in shown[-1]
        assert any("next: " in line for line in lines(capsys, "runs", "show", str(made)))


def test_outputs_in_an_object_store_are_read_there(bucket, tmp_path, capsys):
    seeds = tmp_path / "seeds.jsonl"
    seeds.write_text("{}\n")
    root = Folder.open(bucket, "output") / "lineage"
    records = publish("synthesize", (root / "records").uri, {"seeds": seeds})
    model = publish("train", (root / "model").uri, {"records": Folder.open(records, "records")})
    ancestry = as_json(capsys, "runs", "show", model)["ancestry"]
    assert [(made["depth"], made["name"]) for made in ancestry] == [(1, "records"), (2, "seeds")]
    runs = as_json(capsys, "runs", root.uri)
    assert {(run["stage"], run["latest"]) for run in runs} == {("synthesize", True), ("train", True)}


@pytest.mark.parametrize("verb", ["runs", "runs show"])
def test_a_place_without_outputs_is_an_input_error(verb, tmp_path, capsys):
    assert main([*verb.split(), str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err


@pytest.mark.parametrize("where", ["here", "in a store"])
def test_an_unfinished_run_has_its_progress_its_error_and_its_command(where, tmp_path, capsys, request, monkeypatch):
    monkeypatch.setattr(steps, "UPDATE_S", 0.0)
    monkeypatch.setattr(sys, "argv", ["/venv/bin/infembed", "train", "seed=1", "model=a b"])
    output = str(tmp_path) if where == "here" else (Folder.open(request.getfixturevalue("bucket"), "o") / "status").uri
    step = Step("train", AnalyzeSettings(records="", output=output), output, {})
    with pytest.raises(ValueError, match="disk"), step.publish():
        with track("train", 10) as advance:
            advance(3, note="loss 1.5")
        running = lines(capsys, "runs", output)
        assert running[0].startswith(f"running  train {step.identity}  began ")
        assert running[1:] == ["  progress: train: 3/10  loss 1.5"]
        raise ValueError("no space on this\ndisk")
    for failed in (lines(capsys, "runs", output), lines(capsys, "runs", "show", f"{output}/{step.identity}")):
        assert failed[0].startswith(f"failed  train {step.identity}")
        assert failed[1:] == [
            "  progress: train: 3/10  loss 1.5",
            "  error: ValueError: no space on this disk",
            "  next: infembed train seed=1 'model=a b'  starts it again",  # it has no state of a training
        ]
    state = (step.remote / "states" / "step-1" / "a") if step.remote else step.partial / "states" / "step-1" / "a"
    write_json(state, {})
    assert lines(capsys, "runs", output)[-1].endswith("'model=a b'  resumes it")
    with step.publish() as staging:
        (staging.path / "data").write_text("done")
    assert [line.split()[0] for line in lines(capsys, "runs", output)] == ["finished", "next:"]


@pytest.mark.integration
def test_a_killed_run_is_interrupted(tmp_path, capsys):
    code = f"""
import os, signal
from infembed_ray.config.analysis import AnalyzeSettings
from infembed_ray.storage.steps import Step
with Step("train", AnalyzeSettings(records="", output={str(tmp_path)!r}), {str(tmp_path)!r}, {{}}).publish():
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    assert lines(capsys, "runs", str(tmp_path))[0].startswith("interrupted  train ")


# ------------------------------------------------------------------------------------------------------------- clean


@pytest.fixture(params=["here", "in a store"])
def root(request, tmp_path):
    """A place for outputs: a directory, or a folder of an object store."""
    if request.param == "here":
        return tmp_path / "clean"
    return Folder.open(request.getfixturevalue("bucket"), "output") / f"clean-{tmp_path.name}"


def versions(root, stage, number=3):
    """Publish some versions of a stage's output, oldest first."""
    made = []
    for tag in range(number):
        output = address(root / stage)
        step = Step(stage, AnalyzeSettings(records="", output=output), output, {}, {"tag": str(tag)})
        with step.publish() as staging:
            (staging.path / "data").write_text(str(tag))
        made.append(step.published())
    return made


def removable(capsys, root, *options):
    return {entry["address"] for entry in as_json(capsys, "runs", "clean", address(root), *options)}


@pytest.mark.integration
def test_clean_removes_what_nothing_names_and_only_with_yes(root, capsys):
    models = versions(root, "train")
    indexes = versions(root, "index")
    output = address(root)
    pipeline = PipelineSettings.from_mapping({"output": output, "index": {"model": "m", "corpus": "c"}})
    for number in (0, 1):  # two releases; an alias names the first
        stages._publish_release(pipeline, {"train": models[number], "index": indexes[number]}).become_latest()
        if number == 0:
            assert main(["runs", "promote", f"{output}/release", f"{output}/live.release"]) == 0
    extra = versions(root, "synthesize", 2)
    expected = {extra[0].address}
    assert removable(capsys, root) == expected
    before = listing(root)
    assert removable(capsys, root) == expected
    assert listing(root) == before
    assert removable(capsys, root, "--yes") == expected
    assert {run["address"] for run in as_json(capsys, "runs", output) if run["stage"] != "release"} == {
        *(model.address for model in models),
        *(index.address for index in indexes),
        extra[1].address,
    }
    assert removable(capsys, root, "--yes") == set()


def test_clean_keeps_the_inputs_of_what_is_kept_and_what_a_run_holds(tmp_path, capsys):
    records = versions(tmp_path, "synthesize", 3)
    output = address(tmp_path / "train")
    step = Step("train", AnalyzeSettings(records="", output=output), output, {"records": place_of(records[0].address)})
    with step.publish() as staging:
        (staging.path / "data").write_text("")
    with lease(tmp_path / "synthesize", records[1].path.name, "output", "x"):
        assert removable(capsys, tmp_path) == set()
    assert removable(capsys, tmp_path) == {records[1].address}


def test_clean_removes_a_stale_partial_output_but_none_of_a_running_one(root, capsys):
    output = address(root / "train")
    settings = AnalyzeSettings(records="", output=output)
    steps = [Step("train", settings, output, {}, {"tag": tag}) for tag in ("killed", "running")]

    def write_half(staging):
        (staging.path / "data").write_text("half")
        if staging.remote is not None:
            staging.remote.write("states/data", "half")

    with pytest.raises(ValueError, match="killed"), steps[0].publish() as staging:
        write_half(staging)
        raise ValueError("killed")
    with steps[1].publish() as staging:
        write_half(staging)
        stale = {address(steps[0].remote or steps[0].partial)}
        assert removable(capsys, root, "--yes") == stale
        assert removable(capsys, root) == set()
        assert not any(steps[0].identity in name for name in listing(root) if not name.endswith(".lock"))
    assert steps[1].found() is not None


def test_clean_leaves_files_of_others_alone(made, tmp_path, capsys):
    copy = tmp_path / "runs" / "copy" / "manifest.json"
    copy.parent.mkdir()
    copy.write_text((Path(made["model"]) / "manifest.json").read_text())
    assert removable(capsys, tmp_path / "runs", "--yes") == set()
    assert copy.exists()
