"""`infembed report` as a user runs it, and its page as a browser reads it."""

import json

import pytest

from infembed_ray.cli.main import main
from infembed_ray.config.evaluation import ReportSettings
from infembed_ray.errors import InputError
from infembed_ray.evaluation import results
from infembed_ray.evaluation.metrics import CONVENTIONS
from infembed_ray.evaluation.paper.results_report import of_evaluation, run
from tests.evaluation.paper import made
from tests.support.pages import Page

ROWS = {f"uni{{P}}, epochs={n}": (0.2 * n, {"objective": "uni{P}", "epochs": n}) for n in (1, 2)}


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    root = tmp_path_factory.mktemp("report")
    models = {"e5-base-v2": ("intfloat/e5-base-v2", 0), "<b>ours</b>": ("runs/x", 0.3)}
    made_up = {
        "models": made.evaluation(made.benchmarks("followir"), models),
        "filtered": made.sweep(made.records(), ["MiniLM"], ROWS, [1, 2]),
        "raw": made.sweep(made.records(), ["MiniLM"], ROWS, [1, 2], salt="raw"),
    }
    for name, evaluated in made_up.items():
        (root / name).mkdir()
        results.write(root / name, evaluated)
    return {name: str(root / name) for name in made_up}


@pytest.fixture(scope="module")
def settings(outputs, tmp_path_factory):
    return ReportSettings(
        results=outputs,
        output=str(tmp_path_factory.mktemp("out")),
        rows={"<b>ours</b>": "InF-Embed (e5-base-v2)"},
        unfiltered=("raw",),
    )


@pytest.fixture(scope="module")
def published(settings):
    return run(settings)


@pytest.fixture(scope="module")
def page(published):
    return Page((published.path / "report.html").read_text())


def test_the_report_is_published(published, settings):
    assert {file.name for file in published.path.iterdir()} == {"report.html", "manifest.json"}
    assert published.manifest["tables_with_ours"] == ["Table 2", "Table 5"]
    assert not run(settings).fresh


def test_the_page_can_be_read_aloud_and_scrolled_by_keyboard(page):
    assert all(attrs.get("aria-label") for attrs in page.attributes("svg"))
    regions = [attrs for tag, attrs in page.tags if attrs.get("class") == "scroll"]
    assert regions
    assert all(region["tabindex"] == "0" and region["aria-label"] for region in regions)
    rows = [attrs for attrs in page.attributes("th") if "scope" in attrs]
    assert {attrs["scope"] for attrs in rows} == {"row", "col", "colgroup"}


def test_the_page_shows_ours_beside_the_paper_and_labels_as_they_are(page):
    text = page.text
    assert "<b>ours</b>" in text  # escaped
    assert "Figure 5: FollowIR" in text
    assert "Figure 6: uni{P}, epochs=1 with and without the quality filter" in text
    assert "The paper's tables without your results" in text
    assert text.index("Table 5: Baselines") < text.index("Table 3: Objectives")  # of the last section


def test_the_table_of_one_evaluation_has_its_own_numbers_facts_and_conventions():
    tasks = made.records()
    evaluated = made.evaluation(tasks, {"base": ("x", 0), "uni|multi": ("y", 0.3)})
    markdown = of_evaluation("runs/x", evaluated).as_markdown()
    rows = [line for line in markdown.splitlines() if line.startswith("| ")]
    assert rows[-1].startswith("| uni\\|multi |")
    mean = 100 * evaluated.figures["uni|multi"]["records"]["p-MRR"]
    assert rows[-1].split(" | ")[1].startswith(f"{mean:.1f} [")
    assert "- records: queries 20, passages 40" in markdown
    assert f"- p-MRR: {CONVENTIONS['p-MRR']}" in markdown
    assert "Robustness" not in markdown
    assert "Differences are to 'base'" in markdown
    alone = of_evaluation("runs/x", made.evaluation(tasks, {"base": ("x", 0)}))
    assert "Differences" not in alone.as_markdown() + alone.as_text()


def test_the_command_refuses_bad_input_in_one_line(outputs, tmp_path, capsys):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "results.json").write_text(json.dumps({"format": "infembed-results/0"}))
    given = [f"results.models={outputs['models']}", f"output={tmp_path / 'out'}"]
    cases = {
        "no such file or directory": [f"results.x={tmp_path / 'nowhere'}"],
        "format is 'infembed-results/0'": [f"results.old={tmp_path / 'old'}"],
        "rows.models: no model has this name": ["rows.models=e5-base-v2"],
        "unfiltered=mdels: no results have this label": ["unfiltered=[mdels]"],
    }
    for message, more in cases.items():
        assert main(["report", *given, *more]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    with pytest.raises(InputError, match="results is empty"):
        run(ReportSettings(results={}, output=str(tmp_path / "out")))
    assert not list((tmp_path / "out").glob("*/manifest.json"))
