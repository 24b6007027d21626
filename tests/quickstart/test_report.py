import re

from infembed_ray.evaluation.results import Results, TaskSummary
from infembed_ray.evaluation.tasks.infir import FIGURES, TASK
from infembed_ray.quickstart.rankings import Ranking, write_report
from tests.quickstart.test_rankings import ranking
from tests.support.pages import Page

MEANS = {"before": (0.2, 0.5, 0.6, 0.7, 0.5), "after": (0.45, 0.8, 0.6, 0.65, 0.6)}
FUNNEL = {"seeds": 9, "kept": 7, "rejected": 2, "dead_letter": 0, "calls": 0, "replayed": 60}


def results(**more):
    """Of two models; two requests of each kind, whose values lie around the means."""
    scores = {
        model: {TASK: {f.name: {"q1": mean - 0.1, "q2": mean + 0.1} for f, mean in zip(FIGURES, means, strict=True)}}
        for model, means in MEANS.items()
    }
    for figure, values in more.items():
        scores["after"][TASK][figure] = values
    return Results({TASK: TaskSummary(FIGURES, {})}, {model: {} for model in MEANS}, scores, 1000)


def rankings():
    def of_model(*orders):
        asked = (None, "c"), ("eat", "c"), ("trials", "<b>")
        return [
            Ranking("q", instruction, wanted, ranking(*order).hits)
            for (instruction, wanted), order in zip(asked, orders, strict=True)
        ]

    return {
        "before": of_model(["<b>", "c"], ["<b>", "c"], ["<b>", "c"]),
        "after": of_model(["<b>", "c"], ["c", "<b>"], ["<b>", "c"]),
    }


def written(tmp_path, found=None, details=None):
    details = details or {"evaluation": tmp_path / "results" / "1f" / "report.html"}
    return write_report(tmp_path / "r.html", FUNNEL, found or results(), rankings(), details).read_text()


def test_the_report_is_one_file_without_resources_that_links_the_stages_reports(tmp_path):
    text = written(tmp_path)
    links = [attributes["href"] for attributes in Page(text).attributes("a")]
    assert links == ["results/1f/report.html"]
    assert "&lt;b&gt;" in text  # passages are text, not markup
    assert "<b>" not in text


def test_it_begins_with_the_example_before_and_after_training_without_and_with_the_instruction(tmp_path):
    first = written(tmp_path).split("<h2>")[1]
    cards = re.findall(r"<h3>(.*?)</h3>.*?<ol>(.*?)</ol>", first, re.DOTALL)
    assert [title for title, _ in cards] == [
        "Before training, without the instruction",
        "Before training, with the instruction",
        "After training, without the instruction",
        "After training, with the instruction",
    ]
    marked = [[item.startswith(' class="wanted"') for item in cells.split("<li")[1:]] for _, cells in cards]
    assert marked == [[False, True], [False, True], [False, True], [True, False]]


def test_each_card_tells_how_the_instruction_moves_the_passage_it_asks_for(tmp_path):
    text = Page(written(tmp_path)).text
    assert "before: the passage asked for has rank 2" in text
    assert "before: the passage asked for stays at rank 2" in text
    assert "after: the passage asked for moves from rank 2 to rank 1" in text


def test_it_counts_the_requests_whose_right_passage_is_first(tmp_path):
    text = written(tmp_path, results(**{FIGURES[1].name: {"q1": 1.0, "q2": 0.63}}))
    assert "Over all 6 held-out requests" in text
    assert re.search(r"0 with before and for\s+1 with after", text)


def test_each_measure_has_its_interval_and_its_difference_to_the_baseline(tmp_path):
    text = written(tmp_path)
    assert "20.0 <small>10.0 to 30.0</small>" in text
    assert "45.0 +25.0 <small>35.0 to 55.0</small>" in text
    assert "0.650 -0.050 <small>0.550 to 0.750</small>" in text
    assert "bootstrap" in text


def test_a_measure_over_no_requests_has_no_bar(tmp_path):
    found = results()
    for model in MEANS:
        found.scores[model][TASK]["p-MRR"] = {}
    assert written(tmp_path, found).count("n/a") == 2
