"""Published protocols change exactly what their table says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import fmean
from zlib import crc32

import pytest
import pytrec_eval

from infembed_ray.evaluation.metrics import Run
from infembed_ray.evaluation.obedience import constant
from infembed_ray.evaluation.scoring import means, score
from infembed_ray.evaluation.tasks import catalogue
from infembed_ray.evaluation.tasks.task import Query, Task
from tests.evaluation import published
from tests.evaluation.published import DOCUMENTS

PAGE = Path(__file__).parents[3] / "docs" / "reproduction.md"


@pytest.fixture(scope="module")
def mirror(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("mirror")
    for write in (published.followir_like, published.mair_like, published.instructir_like):
        write(root)
    return str(published.bright_like(root, [entry.options["subset"] for entry in catalogue.BENCHMARKS["bright"].tasks]))


def ranked(task: Task) -> Run:
    """Rank by a hash of the document's id, so that both versions of a query have one ranking."""
    candidates = task.candidates or dict.fromkeys((q.id for q in task.queries), task.corpus["id"].to_pylist())
    return {
        query.id: {
            d: float(crc32(d.encode())) for d in candidates[query.id] if d not in task.excluded.get(query.id, ())
        }
        for query in task.queries
    }


def trec(qrels: dict[str, dict[str, int]], run: Run, measure: str) -> float:
    found = pytrec_eval.RelevanceEvaluator(qrels, {measure}).evaluate({q: dict(run[q]) for q in qrels})
    return fmean(values[measure.replace(".", "_")] for values in found.values())


@pytest.mark.parametrize("mode", ["mteb1", "paper"])
def test_followir_in_mteb_1_judges_the_original_queries_by_the_changed_judgements(mirror: str, mode: str) -> None:
    ours, other = catalogue.load("followir/core17", mirror), catalogue.load(f"followir/core17@{mode}", mirror)
    run = ranked(ours)
    # mteb 1 fills og_qrels from the changed judgements, then judges the original rankings by og_qrels.
    of_changed = {q.replace("-changed", "-og"): dict(j) for q, j in ours.qrels.items() if q.endswith("-changed")}

    found, known = means(score(other, run)), means(score(ours, run))

    assert found["MAP@1000"] == pytest.approx(trec(of_changed, run, "map_cut.1000"), abs=1e-9)
    assert abs((found["MAP@1000"] or 0) - (known["MAP@1000"] or 0)) > 1e-3
    assert found["p-MRR"] == known["p-MRR"]
    assert replace(other, name=ours.name, qrels=ours.qrels, about={}) == replace(ours, about={})
    assert other.about["protocol"] == catalogue.DIFFERENCES["swapped_judgements"][0]


def test_followir_in_mteb_2_counts_both_versions_of_a_query(mirror: str) -> None:
    ours, other = catalogue.load("followir/news21", mirror), catalogue.load("followir/news21@mteb2", mirror)
    run = ranked(ours)

    found = means(score(other, run))

    assert found["nDCG@5"] == pytest.approx(
        trec({q: dict(j) for q, j in ours.qrels.items()}, run, "ndcg_cut.5"), abs=1e-9
    )
    assert found["p-MRR"] == means(score(ours, run))["p-MRR"]


def test_followir_over_the_whole_corpus_ranks_documents_beyond_the_candidates(mirror: str) -> None:
    ours, other = catalogue.load("followir/core17", mirror), catalogue.load("followir/core17@corpus", mirror)

    assert {len(ranking) for ranking in constant(ours, 1000).values()} == {48}
    assert {len(ranking) for ranking in constant(other, 1000).values()} == {len(DOCUMENTS)}
    assert (other.figures, other.changes, other.qrels) == (ours.figures, ours.changes, ours.qrels)


def test_bright_in_mteb_1_ranks_excluded_documents(mirror: str) -> None:
    ours, other = catalogue.load("bright/leetcode", mirror), catalogue.load("bright/leetcode@mteb1", mirror)

    assert all(ours.excluded[query.id] for query in ours.queries)
    assert other.excluded == {}
    assert other.queries == ours.queries


PAPER = {
    "biology": "Given a biology post, retrieve relevant passages that help answer the post",
    "earth_science": "Given a earth_science post, retrieve relevant passages that help answer the post",
    "pony": "Given a pony question, retrieve relevant passages that help answer the question",
    "leetcode": "Given a coding problem, retrieve relevant examples that help answer the problem",
    "theoremqa_theorems": "Given a Math problem, retrieve relevant theorems that help answer the problem",
}
"""Written down from bright_configs/ of the paper's code, where {task} is the subset."""


@pytest.mark.parametrize("subset", PAPER)
def test_bright_as_the_paper_has_an_instruction_per_subset_and_records_it(mirror: str, subset: str) -> None:
    ours, other = catalogue.load(f"bright/{subset}", mirror), catalogue.load(f"bright/{subset}@paper", mirror)

    assert {query.instruction for query in ours.queries} == {None}
    assert {query.instruction for query in other.queries} == {PAPER[subset]}
    assert [query.query for query in other.queries] == [query.query for query in ours.queries]
    assert other.excluded == ours.excluded
    assert other.about["instruction"] == PAPER[subset]


@pytest.mark.integration
def test_bright_as_mteb_2_has_the_prompts_of_its_tasks(mirror: str) -> None:
    mteb = pytest.importorskip("mteb")
    for entry in catalogue.BENCHMARKS["bright@mteb2"].tasks:
        task = catalogue.load(entry.name, mirror)
        subset = entry.name.removesuffix("@mteb2").partition("/")[2]
        there = mteb.get_task(f"Bright{subset.title().replace('_', '').replace('Theoremqa', 'TheoremQA')}Retrieval")
        assert {query.instruction for query in task.queries} == {there.metadata.prompt["query"]}


def test_instructir_as_its_authors_groups_queries_of_equal_text(mirror: str) -> None:
    ours, other = catalogue.load("instructir", mirror), catalogue.load("instructir@paper", mirror)
    of_text: dict[str, list[Query]] = {}
    for query in ours.queries:
        of_text.setdefault(query.query, []).append(query)

    assert len({query.group for query in other.queries}) == len(of_text)
    for queries in of_text.values():
        assert len({query.group for query in other.queries if query.id in {q.id for q in queries}}) == 1


@pytest.mark.parametrize("name", ["mair/dd-15@paper", "instructir@mteb2"])
def test_a_mode_without_differences_changes_only_the_name(mirror: str, name: str) -> None:
    ours, other = catalogue.load(name.partition("@")[0], mirror), catalogue.load(name, mirror)

    assert other.name == name
    assert replace(other, name=ours.name) == ours


def test_the_documentation_lists_every_mode() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for name in catalogue.BENCHMARKS:
        assert f"`{name}`" in page
