"""The documentation agrees with the code: commands, settings, links, files, tests and metrics."""

import doctest
import json
import re
import subprocess
import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import infembed_ray
from infembed_ray.cli import main as cli
from infembed_ray.config.base import Settings, settings_classes
from infembed_ray.serving import schema
from infembed_ray.telemetry import METRICS
from scripts import reference
from tests.docs.pages import ROOT, Block, all_pages, anchors, blocks, commands, inline_code, prose, written

SHELL = [block for block in blocks() if block.language in ("bash", "console")]
SOURCES = ("infembed_ray", "tests", "benchmarks", "jobs", "examples")


def settings_of(parsed: Any) -> type[Settings] | None:
    """The settings class of a command."""
    command = cli.COMMANDS[parsed.verb]
    return command.settings if isinstance(command, cli.Verb) else None


@cache
def classes() -> set[type[Settings]]:
    """All settings classes of all verbs, nested ones included."""
    return set(reference.places())


def is_setting(name: str) -> bool:
    """Whether `name`, with dots into nested settings, is a setting of some verb."""
    first, *rest = name.split(".")
    fields = [cls.model_fields[first] for cls in classes() if first in cls.model_fields]
    return bool(fields) and (not rest or any(_has(field.annotation, rest) for field in fields))


def _has(annotation: Any, names: list[str]) -> bool:
    nested = settings_classes(annotation)
    if not nested:  # a mapping of names that the user chooses
        return "dict" in str(annotation)
    return any(
        (names[0] in cls.model_fields and (len(names) == 1 or _has(cls.model_fields[names[0]].annotation, names[1:])))
        or ("dict" in str(annotation) and (len(names) == 1 or names[1] in cls.model_fields))
        for cls in nested
    )


@pytest.mark.parametrize("block", SHELL, ids=str)
def test_every_command_has_valid_settings(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # of relative --config files
    for arguments in commands(block.code):
        if "--help" in arguments or "--version" in arguments:
            continue
        parsed = cli.parse(arguments)
        settings = settings_of(parsed)
        if settings is not None:
            settings.load(parsed.config, parsed.overrides)


@pytest.mark.parametrize("page", written())
def test_every_command_in_a_sentence_has_known_settings(page: str) -> None:
    unknown = []
    for code in inline_code(page):
        if re.match(r"infembed \w+ .*=", code) and "..." not in code:
            parsed = cli.parse(commands(code)[0])
            names = [override.partition("=")[0] for override in getattr(parsed, "overrides", [])]
            unknown += [name for name in names if not is_setting(name)]
    assert not unknown


@pytest.mark.parametrize("block", [b for b in blocks() if b.language in ("bash", "console", "python")], ids=str)
def test_every_block_runs_or_says_what_it_needs(block: Block) -> None:
    if block.tested:
        assert (ROOT / block.tested).is_file()
    if block.language == "python":
        compile(block.code, str(block), "exec")


@pytest.mark.parametrize("page", written())
def test_inline_settings_and_identifiers_exist(page: str) -> None:
    classes = list(vars(schema).values())
    requests = {name for cls in classes if hasattr(cls, "model_fields") for name in cls.model_fields}
    unknown = []
    for code in inline_code(page):
        if setting := re.fullmatch(r"([a-z_]+(?:\.\w+)*)=[^= ].*", code):
            if not is_setting(setting[1]) and setting[1] not in requests | OTHERS:
                unknown.append(code)
        elif re.fullmatch(r"[a-z]+(_[a-z0-9]+)+", code) and code not in words() | OTHERS:
            unknown.append(code)
    assert not unknown


OTHERS = {"config.is_causal", "log_to_driver", "actimeo", "save_16bit_model", "check_embedding_ctx_length"}
"""Names of other software, which our source does not contain."""


@cache
def words() -> set[str]:
    """All identifiers of the source."""
    files = [f for top in SOURCES for f in (ROOT / top).rglob("*") if f.suffix in (".py", ".yaml", ".md", ".html")]
    files.append(ROOT / "pyproject.toml")
    found = {word for file in files for word in re.findall(r"\w+", file.read_text(encoding="utf-8"))}
    return found | reference.metrics().keys() | {f"infembed_{name}" for name in METRICS}


@pytest.mark.parametrize("page", written())
def test_files_and_tests_that_are_named_exist(page: str) -> None:
    missing = []
    for code in inline_code(page):
        name, _, test = code.partition("::")
        top = name.split("/")[0]
        if "/" in name and re.fullmatch(r"[\w./-]+\.(py|md|yaml|html)", name):
            inside = [ROOT / name, ROOT / "infembed_ray" / name]
            if top in (*SOURCES, "docs") or (ROOT / "infembed_ray" / top).is_dir():
                found = [file for file in inside if file.is_file()]
                if not found or (test and f"def {test}" not in found[0].read_text(encoding="utf-8")):
                    missing.append(code)
        unknown_test = (test or name).startswith("test_") and (test or name) not in words()
        unknown_module = re.fullmatch(r"infembed_ray(\.\w+)+", name) and not _is_module_or_member(name)
        if unknown_test or unknown_module:
            missing.append(code)
    assert not missing


def _is_module_or_member(name: str) -> bool:
    parts = name.split(".")
    for end in (len(parts), len(parts) - 1, len(parts) - 2):
        path = ROOT.joinpath(*parts[:end])
        if path.with_suffix(".py").is_file() or path.is_dir():
            return all(part in words() for part in parts[end:])
    return False


@pytest.mark.parametrize("page", all_pages())
def test_links_lead_somewhere(page: str) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", prose(all_pages()[page]))):
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        linked = str((ROOT / page).parent.joinpath(path).resolve().relative_to(ROOT)) if path else page
        exists = linked in all_pages() or (ROOT / linked).is_file()
        if not exists or (anchor and anchor not in anchors(all_pages().get(linked, ""))):
            broken.append(target)
    assert not broken


def test_links_to_the_documentation_from_the_rest_of_the_repository_exist() -> None:
    files = [f for top in SOURCES for f in (ROOT / top).rglob("*") if f.suffix in (".py", ".yaml", ".html")]
    named = {
        (str(file.relative_to(ROOT)), name)
        for file in [*files, ROOT / "cluster.yaml"]
        for name in re.findall(r"\bdocs/[\w/-]+\.md", file.read_text(encoding="utf-8"))
    }
    assert not [link for link in named if not (ROOT / link[1]).is_file()]


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "zensical.toml").read_text(encoding="utf-8")
    pages = [page.removeprefix("docs/") for page in all_pages() if page.startswith("docs/")]
    pages = [page for page in pages if not page.startswith("contributing/")]
    assert not [page for page in pages if f'"{page}"' not in navigation]


def test_the_reference_is_what_the_code_says() -> None:
    files = {str(file.relative_to(reference.REFERENCE)): file for file in reference.REFERENCE.rglob("*.md")}
    committed = {name: file.read_text(encoding="utf-8") for name, file in files.items()}
    assert committed == reference.generated(), "run python -m scripts.reference, and commit docs/reference"


@pytest.mark.integration
def test_the_reference_depends_on_the_code_alone(tmp_path: Path) -> None:
    for name in ("scripts", "infembed_ray"):
        (tmp_path / name).symlink_to(ROOT / name)
    script = "import infembed_ray.serving.schema, json; from scripts import reference; print(json.dumps(reference.generated()))"
    environment = {"PYTHONHASHSEED": "7", "TZ": "Asia/Kathmandu", "COLUMNS": "40", "HOME": str(tmp_path), "LC_ALL": "C"}
    environment |= {"PYTHONPATH": str(tmp_path), "INFEMBED_API_KEY": "x", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", script], cwd="/", env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == reference.generated()


@pytest.mark.parametrize(
    "module", sorted({f"infembed_ray.{m}" for public in reference.PYTHON.values() for m in public})
)
def test_doctests_of_the_public_api(module: str) -> None:
    assert doctest.testmod(import_module(module)).failed == 0


def test_the_reference_has_every_public_name() -> None:
    page = reference.generated()["python.md"]
    assert not [name for name in infembed_ray.__all__ if f"\n### {name}\n" not in page]
