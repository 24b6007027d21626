"""Benchmarks, which no test runs at full size, import only what the package still has."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "benchmarks").rglob("*.py"))


def has(module: str, name: str) -> bool:
    """Whether a module of this checkout has a name, or a package has a module of this name."""
    path = ROOT / module.replace(".", "/")
    if path.is_dir():
        if (path / name).is_dir() or (path / f"{name}.py").is_file():
            return True
        path /= "__init__"
    file = path.with_suffix(".py")
    return file.is_file() and name in names(ast.parse(file.read_text(encoding="utf-8")))


def names(tree: ast.AST) -> set[str]:
    """Return all names that a module's code defines or mentions."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.alias):
            found.add(node.asname or node.name)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):  # `_EXPORTS` of lazy packages
            found.add(node.value)
    return found


@pytest.mark.parametrize("script", SCRIPTS, ids=[str(script.relative_to(ROOT)) for script in SCRIPTS])
def test_a_benchmark_imports_what_exists(script: Path) -> None:
    imported = [
        (node.module, alias.name)
        for node in ast.walk(ast.parse(script.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in ("infembed_ray", "tests")
        for alias in node.names
    ]

    assert [f"{module}.{name}" for module, name in imported if not has(str(module), name)] == []


def test_a_name_that_is_gone_is_found() -> None:
    assert has("infembed_ray.evaluation.tasks", "layouts")
    assert has("infembed_ray.evaluation.tasks.repository", "Repository")
    assert not has("infembed_ray.evaluation.tasks", "beir")
