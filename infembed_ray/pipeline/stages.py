"""`infembed pipeline`: the stages of one settings file, each from the output of the ones before; it stops at a failed gate.

A stage that has its output already has nothing to do, and an interrupted one resumes. So the same command goes on where the
pipeline was stopped, by a gate or by a kill. Before `serve`, the outputs that passed all gates are published as one release.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from infembed_ray.config.base import Settings
from infembed_ray.config.pipeline import BASE, TRAINED, WIRES, PipelineSettings
from infembed_ray.errors import GateError, InputError
from infembed_ray.places import address, errors_at, place_of, read_text
from infembed_ray.progress import say
from infembed_ray.storage import LATEST, Published, Step
from infembed_ray.verbs import VERBS

RELEASE = "release"
"""Folder of the output with the releases: one manifest each, which names the outputs of the stages."""


def run(settings: PipelineSettings) -> None:
    """Run all stages in order.

    Raises:
        InputError: a stage has bad input; the stages before it are finished.
        GateError: the records or the model failed a gate; nothing was promoted.
        StartError: the API did not start, or the canary was rolled back.
    """
    made: dict[str, Published] = {}
    for number, stage in enumerate(settings.stages, start=1):
        if stage == "serve":
            _publish_release(settings, made)
        say(f"\npipeline: {stage} ({number} of {len(settings.stages)})")
        own = section(settings, stage, {name: output.address for name, output in made.items()})
        try:
            output = VERBS[stage].run(own)
        except (GateError, InputError) as error:
            raise type(error)(*(f"{stage}: {fault}" for fault in error.args)) from error
        if isinstance(output, Published):
            made[stage] = output
            say(f"{stage}: {output.summary}")
    if "serve" not in settings.stages:
        _publish_release(settings, made)


def section(settings: PipelineSettings, stage: str, made: Mapping[str, str]) -> Settings:
    """Return the settings of a stage, with what it takes from earlier stages.

    Args:
        settings: of the pipeline.
        stage: its name.
        made: stage -> address of its output; without it, the folder of its outputs stands for the newest.
    """
    own: Settings = getattr(settings, stage)
    values: dict[str, Any] = {}
    for setting in WIRES[stage]:
        if maker := settings.maker(stage, setting):
            values[setting] = made.get(maker) or output_of(settings, maker)
    if "models" in values:
        assert settings.train is not None
        values["models"] = {BASE: settings.train.model, TRAINED: values["models"]}
    if "gate" in type(own).model_fields:
        values["gate"] = own.gate  # type: ignore[attr-defined]
    if "output" in type(own).model_fields:
        values["output"] = output_of(settings, stage)
    return type(own).from_mapping(own.model_dump(mode="json", exclude_unset=True) | values, stage)


def output_of(settings: PipelineSettings, stage: str) -> str:
    """Return where a stage publishes; `latest` there names its newest output."""
    own = getattr(settings, stage, None)
    return (own and own.output) or address(place_of(settings.output) / stage)


def check_stages(settings: PipelineSettings, checks: Mapping[str, Callable[[Any], Iterator[str]]]) -> Iterator[str]:
    """Check each stage whose inputs are there already; the others can only be checked when their turn comes.

    Args:
        settings: of the pipeline.
        checks: stage -> its check, which yields its plan line by line.

    Raises:
        InputError: mistakes were found; each line names the stage.
    """
    faults: list[str] = []
    for stage in settings.stages:
        makers = sorted(filter(None, {settings.maker(stage, setting) for setting in WIRES[stage]}))
        waiting = [made for made in makers if not _has_output(output_of(settings, made))]
        if waiting:
            yield f"{stage}: waits for {' and '.join(waiting)}; its other settings are valid"
            continue
        try:
            for line in checks[stage](section(settings, stage, {})):
                yield f"{stage}: {line}"
        except InputError as error:
            faults += [f"{stage}: {fault}" for fault in error.args]
    if faults:
        raise InputError(*faults)


def _has_output(output: str) -> bool:
    """Return whether a stage has published there; an unfinished output does not count."""
    place = place_of(output)
    with errors_at(place, "output"):
        return read_text(place / LATEST) is not None


def _publish_release(settings: PipelineSettings, made: Mapping[str, Published]) -> None:
    """Publish the addresses and identities of the stages' outputs, all of which passed their gates."""
    identities = {stage: str(output.manifest["identity"]) for stage, output in made.items()}
    step = Step(RELEASE, settings, output_of(settings, RELEASE), {}, identities)
    if not (done := step.finished()):
        with step.publish() as staging:
            staging.facts["stages"] = {
                stage: {"address": output.address, "identity": identities[stage]} for stage, output in made.items()
            }
        done = step.published()
    say(f"pipeline: every gate is passed; release {done.manifest['identity']} is {done.address}")
