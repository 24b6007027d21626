from html.parser import HTMLParser

from infembed_ray.quickstart.report import write_report
from tests.quickstart.test_rankings import ranking

NAMES = ("p-MRR", "nDCG@10 (I+,Q+)", "nDCG@10 (I-,Q+)", "nDCG@10 (I+,Q-)", "MAP@1000")
FIGURES = {
    "before": dict(zip(NAMES, (0.2, 0.5, 0.6, 0.7, 0.5), strict=True)),
    "after": dict(zip(NAMES, (0.45, 0.8, 0.6, 0.65, 0.6), strict=True)),
}


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.seen, self.attributes = [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        self.attributes += attrs


def test_the_report_is_one_file_with_table_plots_and_rankings(tmp_path):
    funnel = {"seeds": 9, "kept": 7, "rejected": 2, "dead_letter": 0, "calls": 0, "replayed": 60}
    metrics = [{"loss": 1.0}, {"loss": 0.6}, {"loss": 0.5}]
    text = write_report(
        tmp_path / "r.html", funnel, FIGURES, metrics, [ranking("<b>", "c"), ranking("c", "<b>")]
    ).read_text()
    tags = Tags()
    tags.feed(text)
    assert tags.seen.count("tr") == 3
    assert tags.seen.count("svg") == 2
    assert tags.seen.count("rect") == 10  # five measures, two models
    assert {"link", "script", "img"} & set(tags.seen) == set()
    assert not [value for name, value in tags.attributes if name in ("src", "href")]
    assert "&lt;b&gt;" in text  # what a corpus holds is text, not markup
    assert "20.0" in text
    assert "+25.0" in text
    assert "-0.050" in text


def test_a_bar_is_as_high_as_its_figure_and_a_curve_starts_at_the_first_loss(tmp_path):
    text = write_report(
        tmp_path / "r.html", dict.fromkeys(("seeds", "kept"), 1), FIGURES, [{"loss": 2.0}], [ranking("a")]
    )
    heights = [float(part.split('"')[0]) for part in text.read_text().split(' height="')[1:]]
    assert heights[0] / heights[1] == 20 / 45
