"""Limits of the code's structure: lengths of files and functions, and tests that mirror modules.

Import circles are a contract of import-linter (pyproject.toml).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "infembed_ray"
FILE_LINES = 700
FUNCTION_LINES = 60
REASON = "# Long: "
"""A comment that begins so, above the def or its decorators, permits a longer function."""

TESTS_WITHOUT_A_MODULE = {
    "chaos": "kill processes of whole runs, or let endpoints fail",
    "docs": "run the documentation's samples",
    "gpu": "run on a GPU, without Ray",
    "jobs": "submit the job scripts",
    "reporting/test_browser.py": "opens every report in a browser",
    "retrieval/updates/test_refresh.py": "live shards while changes arrive, are damaged or missing",
    "retrieval/updates/test_channels.py": "hybrid searches of live_shard, against brute force",
    "serving/test_collections.py": "several collections behind one API on a cluster",
    "synthesis/test_batch_resuming.py": "runs that are killed while batches are pending",
    "synthesis/test_batch_runs.py": "whole runs in batches",
    "synthesis/test_complement.py": "sources of seeds and their complements",
    "synthesis/test_canary.py": "whole runs with a canary",
    "synthesis/test_cheap_judge.py": "the pipeline with two judges",
    "synthesis/test_asking_again.py": "makes records with a journal",
    "test_audit.py": "runs .ci/audit",
    "test_packaging.py": "builds the wheel",
    "test_structure.py": "this file",
}
"""Path below tests/ -> what it does instead of testing one module."""

# Known offenders. An entry that no longer offends fails the test: delete it. Add none.
LONG_FILES: set[str] = set()
LONG_FUNCTIONS: set[str] = set()
UNMATCHED_TESTS = {
    "serving/test_recipes.py",
}


def modules() -> Iterator[tuple[str, list[str]]]:
    """Path within the package and lines of every module."""
    for file in sorted(PACKAGE.rglob("*.py")):
        yield file.relative_to(PACKAGE).as_posix(), file.read_text(encoding="utf-8").splitlines()


def long_functions(module: str, lines: list[str]) -> Iterator[str]:
    for node in ast.walk(ast.parse("\n".join(lines))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            permitted = lines[first - 2].strip().startswith(REASON)
            if (node.end_lineno or 0) - node.lineno + 1 > FUNCTION_LINES and not permitted:
                yield f"{module}:{node.name}"


def test_no_file_is_too_long() -> None:
    assert {module for module, lines in modules() if len(lines) > FILE_LINES} == LONG_FILES


def test_no_function_is_too_long_without_a_reason() -> None:
    assert {name for module, lines in modules() for name in long_functions(module, lines)} == LONG_FUNCTIONS


def test_every_test_file_mirrors_a_module() -> None:
    unmatched = set()
    for file in (ROOT / "tests").rglob("test_*.py"):
        path = file.relative_to(ROOT / "tests")
        module = PACKAGE / path.with_name(path.name.removeprefix("test_"))
        exists = module.is_file() or module.with_suffix(".js").is_file()
        if not {path.parts[0], path.as_posix()} & TESTS_WITHOUT_A_MODULE.keys() and not exists:
            unmatched.add(path.as_posix())
    assert unmatched == UNMATCHED_TESTS
