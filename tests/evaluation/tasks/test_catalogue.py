"""Tasks load by name, your own by path, and published protocols change them."""

import re
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from zlib import crc32

import pytest
import pytrec_eval

from infembed_ray.errors import InputError
from infembed_ray.evaluation.metrics import Run
from infembed_ray.evaluation.tasks import catalogue
from infembed_ray.evaluation.tasks.task import Query, Task, means, score
from tests.evaluation import published

# ---------- Tasks load by name, your own by path.


@pytest.fixture(scope="module")
def mirror(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("mirror")
    for write in (published.followir_like, published.mair_like, published.instructir_like, published.mfollowir_like):
        write(root)
    for write in (published.ifir_like, published.bright_pro_like, published.nevir_like, published.excluir_like):
        write(root)
    return str(published.bright_like(root, [entry.options["subset"] for entry in catalogue.BENCHMARKS["bright"].tasks]))


def test_every_default_task_loads_with_the_figures_that_tables_average(mirror: str) -> None:
    for benchmark in catalogue.BENCHMARKS.values():
        loaded = {entry.name: catalogue.load(entry.name, mirror) for entry in benchmark.tasks}
        for figures in benchmark.averages.values():
            for task, figure in ((task, figure) for task, figure in figures.items() if task in loaded):
                assert figure in {shown.name for shown in loaded[task].figures}
        assert [task.name for task in loaded.values()] == list(loaded)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("folowir", "did you mean followir"),
        ("NevIR", "did you mean nevir"),
        ("mfollowir/fa", r"did you mean mfollowir/fas\?"),
        ("nevir@paper", "no such task"),
        ("bright/leetcod", r"did you mean bright/leetcode\?.; for a directory of that name write ./bright/leetcod$"),
        (
            "acme",
            "no such task, and no such directory; valid: bright, bright-pro, excluir, followir, ifir, instructir, mair, "
            "mfollowir, mfollowir-cross, nevir, or OWNER/NAME of the hub",
        ),
        ("./corpora/acme", "no such task, and no such directory"),
    ],
)
def test_an_unknown_name_is_rejected_with_the_nearest(name: str, message: str) -> None:
    for use in (
        lambda: catalogue.expand([name]),
        lambda: catalogue.load(name, "mirror"),
    ):
        with pytest.raises(InputError, match=f"tasks={name}: .*{message}"):
            use()


def test_a_task_whose_data_are_missing_says_which_command_fetches_them(tmp_path: Path) -> None:
    revision = catalogue.TASKS["bright/pony"].revision
    command = f"hf download mteb/BRIGHT --repo-type dataset --revision {revision} --include README.md --include '*pony*' --local-dir "
    with pytest.raises(InputError, match=re.escape(f"{command}DIR/mteb/BRIGHT`, copy DIR, and set data=DIR")):
        catalogue.load("bright/pony")
    with pytest.raises(InputError, match=re.escape(f"{command}{tmp_path}/mteb/BRIGHT`")):
        catalogue.load("bright/pony", str(tmp_path))


def test_excluir_says_where_its_authors_publish_it(tmp_path: Path) -> None:
    page = re.escape("https://github.com/zwh-sdu/ExcluIR#dataset-download")
    with pytest.raises(InputError, match=f"the hub does not have its files; download them from {page} to DIR/zwh-sdu"):
        catalogue.load("excluir")
    published.excluir_like(tmp_path)
    (tmp_path / published.EXCLUIR / "corpus.json").unlink()
    with pytest.raises(InputError, match=f"no file of corpus/ in .*; download it from {page}"):
        catalogue.load("excluir", str(tmp_path))


# ---------- Published tasks by name.


@pytest.mark.parametrize(
    ("names", "expanded"),
    [
        (["followir"], ["followir/robust04", "followir/news21", "followir/core17"]),
        (["mair"], [f"mair/{task}" for task in published.MAIR]),
        (["mair@paper"], [f"mair/{task}@paper" for task in published.MAIR]),
        (
            ["instructir", "followir/core17", "followir"],
            ["instructir", "followir/core17", "followir/robust04", "followir/news21"],
        ),
    ],
)
def test_names_are_expanded_without_repetition(names: list[str], expanded: list[str]) -> None:
    assert catalogue.expand(names) == expanded


# ---------- Published protocols change exactly what their table says.


PAGE = Path(__file__).parents[3] / "docs" / "reproduction.md"


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
    evaluated = pytrec_eval.RelevanceEvaluator(qrels, {measure}).evaluate({q: dict(run[q]) for q in qrels})
    return fmean(values[measure.replace(".", "_")] for values in evaluated.values())


def test_followir_as_the_paper_judges_the_original_queries_by_the_changed_judgements(mirror: str) -> None:
    ours, other = catalogue.load("followir/core17", mirror), catalogue.load("followir/core17@paper", mirror)
    run = ranked(ours)
    # mteb 1 fills og_qrels from the changed judgements, then judges the original rankings by og_qrels.
    of_changed = {q.replace("-changed", "-og"): dict(j) for q, j in ours.qrels.items() if q.endswith("-changed")}

    as_paper, as_ours = means(score(other, run)), means(score(ours, run))

    assert as_paper["MAP@1000"] == pytest.approx(trec(of_changed, run, "map_cut.1000"), abs=1e-9)
    assert abs((as_paper["MAP@1000"] or 0) - (as_ours["MAP@1000"] or 0)) > 1e-3
    assert as_paper["p-MRR"] == as_ours["p-MRR"]
    assert replace(other, name=ours.name, qrels=ours.qrels, about={}) == replace(ours, about={})
    assert other.about["protocol"] == catalogue.DIFFERENCES["followir"][0]


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


def test_instructir_as_its_authors_groups_queries_of_equal_text(mirror: str) -> None:
    ours, other = catalogue.load("instructir", mirror), catalogue.load("instructir@paper", mirror)
    of_text: dict[str, list[Query]] = {}
    for query in ours.queries:
        of_text.setdefault(query.query, []).append(query)

    assert len({query.group for query in other.queries}) == len(of_text)
    for queries in of_text.values():
        assert len({query.group for query in other.queries if query.id in {q.id for q in queries}}) == 1


def test_a_protocol_without_differences_changes_only_the_name(mirror: str) -> None:
    ours, other = catalogue.load("mair/dd-15", mirror), catalogue.load("mair/dd-15@paper", mirror)

    assert other.name == "mair/dd-15@paper"
    assert replace(other, name=ours.name) == ours


def test_the_documentation_lists_every_mode() -> None:
    protocols, tasks = (page.read_text(encoding="utf-8") for page in (PAGE, PAGE.parent / "guides" / "evaluate.md"))
    for name in catalogue.BENCHMARKS:
        assert f"`{name}`" in (protocols if name.endswith("@paper") else tasks)
