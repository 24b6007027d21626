"""Aliases of releases, here and in an object store; settings take the outputs of the release that an alias names."""

from __future__ import annotations

import pytest

from infembed_ray.cli.main import main
from infembed_ray.config.analysis import AnalyzeSettings
from infembed_ray.config.evaluation import EvaluateSettings
from infembed_ray.config.pipeline import PipelineSettings
from infembed_ray.config.serving import ServeSettings
from infembed_ray.errors import InputError
from infembed_ray.pipeline import stages
from infembed_ray.storage import releases
from infembed_ray.storage.steps import Step


def publish_release(output, tag):
    """Publish outputs of stages and, as a pipeline does, a release of them; returns the release's address and stages."""
    made = {}
    for stage in ("synthesize", "train", "index"):
        step = Step(
            stage, AnalyzeSettings(records=tag, output=f"{output}/{stage}"), f"{output}/{stage}", {}, {"tag": tag}
        )
        with step.publish() as staging:
            (staging.path / "data").write_text(tag)
        made[stage] = step.published()
    settings = PipelineSettings.from_mapping({"output": output, "index": {"model": "m", "corpus": "c"}})
    stages._publish_release(settings, made).become_latest()
    return {stage: published.address for stage, published in made.items()}


@pytest.fixture(params=["here", "in a store"])
def output(request, tmp_path):
    if request.param == "here":
        return str(tmp_path / "runs")
    return f"{request.getfixturevalue('bucket')}/releases"


@pytest.mark.integration
def test_settings_take_the_outputs_of_the_promoted_release(output, capsys):
    alias = f"{output}/production.release"
    first = publish_release(output, "one")
    assert main(["runs", "promote", f"{output}/release", alias]) == 0
    serve = ServeSettings(index=alias)
    assert releases.resolved(serve).index == first["index"]
    evaluate = EvaluateSettings(
        models={"old": "org/name", "new": alias, "raw": {"kind": "encoder", "model": alias}}, records=alias, output="o"
    )
    settings = releases.resolved(evaluate)
    assert settings.records == first["synthesize"]
    assert [settings.models["old"], settings.models["new"], settings.models["raw"].model] == [
        "org/name",
        first["train"],
        first["train"],
    ]
    second = publish_release(output, "two")
    assert releases.resolved(serve).index == first["index"]  # a new release changes nothing before it is promoted
    capsys.readouterr()
    assert main(["runs", "promote", f"{output}/release", alias]) == 0
    assert capsys.readouterr().out.startswith(f"{alias} names {output}/release/")
    assert releases.resolved(serve).index == second["index"]


def test_a_roll_back_promotes_the_older_release(tmp_path):
    alias = str(tmp_path / "production.release")
    made = {}
    for tag in ("one", "two"):
        made[tag] = publish_release(str(tmp_path), tag)
        assert main(["runs", "promote", str(tmp_path / "release"), alias]) == 0
    older = min(
        (path for path in (tmp_path / "release").glob("*/manifest.json")), key=lambda path: path.stat().st_mtime
    )
    assert main(["runs", "promote", str(older.parent), alias]) == 0
    assert releases.resolved(ServeSettings(index=alias)).index == made["one"]["index"]


def test_bad_names_are_input_errors(tmp_path, capsys):
    made = publish_release(str(tmp_path), "one")
    alias = str(tmp_path / "a.release")
    for release, name, message in (
        (f"{tmp_path}/release", f"{tmp_path}/alias", "must end in .release"),
        (made["train"], alias, "is an output of `train`"),
        (f"{tmp_path}/none", alias, "no such file or directory"),
        (alias, alias, "no such alias"),
    ):
        assert main(["runs", "promote", release, name]) == 2
        assert message in capsys.readouterr().err
    with pytest.raises(InputError, match=r"index=.*a\.release: no such alias; `infembed runs promote"):
        releases.resolved(ServeSettings(index=alias))
    assert main(["serve", f"index={alias}", "--dry-run"]) == 2
    assert "no such alias" in capsys.readouterr().err
