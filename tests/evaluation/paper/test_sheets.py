import re
from dataclasses import replace

import pytest

from infembed_ray.errors import InputError
from infembed_ray.evaluation.paper.collection import collect
from infembed_ray.evaluation.paper.results_report import of_evaluation
from infembed_ray.evaluation.paper.sheets import TABLES, as_markdown, obedience, ours, papers
from tests.evaluation.paper import made

ROWS = {"uni{P}": (0.1, {"epochs": 2}), "multi{P,I}": (0.4, {"epochs": 2}), "multi{P,I}, temperature=0.02": (0.4, {})}


@pytest.fixture(scope="module")
def collection():
    followir = made.benchmarks("followir")
    models = {"e5-base-v2": ("intfloat/e5-base-v2", 0), "trained": ("runs/x", 0.3)}
    return collect(
        {
            "models": made.evaluation(followir | made.benchmarks("mair", "bright"), models),
            "sweep": made.sweep(followir, ["qwen2.5-1.5b", "MiniLM"], ROWS, [1, 2]),
        }
    )


@pytest.fixture(scope="module")
def sheets(collection):
    return {sheet.name: sheet for sheet in papers(collection, {"trained": "InF-Embed (e5-base-v2)"})}


def line(sheet, label, own=True):
    return next(line for line in sheet.lines if (line.label, line.ours) == (label, own))


def test_our_results_are_below_their_rows_of_the_paper(sheets):
    for name in ("Table 2", "Table 5"):
        labels = [(line.label, line.ours) for line in sheets[name].lines]
        at = labels.index(("InF-Embed (e5-base-v2)", False))
        assert labels[at + 1] == ("trained", True)
        assert labels[labels.index(("e5-base-v2", False)) + 1] == ("e5-base-v2", True)
        assert [label for label, own in labels if own and "base" not in label] == ["trained"]


def test_every_number_of_the_paper_is_in_its_table(sheets):
    for number, table in TABLES.items():
        of_table = [sheet for sheet in sheets.values() if re.fullmatch(rf"Table {number}(, .*)?", sheet.name)]
        shown = [
            n for sheet in of_table for line in sheet.lines if not line.ours for n in line.numbers if n is not None
        ]
        expected = [n for row in table.rows for n in row.numbers if n is not None]
        decimals = 1 if number in "25" else 2
        assert sorted(n.value for n in shown) == sorted(f"{n:.{decimals}f}" for n in expected)


def test_our_numbers_are_the_means_of_the_figures_of_a_column(collection, sheets):
    means = collection.results.figures["trained"]
    columns = [" ".join(filter(None, column)) for column in sheets["Table 2"].columns]
    numbers = dict(zip(columns, line(sheets["Table 2"], "trained").numbers, strict=True))
    followir = [100 * means[f"followir/{task}"]["p-MRR"] for task in ("robust04", "news21", "core17")]
    assert numbers["FollowIR p-MRR"].value == f"{sum(followir) / 3:.1f}"
    bright = [100 * of_task["nDCG@10"] for task, of_task in means.items() if task.startswith("bright/")]
    assert len(bright) == 12
    assert numbers["BRIGHT nDCG@10"].value == f"{sum(bright) / 12:.1f}"
    base = dict(zip(columns, line(sheets["Table 2"], "e5-base-v2").numbers, strict=True))
    apart = float(numbers["Robust04 MAP"].value) - float(base["Robust04 MAP"].value)
    assert float(numbers["Robust04 MAP"].difference.rstrip("*")) == pytest.approx(apart, abs=0.11)


def test_rows_of_a_sweep_stand_at_their_objective_and_backbone(sheets):
    table_3 = sheets["Table 3"]
    own = line(table_3, "multi{P,I}")
    backbones = [above for above, _ in table_3.columns]
    assert backbones[-2:] == ["MiniLM", "MiniLM"]  # not the paper's: beside them
    assert {b for b, n in zip(backbones, own.numbers, strict=True) if n is not None} == {"Qwen2.5-1.5B", "MiniLM"}
    assert own.seeds == 2
    assert own.numbers[-1].spread is not None
    own_table = sheets["Table 6, MiniLM"]
    assert [line.label for line in own_table.lines] == ["MiniLM, base", "MiniLM, uni{P}", "MiniLM, multi{P,I}"]
    assert own_table.ours
    assert not own_table.mixed
    assert not sheets["Table 6, Average"].ours
    assert not sheets["Table 4"].ours


def test_every_model_has_a_row_in_our_table_of_each_of_its_benchmarks(collection):
    own = {sheet.name: sheet for sheet in ours(collection)}
    assert list(own) == ["FollowIR", "MAIR", "BRIGHT"]
    assert [line.label for line in own["MAIR"].lines] == ["e5-base-v2", "trained"]
    sections = dict.fromkeys(line.section for line in own["FollowIR"].lines)
    assert list(sections) == ["", "qwen2.5-1.5b", "MiniLM"]


def test_unknown_names_are_rejected(collection):
    with pytest.raises(InputError, match=r"rows\.traned: no model has this name; did you mean trained\?"):
        papers(collection, {"traned": "e5-base-v2"})
    with pytest.raises(InputError, match=r"rows\.trained=InF-Embed \(e5-base\): no row .*did you mean"):
        papers(collection, {"trained": "InF-Embed (e5-base)"})


def test_obedience_tables_have_a_row_per_model_and_condition_with_references_last():
    def values(*numbers):
        return {"p-MRR": {f"x{n}": number for n, number in enumerate(numbers)}}

    tasks, models = made.records(), {"base": ("a", 0.0), "trained": ("b", 0.3)}
    of_models = {
        "base": {"records": {"as given": values(0.1, 0.3), "query only": values(0.0, 0.0)}},
        "trained": {"records": {"as given": values(0.4, 0.6), "query only": values(0.0, 0.0)}},
        "BM25": {"records": {"as given": values(0.0, 0.0)}},
    }
    one = replace(made.evaluation(tasks, models), obedience=of_models)
    (sheet,) = obedience(collect({"one": one}))
    assert sheet.name == "Obedience, records"
    assert "- shuffled: both instructions of another query" in of_evaluation("x", one).as_markdown()
    number_of = {(line.section, line.label): line.numbers[0] for line in sheet.lines}
    both = [(label, condition) for label in ("base", "trained") for condition in ("as given", "query only")]
    assert list(number_of) == [*both, ("BM25", "as given")]
    given, plain = number_of["trained", "as given"], number_of["base", "query only"]
    assert (given.value, given.interval) == ("50.0", "[40.0, 60.0]")
    assert (plain.value, plain.interval) == ("0.0", "[0.0, 0.0]")
    assert [name for _, name in sheet.columns] == ["p-MRR"]
    page = of_evaluation("x", one).as_html()
    assert page.count("Means x100 and 95% intervals over queries, under control instructions") == 1
    assert page.count("difference to &#39;base&#39;; *: significant at 5%.") == 1  # of the table with differences alone
    assert obedience(collect({"one": made.evaluation(tasks, models)})) == []


# ---------------------------------------------------------------------------------------------------- formats


def test_markdown_rows_have_the_same_number_of_cells():
    models = {"e5-base-v2": ("intfloat/e5-base-v2", 0), "a|b_c": ("runs/x", 0.5)}
    combined = collect(
        {
            "a": made.evaluation(made.benchmarks("followir"), models),
            "b": made.sweep(made.records(), ["MiniLM"], {"multi{P,I}": (0.3, {"epochs": 2})}, [1, 2]),
        }
    )
    followir, records = map(as_markdown, ours(combined))
    for markdown in (followir, records):
        assert len({line.replace("\\|", "").count("|") for line in markdown.splitlines()}) == 1
    assert "| a\\|b_c |" in followir
    assert "| *MiniLM* |" in records
    assert "multi{P,I} (2 seeds)" in records
