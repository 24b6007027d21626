"""Limits of the code's structure: lengths of files and functions, and names of classes.

Import circles are a contract of import-linter (pyproject.toml).
"""

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "infembed_ray"
FILE_LINES = 700
FUNCTION_LINES = 60
REASON = "# Long: "
"""A comment that begins so, above the def or its decorators, permits a longer function."""

# Known offenders. An entry that no longer offends fails the test: delete it. Add none.
LONG_FILES: set[str] = set()
LONG_FUNCTIONS: set[str] = set()


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


def test_a_public_class_name_has_one_meaning() -> None:
    trees = (ast.parse("\n".join(lines)) for _, lines in modules())
    names = Counter(node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    assert [name for name, uses in names.items() if uses > 1 and not name.startswith("_")] == []


@pytest.mark.integration
def test_processes_without_a_model_import_no_torch():
    """Tasks of Ray import the module of their function, and torch takes seconds."""
    rooms = ("analysis.analyze", "retrieval.distributed", "serving.distributed", "synthesis.distributed")
    code = (
        "import sys; " + "; ".join(f"import infembed_ray.{room}" for room in rooms) + "; print('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
