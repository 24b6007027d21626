from infembed_ray.evaluation.scoring import Figures
from infembed_ray.evaluation.tables import as_markdown, as_text


def figures(p_mrr, ndcg, mean_average_precision):
    kinds = ("positive", "negative_instruction", "negative_query")
    return Figures(p_mrr, dict(zip(kinds, ndcg, strict=True)), mean_average_precision)


MODELS = {
    "base": figures(0.32, (0.9, 0.844, 0.95), 0.8),
    "uni|multi": figures(0.4704, (0.9, 0.948, 0.94), 0.85),
}


def test_the_first_model_is_the_baseline_and_the_others_show_their_differences():
    header, rule, base, trained = as_text(MODELS).splitlines()
    assert header.split()[:3] == ["model", "p-MRR", "x100"]
    assert set(rule) == {"-", " "}
    assert base.split() == ["base", "32.0", "0.900", "0.844", "0.950", "0.800"]
    assert trained.split() == [
        *("uni|multi", "47.0", "(+15.0)", "0.900", "(+0.000)", "0.948", "(+0.104)"),
        *("0.940", "(-0.010)", "0.850", "(+0.050)"),
    ]


def test_columns_are_aligned():
    header, _, *rows = as_text(MODELS).splitlines()
    start = header.index("nDCG@10 (I-,Q+)")
    assert [row[start : start + 5] for row in rows] == ["0.844", "0.948"]


def test_markdown_has_the_same_cells_and_a_label_cannot_break_a_row():
    lines = as_markdown(MODELS).splitlines()
    assert "| 47.0 (+15.0) |" in lines[3]
    assert lines[3].startswith("| uni\\|multi |")
    assert {line.replace("\\|", "").count("|") for line in lines} == {7}


def test_a_measure_that_is_unknown_says_so():
    unknown = figures(None, (1, 1, 1), 1)
    assert as_text({"a": unknown, "b": unknown}).splitlines()[3].split()[:2] == ["b", "n/a"]
    assert as_text({"a": unknown, "b": MODELS["base"]}).splitlines()[3].split()[:2] == ["b", "32.0"]
