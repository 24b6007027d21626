import csv
import io
import re

import pytest

from infembed_ray.evaluation.paper.collection import collect
from infembed_ray.evaluation.paper.formats import as_csv, as_latex, as_markdown
from infembed_ray.evaluation.paper.sheets import ours, papers
from tests.evaluation.paper import made


@pytest.fixture(scope="module")
def sheets():
    models = {"e5-base-v2": ("intfloat/e5-base-v2", 0), "a|b_c": ("runs/x", 0.5)}
    rows = {"multi{P,I}": (0.3, {"epochs": 2})}
    found = collect(
        {
            "a": made.evaluation(made.benchmarks("followir"), models),
            "b": made.sweep(made.records(), ["MiniLM"], rows, [1, 2]),
        }
    )
    return [*ours(found), *papers(found, {"a|b_c": "InF-Embed (e5-base-v2)"})]


def named(sheets, name):
    return next(sheet for sheet in sheets if sheet.name == name)


def test_markdown_rows_have_the_same_number_of_cells_and_ours_are_bold(sheets):
    for sheet in sheets:
        table = [line.replace("\\|", "") for line in as_markdown(sheet).splitlines() if line.startswith("|")]
        assert {line.count("|") for line in table} == {len(sheet.columns) + 2}
    markdown = as_markdown(named(sheets, "Table 2"))
    assert "| **a\\|b_c** |" in markdown
    assert "| e5-base-v2 | 13.4 | -6.7 |" in markdown
    assert "- † ModernBERT-base, News21 p-MRR: printed -1., read as -1.4: cut off; Table 6 has -1.44" in markdown
    assert "**" not in as_markdown(named(sheets, "FollowIR"))
    assert "multi{P,I} (2 seeds)" in as_markdown(named(sheets, "records"))


def test_csv_has_every_number_of_every_table_once(sheets):
    rows = list(csv.DictReader(io.StringIO(as_csv(sheets))))
    assert len(rows) == sum(n is not None for sheet in sheets for line in sheet.lines for n in line.numbers)
    places = {(r["table"], r["section"], r["row"], r["source"], r["column"]) for r in rows}
    assert len(places) == len(rows)
    (own,) = [r for r in rows if (r["table"], r["row"], r["column"]) == ("Table 2", "a|b_c", "FollowIR p-MRR")]
    assert float(own["low"]) <= float(own["value"]) <= float(own["high"])
    assert float(own["difference_low"]) <= float(own["difference"]) <= float(own["difference_high"])
    assert own["significant"] == str(float(own["p_holm"]) < 0.05).lower() == "true"
    (wrong,) = [r for r in rows if (r["table"], r["row"], r["column"]) == ("Table 3", "Base", "ModernBERT p-MRR")]
    assert (wrong["value"], wrong["printed"], wrong["source"], wrong["low"]) == ("-2.57", "-0.27", "paper", "")
    (seeded,) = [r for r in rows if (r["row"], r["column"]) == ("multi{P,I}", "MAP@1000") and r["table"] == "records"]
    assert seeded["seeds"] == "2"
    assert float(seeded["stdev_over_seeds"]) >= 0


def test_latex_is_balanced_and_all_rows_have_the_same_number_of_cells(sheets):
    latex = as_latex(sheets, "how it was made")
    assert latex.startswith("% how it was made")
    for name in ("table", "tabular"):
        assert latex.count(f"\\begin{{{name}}}") == latex.count(f"\\end{{{name}}}") == len(sheets)
    for sheet, part in zip(sheets, latex.split("\\begin{tabular}")[1:], strict=True):
        body = part.split("\\end{tabular}")[0]
        for row in re.findall(r"^(.*) \\\\$", body, re.MULTILINE):
            spans = sum(int(n) - 1 for n in re.findall(r"\\multicolumn\{(\d+)\}", row))
            assert len(re.findall(r"(?<!\\)&", row)) + spans == len(sheet.columns)
    assert not re.findall(r"(?<!\\)[_%#]", latex.split("\n", 1)[1])
    unescaped = re.sub(r"\\[{}]", "", latex)
    assert unescaped.count("{") == unescaped.count("}")
    assert "\\textbf{a|b\\_c}" in latex
    assert "multi\\{P,I\\}" in latex
