"""`infembed pipeline`: the stages of one settings file, each from the output of the ones before; it stops at a failed gate.

A stage that has its output already has nothing to do, and an interrupted one resumes. So the same command goes on where the
pipeline was stopped, by a gate or by a kill. Before `serve`, the outputs that passed all gates are published as one release.
`latest` names it once the API answers with it.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from infembed_ray.config.base import Settings
from infembed_ray.config.pipeline import BASE, TRAINED, WIRES, PipelineSettings
from infembed_ray.config.verbs import VERBS
from infembed_ray.errors import KNOWN, Fault, InputError, check_all, explained
from infembed_ray.progress import say
from infembed_ray.storage.places import address, errors_at, place_of
from infembed_ray.storage.releases import RELEASE
from infembed_ray.storage.steps import Published, Step, alone, newest, open_place

NOT_MADE = "/output-of-an-earlier-stage"
"""Stands for an output that is not there yet; faults that name it are none."""


def run(settings: PipelineSettings) -> None:
    """Run all stages in order.

    Raises:
        InputError: a stage has bad input: before the first stage if that does not depend on an earlier one's output.
        GateError: the records or the model failed a gate; nothing was promoted.
        ClusterError: the API did not start, the release ranked its probes worse, or Ray lost a process of the run.
    """
    checked = (stage for stage in settings.stages if _makers(settings, stage))
    check_all(*(partial(_check_own, settings, stage) for stage in checked))
    with alone(open_place(settings.output, "output"), "pipeline") as finish:
        _run_stages(settings, finish)


def _run_stages(settings: PipelineSettings, finish: Callable[[], None]) -> None:
    made: dict[str, Published] = {}
    for number, stage in enumerate(settings.stages, start=1):
        more: dict[str, Any] = {}
        if stage == "serve":  # which may stay in the foreground; another pipeline can then take the API over
            release = _publish_release(settings, made)
            more["ready"] = partial(_call, release.become_latest, finish)
        say(f"\npipeline: {stage} ({number} of {len(settings.stages)})")
        own = section(settings, stage, {name: output.address for name, output in made.items()})
        try:
            output = VERBS[stage].run(own, **more)
        except Exception as raised:
            error = explained(raised, stage)
            if not isinstance(error, KNOWN):
                raise
            if isinstance(error, InputError):
                raise error.within(f"{stage}.") from raised
            raise type(error)(*(f"{stage}: {fault}" for fault in error.args)) from raised
        if isinstance(output, Published):
            made[stage] = output
            say(f"{stage}: {output.summary}")
    if "serve" not in settings.stages:
        _publish_release(settings, made).become_latest()


def _call(*functions: Callable[[], None]) -> None:
    for function in functions:
        function()


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
    return type(own).from_mapping(own.model_dump(mode="json", exclude_unset=True) | values, f"{stage}.")


def output_of(settings: PipelineSettings, stage: str) -> str:
    """Return where a stage publishes; `latest` there names its newest output."""
    own = getattr(settings, stage, None)
    return (own and own.output) or address(place_of(settings.output) / stage)


def describe(settings: PipelineSettings) -> Iterator[str]:
    """Yield what each stage would do; a stage that waits for another one is checked without what depends on that.

    Raises:
        InputError: mistakes were found; each line names the stage.
    """
    faults: list[Fault] = []
    for stage in settings.stages:
        waiting = [made for made in _makers(settings, stage) if not _has_output(output_of(settings, made))]
        try:
            if waiting:
                _check_own(settings, stage)
                yield f"{stage}: waits for {' and '.join(waiting)}; its other settings are valid"
            else:
                yield from (f"{stage}: {line}" for line in VERBS[stage].describe(section(settings, stage, {})))
        except InputError as error:
            faults += error.faults if waiting else error.within(f"{stage}.").faults
    if faults:
        raise InputError(*faults)


def _check_own(settings: PipelineSettings, stage: str) -> None:
    """Check what a stage does not take from earlier ones.

    Raises:
        InputError: mistakes were found; each line names the stage.
    """
    try:
        for _ in VERBS[stage].describe(section(settings, stage, dict.fromkeys(WIRES, NOT_MADE))):
            pass
    except InputError as error:
        if faults := [fault for fault in error.faults if NOT_MADE not in str(fault)]:
            raise InputError(*faults).within(f"{stage}.") from error


def _makers(settings: PipelineSettings, stage: str) -> list[str]:
    """Return the earlier stages whose outputs a stage takes."""
    return sorted(filter(None, {settings.maker(stage, setting) for setting in WIRES[stage]}))


def _has_output(output: str) -> bool:
    """Return whether a stage has published an output there."""
    place = place_of(output)
    with errors_at(place, "output"):
        return bool(newest(place))


def _publish_release(settings: PipelineSettings, made: Mapping[str, Published]) -> Step:
    """Publish the addresses and identities of the stages' outputs, with what their gates compared.

    Returns:
        The step of the release. `latest` does not name it yet.
    """
    identities = {stage: str(output.manifest["identity"]) for stage, output in made.items()}
    off = [name for output in made.values() for name in output.gates.get("off", [])]
    off += ["no stage `evaluate`"] if "train" in settings.stages and "evaluate" not in settings.stages else []
    figures = {
        f"{stage}: {name}": f for stage, output in made.items() for name, f in output.gates.get("figures", {}).items()
    }
    gates = {"off": off, "figures": figures}
    decided = {"gates": json.dumps(gates, sort_keys=True)}
    step = Step(RELEASE, settings, output_of(settings, RELEASE), {}, identities | decided)
    if not (done := step.found()):
        with step.publish(latest=False) as staging:
            staging.facts["gates"] = gates
            staging.facts["stages"] = {
                stage: {"address": output.address, "identity": identities[stage]} for stage, output in made.items()
            }
            if settings.analyze and not settings.analyze.clean and "analyze" in made:
                staging.facts["stages"]["analyze"]["report_only"] = True
        done = step.published()
    passed = "every gate is passed" if figures else "no gate has a limit"
    said = f"gate off: {', '.join(off)}; `runs promote` needs --ungated" if off else passed
    say(f"pipeline: {said}; release {done.manifest['identity']} is {done.address}")
    return step
