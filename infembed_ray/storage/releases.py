"""Releases: an alias names a release, and settings name the alias in place of an output of its stages.

A release is what `infembed pipeline` publishes when all gates are passed: a manifest with the addresses of the stages' outputs.
An alias is a small JSON file, local or in an object store, which is replaced atomically.
"""

from typing import TypeVar

from infembed_ray.config.base import Kind, Settings, with_texts
from infembed_ray.errors import InputError
from infembed_ray.progress import say
from infembed_ray.storage.leases import timestamp
from infembed_ray.storage.places import address, errors_at, read_json, write_json
from infembed_ray.storage.steps import find_input, open_place, read_manifest

S = TypeVar("S", bound=Settings)

RELEASE = "release"
"""Stage of a release, and folder of the releases in a pipeline's output."""
ALIAS = ".release"
"""Ending of an alias."""


def promote(release: str, alias: str, ungated: bool = False) -> tuple[str | None, str]:
    """Let an alias name a release.

    Args:
        release: the release, the folder of the releases (then its latest), or another alias.
        alias: path or URI that ends in `.release`; created if missing.
        ungated: accept a release whose gates are off.

    Returns:
        The address of the release that the alias named before, if any, and the one that it names now.

    Raises:
        InputError: there is no such release, its gates are off, or the alias has another ending; the alias is unchanged.
    """
    if not alias.endswith(ALIAS):
        raise InputError.of("ALIAS", alias, f"must end in {ALIAS}, so that settings know it from other files", "add it")
    place = find_input(followed(release, "RUN"), "RUN")
    manifest = read_manifest(place, "RUN")
    if (stage := manifest["stage"]) != RELEASE:
        remedy = f"give one in a pipeline's folder `{RELEASE}`"
        raise InputError.of("RUN", release, f"is an output of `{stage}`", remedy)
    if (off := manifest.get("gates", {}).get("off")) and not ungated:
        remedy = "run the pipeline with its gates, or promote with --ungated"
        raise InputError.of("RUN", release, f"its gates are off ({', '.join(off)})", remedy)
    target = open_place(alias, "ALIAS")
    with errors_at(target, "ALIAS"):
        before = (read_json(target) or {}).get("release")
        write_json(target, {"release": address(place), "promoted": timestamp()})
    return before, address(place)


def resolved(settings: S) -> S:
    """Return settings in which the outputs of releases take the place of aliases.

    Raises:
        InputError: there is no such alias, or its release has no output of the stage that a setting needs.
    """
    return with_texts(settings, _resolved)


def _resolved(name: str, kind: Kind, value: str) -> str:
    if not (kind.stages and value.endswith(ALIAS)):
        return value
    stages = read_manifest(find_input(followed(value, name), name), name)["stages"]
    made = (stages[stage] for stage in kind.stages if stage in stages)
    output = next((each["address"] for each in made if not each.get("report_only")), None)
    if output is None:
        raise InputError.of(name, value, f"its release has no output of {' or '.join(kind.stages)}", "name one itself")
    say(f"{name}: {value} is {output}")
    return str(output)


def followed(value: str, setting: str) -> str:
    """Return the address of the release that an alias names; any other value itself.

    Raises:
        InputError: there is no such alias.
    """
    if not value.endswith(ALIAS):
        return value
    place = open_place(value, setting)
    with errors_at(place, setting):
        release = read_json(place)
    if release is None:
        raise InputError.of(setting, value, "no such alias", f"`infembed runs promote RELEASE {value}` makes it")
    return str(release["release"])
