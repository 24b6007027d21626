from dataclasses import replace

import numpy as np
import pytest

from infembed_ray.evaluation import tables
from infembed_ray.evaluation.paper.results_report import of_evaluation
from infembed_ray.evaluation.results import Results, TaskSummary
from infembed_ray.evaluation.significance import Stratum, compare
from infembed_ray.evaluation.tables import cells, columns
from infembed_ray.evaluation.tasks.catalogue import BENCHMARKS
from infembed_ray.evaluation.tasks.task import Figure

FIGURES = (Figure("p-MRR", "p-MRR"), Figure("nDCG@10 (I-,Q+)", "nDCG@10"))
QUERIES = [f"q{n}" for n in range(12)]


def results(tasks, models, empty=()):
    """Make results of random values; later models have larger ones."""
    random = np.random.default_rng(0)
    scores = {
        model: {
            task: {
                figure.name: {}
                if figure.name in empty
                else {query: float(0.12 * rank + random.random()) / 2 for query in QUERIES}
                for figure in figures
            }
            for task, figures in tasks.items()
        }
        for rank, model in enumerate(models)
    }
    asked = {task: TaskSummary(tuple(figures), {}, {"queries": len(QUERIES)}) for task, figures in tasks.items()}
    return Results(asked, {model: {} for model in models}, scores, 1000)


def followir(models):
    mean = {"robust04": "MAP@1000", "news21": "nDCG@5", "core17": "MAP@1000"}
    tasks = {f"followir/{task}": (Figure("p-MRR", "p-MRR"), Figure(name, name)) for task, name in mean.items()}
    return results(tasks, models)


def as_text(evaluated):
    return of_evaluation("runs/x", evaluated).as_text()


def test_the_first_model_is_the_baseline_and_the_others_show_their_differences():
    evaluated = results({"records": FIGURES}, ["base", "better", "best"])
    title, header, rule, base, *others = as_text(evaluated).split("\n\n")[0].splitlines()
    assert title == "records"
    assert header.split("  ")[0] == "model"
    assert set(rule) == {"-", " "}
    means = evaluated.figures
    assert base.split()[:2] == ["base", f"{100 * means['base']['records']['p-MRR']:.1f}"]
    for line, model in zip(others, ["better", "best"], strict=True):
        mean, apart, ndcg, *_ = line.split()[1:]
        assert mean == f"{100 * means[model]['records']['p-MRR']:.1f}"
        difference = 100 * (means[model]["records"]["p-MRR"] - means["base"]["records"]["p-MRR"])
        assert apart.rstrip(tables.MARK) == f"{difference:+.1f}"
        assert ndcg == f"{means[model]['records']['nDCG@10 (I-,Q+)']:.3f}"


def test_differences_with_a_small_corrected_p_value_are_marked():
    evaluated = results({"records": FIGURES}, ["a", "b", "c", "d"])
    (of_records,) = columns(evaluated).values()
    p_mrr = cells(evaluated, of_records[0])
    table = np.array([[evaluated.scores[m]["records"]["p-MRR"][q] for m in "abcd"] for q in QUERIES])
    expected = [c.p for c in compare([Stratum.from_values(table, QUERIES)])[1:]]
    assert [p_mrr[m].p for m in "bcd"] == pytest.approx(expected)
    marked = [m for m in "bcd" if tables.Number.from_cell(of_records[0], p_mrr[m]).text.endswith(tables.MARK)]
    assert marked == [m for m, p in zip("bcd", expected, strict=True) if p < 0.05]
    assert 0 < len(marked) < 3


def test_averages_of_a_benchmark_are_unweighted_means_of_its_tasks():
    evaluated = followir(["base", "other"])
    score, p_mrr = columns(evaluated)["FollowIR"][:2]
    assert (score.title, p_mrr.title) == ("average score", "average p-MRR x100")
    means = evaluated.figures["other"]
    expected = np.mean([means[f"followir/{task}"]["p-MRR"] for task in ("robust04", "news21", "core17")])
    assert cells(evaluated, p_mrr)["other"].mean.value == pytest.approx(expected)
    assert dict(score.parts) == BENCHMARKS["followir"].averages["score"]


def test_a_report_warns_of_intervals_over_few_queries_or_groups():
    made = results({"a": FIGURES, "b": FIGURES}, ["base"])
    assert (
        tables.few(made)
        == "Fewer than 20 queries, or groups of queries, give intervals that are too narrow: a (12), b (12)."
    )
    assert tables.few(made) in of_evaluation("o", made).as_markdown()
    grouped = replace(made.tasks["a"], groups={query: query[-1:] for query in QUERIES})
    assert "a (10), b (12)" in tables.few(replace(made, tasks={**made.tasks, "a": grouped}))
    apart = replace(made, scores={"x": {"a": made.scores["base"]["a"]}, "y": {"b": made.scores["base"]["b"]}})
    assert tables.few(apart) == tables.few(made)  # outputs of several evaluations
    many = {"base": {"a": {"x": {str(n): 0.5 for n in range(20)}}}}
    assert tables.few(replace(made, tasks={"a": made.tasks["a"]}, scores=many)) == ""


def test_a_figure_has_one_interval_in_a_report():
    """The table of the task and that of its controls resample the same queries in the same order."""
    made = results({"a": FIGURES}, ["base", "tuned"])
    shuffled = {label: dict(reversed(scores["a"]["p-MRR"].items())) for label, scores in made.scores.items()}
    obeyed = {label: {"a": {"as given": {"p-MRR": values}}} for label, values in shuffled.items()}
    report = of_evaluation("o", replace(made, obedience=obeyed))
    main, controls = (next(s for s in report.ours if ("Obedience" in s.name) == named) for named in (False, True))
    for row, other in zip(main.lines, controls.lines, strict=True):
        assert row.numbers[0].interval == other.numbers[0].interval


def test_a_figure_without_values_is_not_available():
    evaluated = results({"records": FIGURES}, ["base", "other"], empty=["p-MRR"])
    assert as_text(evaluated).splitlines()[4].split()[:2] == ["other", "n/a"]


def test_a_value_that_rounds_to_zero_has_no_minus_sign():
    column = tables.Column("p-MRR x100", (), 100, 1)
    assert [column.number(value) for value in (-0.0004, 0.0004, -0.0006)] == ["0.0", "0.0", "-0.1"]
    assert column.number(-0.0004, sign=True) == "+0.0"
