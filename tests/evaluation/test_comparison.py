import random

import ir_measures
import pytest
import pytrec_eval

from infembed_ray.cli.main import main
from infembed_ray.errors import InputError
from infembed_ray.evaluation.comparison import compare

QUERIES = [str(number) for number in range(30)]
DOCUMENTS = [f"d{number}" for number in range(12)]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Judgements, a run that ranks at random, and one that ranks relevant documents higher."""
    directory, draw = tmp_path_factory.mktemp("compare"), random.Random(0)
    relevant = {query: set(draw.sample(DOCUMENTS, 3)) for query in QUERIES}
    qrels = "".join(f"{q} 0 {d} {int(d in relevant[q])}\n" for q in QUERIES for d in DOCUMENTS)
    (directory / "qrels.txt").write_text(qrels)
    for name, gain in (("random", 0.0), ("better", 0.6)):
        lines = [
            f"{q} Q0 {d} 0 {draw.random() + gain * (d in relevant[q])} {name}\n" for q in QUERIES for d in DOCUMENTS
        ]
        (directory / f"{name}.run").write_text("".join(lines))
    return directory


def rows(text):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]


def test_means_equal_trec_evals_and_a_better_run_is_significantly_better(files):
    given = [str(files / "random.run"), str(files / "better.run")]
    header, _, *found = rows(compare(given, str(files / "qrels.txt"), ["nDCG@10", "MAP@1000"]))
    assert header == ["model", "nDCG@10", "MAP@1000"]
    assert [row[0] for row in found] == given
    with open(files / "qrels.txt") as qrels:
        evaluator = pytrec_eval.RelevanceEvaluator(pytrec_eval.parse_qrel(qrels), {"ndcg_cut.10", "map_cut.1000"})
    for path, *cells in found:
        with open(path) as run:
            theirs = evaluator.evaluate(pytrec_eval.parse_run(run))
        for cell, measure in zip(cells, ("ndcg_cut_10", "map_cut_1000"), strict=True):
            expected = sum(v[measure] for v in theirs.values()) / len(theirs)
            assert float(cell.split()[0]) == pytest.approx(expected, abs=6e-4)
            assert cell.endswith("\\*") == (path == given[1])  # significantly better than the first


def test_a_run_does_not_differ_from_itself(files):
    *_, again = rows(compare([str(files / "random.run")] * 2, str(files / "qrels.txt"), ["nDCG@10"]))
    assert again[0].endswith("random.run (2)")
    assert again[1].split()[-1] == "+0.000"


def test_the_command_compares_beir_judgements_without_ray_or_a_model(files, capsys, monkeypatch):
    monkeypatch.setattr("infembed_ray.ray_cluster.connect", pytest.fail)
    beir = "query-id\tcorpus-id\tscore\n" + (files / "qrels.txt").read_text().replace(" 0 ", "\t", 1 << 20).replace(
        " ", "\t"
    )
    (files / "test.tsv").write_text(beir)
    given = [str(files / "random.run"), str(files / "better.run")]
    assert main(["compare", *given, "--qrels", str(files / "test.tsv"), "--measures", "nDCG@10"]) == 0
    assert rows(capsys.readouterr().out) == rows(compare(given, str(files / "qrels.txt"), ["nDCG@10"]))


def test_any_measures_by_ir_measures_names_can_be_compared(files, capsys):
    given = [str(files / "random.run"), str(files / "better.run")]
    measures = "P@5,bpref,SetF(beta=2.0,rel=1),Judged@10"
    assert main(["compare", *given, "--qrels", str(files / "qrels.txt"), "--measures", measures]) == 0
    header, _, *found = rows(capsys.readouterr().out)
    assert header == ["model", "P@5", "bpref", "SetF(beta=2.0,rel=1)", "Judged@10"]
    parsed = [ir_measures.parse_measure(name) for name in ("P@5", "Bpref", "SetF(beta=2.0,rel=1)", "Judged@10")]
    judged = list(ir_measures.read_trec_qrels(str(files / "qrels.txt")))
    for path, *cells in found:
        theirs = ir_measures.calc_aggregate(parsed, judged, ir_measures.read_trec_run(path))
        for cell, measure in zip(cells, parsed, strict=True):
            assert float(cell.split()[0]) == pytest.approx(theirs[measure], abs=6e-4)


def test_what_cannot_be_compared_is_refused(files, tmp_path, capsys):
    qrels, run = str(files / "qrels.txt"), str(files / "random.run")
    with pytest.raises(InputError, match="one run cannot be compared"):
        compare([run], qrels, ["nDCG@10"])
    with pytest.raises(InputError, match="measures=nDGC: no measure of ir_measures; did you mean nDCG"):
        compare([run, run], qrels, ["nDGC"])
    (tmp_path / "other.txt").write_text("x 0 d1 1\n")
    with pytest.raises(InputError, match="has none of the queries of"):
        compare([run, run], str(tmp_path / "other.txt"), ["nDCG@10"])
    assert main(["compare", run, run, "--qrels", str(files / "nowhere")]) == 2
    assert "nowhere" in capsys.readouterr().err
