"""A collection is a task, whatever its layout, if it is consistent."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from infembed_ray.errors import InputError
from infembed_ray.evaluation.scoring import means, score
from infembed_ray.evaluation.tasks import catalogue, layouts
from tests.evaluation import published
from tests.evaluation.published import DOCUMENTS, edit, texts
from tests.support.files import write_jsonl


def test_your_own_directory_is_a_task(tmp_path: Path) -> None:
    name = str(published.beir_like(tmp_path))

    task, dev = catalogue.load(name), catalogue.load(f"{name}/qrels/dev.tsv")

    assert task.name == name
    assert [query.id for query in task.queries] == ["q0", "q1", "q2", "q3"]
    assert [query.instruction for query in task.queries[:2]] == ["Only official reports count.", None]
    assert [query.id for query in dev.queries] == ["q4", "q5"]
    assert texts(task)["0"] == f"{DOCUMENTS[0].title} {DOCUMENTS[0].text}"
    assert task.qrels["q0"]["0"] == 2
    assert task.corpus.equals(dev.corpus)


BEIR_FAULTS = {
    "a document twice": (
        "corpus.jsonl",
        lambda rows: [*rows, rows[0] | {"text": "other"}],
        "two documents have the id 0",
    ),
    "no text": (
        "corpus.jsonl",
        lambda rows: [{"_id": r["_id"], "body": "x"} for r in rows],
        "row 1: column text is missing or null .found: _id, body",
    ),
    "no documents": ("corpus.jsonl", lambda rows: [], "the corpus is empty"),
    "an empty relevant document": (
        "corpus.jsonl",
        lambda rows: [rows[0] | {"title": "", "text": " "}, *rows[1:]],
        "relevant document 0 without text",
    ),
    "a judged document is gone": (
        "corpus.jsonl",
        lambda rows: rows[2:],
        "qrels name document 0 and 1 other, not in the corpus",
    ),
    "a text that is a list": (
        "queries.jsonl",
        lambda rows: [rows[0] | {"text": ["a", "b"]}, *rows[1:]],
        r"row 1: column text holds \['a', 'b'\]; give a single value",
    ),
    "an instruction that is a list": (
        "queries.jsonl",
        lambda rows: [rows[0] | {"instruction": ["only", "reports"]}, *rows[1:]],
        r"query q0 has the instruction \['only', 'reports'\]; write it as text",
    ),
    "a query twice": ("queries.jsonl", lambda rows: [*rows, rows[0]], "two queries have the id q0"),
    "an empty query": ("queries.jsonl", lambda rows: [rows[0] | {"text": " "}, *rows[1:]], "query q0 is empty"),
    "a judged query is gone": ("queries.jsonl", lambda rows: rows[1:], "qrels name query q0, not in queries"),
}


@pytest.mark.parametrize("fault", BEIR_FAULTS)
def test_a_faulty_directory_is_rejected(tmp_path: Path, fault: str) -> None:
    file, change, message = BEIR_FAULTS[fault]
    name = str(published.beir_like(tmp_path))
    edit(tmp_path / file, change)

    with pytest.raises(InputError, match=f"tasks={name}: .*{message}") as error:
        catalogue.load(name)

    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("q0\t0\t3", "document 0 of query q0 has two scores"),
        ("q0\t5\tyes", "document 5 of query q0 has the score yes; scores are whole numbers"),
        ("q0\t5\t0.5", "has the score 0.5"),
        ("q0\t5\tnan", "has the score nan"),
        ("q0\t5\t2000000000", "has the score 2000000000; scores are whole numbers up to 1,000,000"),
        ("q0\t5", "another number of fields than the header"),
    ],
)
def test_a_faulty_judgement_is_rejected(tmp_path: Path, line: str, message: str) -> None:
    name = str(published.beir_like(tmp_path))
    with (tmp_path / "qrels" / "test.tsv").open("a", encoding="utf-8") as stream:
        stream.write(line + "\n")

    with pytest.raises(InputError, match=message):
        catalogue.load(name)


def test_judgements_without_a_header_are_rejected(tmp_path: Path) -> None:
    name = str(published.beir_like(tmp_path))
    (tmp_path / "qrels" / "test.tsv").write_text("q0\t0\t1\nq0\t1\t1\n", encoding="utf-8")

    with pytest.raises(InputError, match="column query-id is missing"):
        catalogue.load(name)


def test_a_directory_without_its_files_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"no corpus\.jsonl in .*with corpus\.jsonl, queries\.jsonl and qrels/test\.tsv"
    ):
        catalogue.load(str(tmp_path))


# ------------------------------------------------------------------------------------------------------ mteb's layout


def plain_directory(repository: Path, directory: Path) -> str:
    """Write a repository in mteb's layout as a directory without a card: one file for each configuration."""
    for config in ("corpus", "queries", "instruction", "qrel_diff", "top_ranked", "data"):
        for file in (repository / config).glob("*.parquet"):
            rows = pq.read_table(file).to_pylist()
            write_jsonl(directory / ("qrels/test.jsonl" if config == "data" else f"{config}.jsonl"), rows)
    return str(directory)


@pytest.mark.parametrize("card", [True, False])
def test_a_directory_with_qrel_diff_is_read_as_followir(tmp_path: Path, card: bool) -> None:
    expected = catalogue.load("followir/core17", str(published.followir_like(tmp_path)))
    repository = tmp_path / published.FOLLOWIR["core17"]
    name = str(repository) if card else plain_directory(repository, tmp_path / "mine")

    task = catalogue.load(name)

    assert [(figure.name, figure.kind) for figure in task.figures] == [
        ("p-MRR", None),
        *((measure, "og") for measure in layouts.MEASURES),
    ]
    assert (task.queries, task.changes, task.qrels) == (expected.queries, expected.changes, expected.qrels)
    assert task.candidates == expected.candidates
    assert task.corpus.equals(expected.corpus)
    for file in catalogue.files(name):
        assert file.is_file()
    assert {"qrel_diff", "top_ranked"} <= {file.name.split("-")[0].split(".")[0] for file in catalogue.files(name)}


@pytest.mark.parametrize("column", [True, False])
def test_queries_under_several_instructions_get_robustness(tmp_path: Path, column: bool) -> None:
    expected = catalogue.load("instructir", str(published.instructir_like(tmp_path)))
    name = plain_directory(tmp_path / published.INSTRUCTIR, tmp_path / "mine")
    edit(tmp_path / "mine" / "queries.jsonl", lambda rows: [{**row, "_id": f"x{row['_id']}"} for row in rows])
    for file in ("instruction.jsonl", "qrels/test.jsonl"):
        edit(tmp_path / "mine" / file, lambda rows: [{**r, "query-id": f"x{r['query-id']}"} for r in rows])
    if column:
        edit(tmp_path / "mine" / "queries.jsonl", lambda rows: [{**r, "group": r["_id"].split("_")[0]} for r in rows])

    task = catalogue.load(name, measures=["Robustness@5", "P@1"])

    assert [figure.name for figure in task.figures] == ["Robustness@10", "Robustness@5", "P@1"]
    run = {query.id: {"1": 1.0} for query in task.queries}
    theirs = {query: {"1": 1.0} for query in (query.id for query in expected.queries)}
    assert means(score(task, run))["Robustness@10"] == means(score(expected, theirs))["Robustness@10"]
    assert len({query.group for query in task.queries}) == 6


def test_a_query_asked_once_has_no_group(tmp_path: Path) -> None:
    task = catalogue.load(str(published.beir_like(tmp_path)))

    assert [figure.name for figure in task.figures] == list(layouts.MEASURES)
    assert {query.group for query in task.queries} == {None}


def test_measures_replace_the_figures_of_a_collection_and_add_to_those_of_a_published_task(tmp_path: Path) -> None:
    followir = catalogue.load("followir/core17", str(published.followir_like(tmp_path)), ["P@5", "bpref"])
    mine = catalogue.load(str(tmp_path / published.FOLLOWIR["core17"]), measures=["P@5", "bpref"])

    assert [(f.name, f.kind) for f in mine.figures] == [("p-MRR", None), ("P@5", "og"), ("bpref", "og")]
    assert [(f.name, f.kind) for f in followir.figures] == [
        ("p-MRR", None),
        ("MAP@1000", "og"),
        ("P@5", "og"),
        ("bpref", "og"),
    ]


# ---------------------------------------------------------------------------------------------- judgements alone


def test_judgements_without_a_corpus_are_a_task_for_runs(tmp_path: Path) -> None:
    (tmp_path / "qrels.txt").write_text("301 0 d1 2\n301 0 d3 0\n302 0 d2 1\n", encoding="utf-8")
    (tmp_path / "beir.tsv").write_text("query-id\tcorpus-id\tscore\n301\td1\t2\n", encoding="utf-8")

    task, other = catalogue.load(f"{tmp_path}/qrels.txt"), catalogue.load(f"{tmp_path}/beir.tsv", measures=["AP"])

    assert task.only_runs
    assert other.only_runs
    assert task.qrels == {"301": {"d1": 2, "d3": 0}, "302": {"d2": 1}}
    assert [figure.name for figure in task.figures] == list(layouts.MEASURES)
    assert other.qrels == {"301": {"d1": 2}}
    assert [figure.name for figure in other.figures] == ["AP"]
    assert catalogue.files(f"{tmp_path}/qrels.txt") == [tmp_path / "qrels.txt"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("301 d1\n", "line 1 is not `query 0 document grade`"),
        ("301 0 d1 good\n", "has the score good; scores are whole"),
    ],
)
def test_faulty_judgements_are_rejected(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "qrels.txt").write_text(content, encoding="utf-8")

    with pytest.raises(InputError, match=message):
        catalogue.load(f"{tmp_path}/qrels.txt")


# ------------------------------------------------------------------------------------------------------- ir_datasets


TOPICS = """<top>
<num> Number: 301
<title> International &amp; organized crime

<desc> Description:
Identify organizations.
<narr> Narrative:
A relevant document must name
the organization.
</top>
"""


@pytest.fixture
def registered(tmp_path: Path) -> str:
    """A data set of ir_datasets with local files: one of its own formats for documents, topics and judgements."""
    ir_datasets = pytest.importorskip("ir_datasets")
    (tmp_path / "docs.tsv").write_text("d1\tCartels sell arms.\nd2\tPolio is gone.\n", encoding="utf-8")
    (tmp_path / "qrels.txt").write_text("301 0 FBIS3-1 2\n301 0 FBIS3-3 0\n302 0 FBIS3-2 1\n", encoding="utf-8")
    second = "<top>\n<num> Number: 302\n<title> Poliomyelitis\n<desc> Description:\nPolio\n<narr> Narrative:\n\n</top>\n"  # their reader needs a tag a line
    (tmp_path / "topics.301-450").write_text(TOPICS + second, encoding="utf-8")
    qrels = (tmp_path / "qrels.txt").read_text().replace("FBIS3-1", "d1").replace("FBIS3-2", "d2")
    (tmp_path / "qrels.txt").write_text(qrels.replace("FBIS3-3", "d2"), encoding="utf-8")
    local = ir_datasets.util.LocalDownload
    name = f"local-{tmp_path.name}"
    ir_datasets.registry.register(
        name,
        ir_datasets.Dataset(
            ir_datasets.formats.TsvDocs(local(tmp_path / "docs.tsv")),
            ir_datasets.formats.TrecQueries(local(tmp_path / "topics.301-450")),
            ir_datasets.formats.TrecQrels(local(tmp_path / "qrels.txt"), {}),
        ),
    )
    return f"ir_datasets:{name}"


def test_a_data_set_of_ir_datasets_is_a_task(registered: str) -> None:
    task = catalogue.load(registered)

    assert catalogue.expand([registered]) == [registered]
    assert texts(task) == {"d1": "Cartels sell arms.", "d2": "Polio is gone."}
    assert [query.id for query in task.queries] == ["301", "302"]
    assert " ".join((task.queries[0].instruction or "").split()) == "A relevant document must name the organization."
    assert task.qrels == {"301": {"d1": 2, "d2": 0}, "302": {"d2": 1}}


@pytest.mark.parametrize(
    ("name", "message"),
    [("nowhere", "ir_datasets has no such data set"), ("antique", "has no queries; name one of its parts")],
)
def test_what_ir_datasets_cannot_provide_is_rejected(name: str, message: str) -> None:
    pytest.importorskip("ir_datasets")
    with pytest.raises(InputError, match=f"tasks=ir_datasets:{name}: .*{message}"):
        catalogue.load(f"ir_datasets:{name}")
