"""Collections are read from their layouts, if they are consistent."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from infembed_ray.errors import InputError
from infembed_ray.evaluation.tasks import catalogue, layouts
from infembed_ray.evaluation.tasks.task import judgements, means, score
from infembed_ray.records.files import BadRows
from tests.evaluation import published
from tests.evaluation.published import DOCUMENTS, edit, texts
from tests.support.files import write_jsonl

Rows = list[dict[str, Any]]
Change = Callable[[Rows], Rows]

# ---------- A collection is a task, whatever its layout, if it is consistent.


def added(**values: object) -> Change:
    """Repeat the first row with other values."""
    return lambda rows: [*rows, rows[0] | values]


def each(**values: object) -> Change:
    """Give every row these values; None takes a column away."""
    return lambda rows: [{k: v for k, v in (row | values).items() if v is not None} for row in rows]


def first(**values: object) -> Change:
    return lambda rows: [rows[0] | values, *rows[1:]]


def without_first(rows: Rows) -> Rows:
    return rows[1:]


def followir(directory: Path) -> tuple[Path, str]:
    return published.followir_like(directory) / published.FOLLOWIR["core17"], "followir/core17"


def beir(directory: Path) -> tuple[Path, str]:
    return published.beir_like(directory), str(directory)


def bright(directory: Path) -> tuple[Path, str]:
    return published.bright_like(directory) / published.BRIGHT, "bright/leetcode"


def mair(directory: Path) -> tuple[Path, str]:
    return published.mair_like(directory) / published.MAIR_QUERIES, "mair/dd-15"


@pytest.mark.parametrize(
    ("layout", "file", "change", "message"),
    [
        (beir, "corpus.jsonl", added(text="other"), "two documents have the id 0"),
        (beir, "corpus.jsonl", lambda rows: rows[2:], "qrels name document 0 and 1 other, not in the corpus"),
        (
            beir,
            "queries.jsonl",
            first(instruction=["only"]),
            "the instruction of query q0 is no text; write it as text",
        ),
        (beir, "queries.jsonl", added(), "two queries have the id q0"),
        (beir, "queries.jsonl", without_first, "qrels name query q0, not in queries"),
        (followir, "top_ranked/top_ranked", without_first, "query 312-og without candidates"),
        (followir, "top_ranked/top_ranked", added(), "query 312-og has two rows in `top_ranked`"),
        (followir, "qrel_diff/qrel_diff", first(**{"query-id": "9"}), "need query 9-og and 1 other, not in queries"),
        (followir, "instruction/instruction", without_first, "query 312-og has no row in `instruction`"),
        (followir, "data/test", each(score=None), "column score is missing"),
        (
            bright,
            "examples/leetcode",
            each(excluded_ids=["coffee_and_sleep/leetcode_0.txt"]),
            "query 0 excludes relevant",
        ),
        (
            mair,
            "DD_2015/queries.jsonl",
            first(labels=["d7"]),
            "query DD_2015-0 has the label .*; a label has an id and",
        ),
        (mair, "DD_2015/queries.jsonl", first(labels=[{"id": "d7"}]), "query DD_2015-0 has the label"),
        (mair, "DD_2015/queries.jsonl", first(labels=[{"score": 1}]), "query DD_2015-0 has the label"),
    ],
)
def test_a_faulty_collection_is_rejected_in_one_line(
    tmp_path: Path, layout: Callable[[Path], tuple[Path, str]], file: str, change: Change, message: str
) -> None:
    directory, name = layout(tmp_path)
    edit(directory / (file if file.endswith(".jsonl") else f"{file}-00000-of-00001.parquet"), change)
    with pytest.raises(InputError, match=f"tasks={name}: .*{message}") as error:
        catalogue.load(name, str(tmp_path))
    assert "\n" not in str(error.value)


def test_languages_levels_pairs_and_exclusions_are_read_as_published(tmp_path: Path) -> None:
    for write in (published.mfollowir_like, published.bright_pro_like, published.nevir_like, published.excluir_like):
        write(tmp_path)
    metadata = published.ifir_like(tmp_path, ["pm"]) / "if-ir/pm/.cache/huggingface/download/README.md.metadata"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"559fdb6{'0' * 33}\n")  # mteb names the commits of IFIR by their first digits
    names = ("mfollowir/rus", "bright-pro/economics", "nevir", "excluir", "ifir/pm")
    russian, economics, nevir, excluir, pm = (catalogue.load(name, str(tmp_path)) for name in names)

    others = {catalogue.load(f"mfollowir/{language}", str(tmp_path)).queries[0].id for language in ("fas", "zho")}
    assert russian.queries[0].id not in others
    assert {query.kind for query in russian.queries} == {"og", "changed"}
    post = "Given an Economics post, retrieve relevant passages that help answer the post"
    assert {query.instruction for query in economics.queries} == {post}
    assert nevir.qrels["1000-0_q2"] == {"1000-0_doc1": 0, "1000-0_doc2": 1}
    assert set((nevir.candidates or {})["1000-0_q2"]) == {"1000-0_doc1", "1000-0_doc2"}
    assert (len(nevir.queries), {query.group for query in nevir.queries[:2]}) == (80, {"1000-0"})
    assert excluir.qrels["q1"] == {"42": 0, "24": 1}
    assert (excluir.queries[1].query, texts(excluir)["24"]) == (
        "What is known about electric buses, other than what vendors say?",
        DOCUMENTS[24].text,
    )
    assert [(query.id, query.kind) for query in pm.queries[:4]] == [
        ("0_v1", "v1"),
        ("0_v2", "v2"),
        ("0_v3", "v3"),
        ("1_v1", "v1"),
    ]
    assert pm.queries[1].instruction == "I want to know more about coffee and sleep. It must be an official source."


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


JUDGED = "q0\t0\t2\nq1\t1\t+1\nq2\t2\t1.0\nq3\t3\t1\n"
QRELS = {
    "a byte order mark": "\ufeffquery-id\tcorpus-id\tscore\n" + JUDGED,
    "CRLF": ("query-id\tcorpus-id\tscore\n" + JUDGED).replace("\n", "\r\n"),
    "other names": "query_id\tdoc_id\trelevance\n" + JUDGED,
    "further columns": "qid\titer\tdocid\trel\n" + re.sub(r"^(q\d)", "\\1\t0", JUDGED, flags=re.M),
}


@pytest.mark.parametrize("form", QRELS)
def test_judgements_are_read_by_the_words_of_their_header(tmp_path: Path, form: str) -> None:
    name = str(published.beir_like(tmp_path))
    (tmp_path / "qrels" / "test.tsv").write_text(QRELS[form], encoding="utf-8", newline="")
    expected = {"q0": {"0": 2}, "q1": {"1": 1}, "q2": {"2": 1}, "q3": {"3": 1}}
    assert catalogue.load(name).qrels == expected


@pytest.mark.parametrize("first", ["q1\td1\t1.0", "q1\td1\t+1", "q1\t0\td1\t1", "q1 0 d1 1", "id\tid\t1"])
def test_judgements_without_a_header_are_refused(tmp_path: Path, first: str) -> None:
    name = str(published.beir_like(tmp_path))
    (tmp_path / "qrels" / "test.tsv").write_text(f"{first}\n{JUDGED}")
    with pytest.raises(
        InputError, match=r"test.tsv: row 1: (column query-id is missing|has 3 fields, the header has)|two columns"
    ):
        catalogue.load(name)


def test_bad_rows_of_a_collection_are_left_out_on_request(tmp_path: Path) -> None:
    name = str(published.beir_like(tmp_path))
    with (tmp_path / "corpus.jsonl").open("a") as corpus:
        corpus.write('{"_id": "new", "text": ["x"]}\n{"text": "x"}\noops\n{"_id": "blank", "text": ""}\n')
    with pytest.raises(InputError, match=r"column text must be.*column _id is empty.*is not JSON.*3 bad rows"):
        catalogue.load(name)
    with (tmp_path / "qrels" / "test.tsv").open("a") as qrels:
        qrels.write("q0\n")
    for _ in range(2):  # also of a corpus that was read before
        bad: list[BadRows] = []
        task = catalogue.load(name, reject=True, bad=bad)
        assert ([one.count for one in bad], texts(task)["blank"], "new" in texts(task)) == ([4], "", False)


def test_the_document_that_is_the_query_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = str(published.beir_like(tmp_path))
    edit(tmp_path / "corpus.jsonl", lambda rows: [*rows, {"_id": "q0", "title": "", "text": "the query"}])
    assert catalogue.load(name).excluded == {}
    assert (
        "1 queries have the id of a document; if it is the query, set ignore_identical_ids=true"
        in capsys.readouterr().out
    )
    task = catalogue.load(name, identical=True)
    assert (task.excluded, task.about["identical_ids_left_out"]) == ({"q0": {"q0"}}, 1)
    repository = tmp_path / "hub" / "mteb" / "arguana"
    repository.mkdir(parents=True)
    for file in ("corpus.jsonl", "queries.jsonl", "qrels/test.tsv"):
        (repository / file).parent.mkdir(exist_ok=True)
        shutil.copy(tmp_path / file, repository / file)
    files = {
        "corpus": ("corpus", "corpus.jsonl"),
        "queries": ("queries", "queries.jsonl"),
        "default": ("test", "qrels/test.tsv"),
    }
    card = [{"config_name": c, "data_files": [{"split": s, "path": p}]} for c, (s, p) in files.items()]
    (repository / "README.md").write_text(f"---\n{yaml.safe_dump({'configs': card})}---\n")
    assert catalogue.load("mteb/arguana", str(tmp_path / "hub")).excluded == {"q0": {"q0"}}
    assert catalogue.load("mteb/arguana", str(tmp_path / "hub"), identical=False).excluded == {}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("q0\t0\t3", "document 0 of query q0 has two scores"),
        ("q0\t5\tyes", "document 5 of query q0 has the score yes; scores are whole numbers"),
        ("q0\t5\t0.5", "has the score 0.5"),
        ("q0\t5\tnan", "has the score nan"),
        ("q0\t5\t2000000000", "has the score 2000000000; scores are whole numbers up to 1,000,000"),
        ("q0\t5", "row 49: has 2 fields, the header has 3"),
    ],
)
def test_a_faulty_judgement_is_rejected(tmp_path: Path, line: str, message: str) -> None:
    name = str(published.beir_like(tmp_path))
    with (tmp_path / "qrels" / "test.tsv").open("a", encoding="utf-8") as stream:
        stream.write(line + "\n")

    with pytest.raises(InputError, match=message):
        catalogue.load(name)


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


# ---------- mteb's layout and InstructIR, which is published in it.


def test_instructir_queries_of_one_text_are_a_group(tmp_path: Path) -> None:
    task = catalogue.load("instructir", str(published.instructir_like(tmp_path)))

    assert {query.group for query in task.queries} == {str(1_078_446 + topic) for topic in range(6)}
    assert len({query.instruction for query in task.queries}) == len(task.queries)
    assert [figure.name for figure in task.figures] == ["Robustness@10", "nDCG@10"]


def test_instructions_may_be_a_column_of_queries_and_ids_may_be_called_id(tmp_path: Path) -> None:
    """The form that mteb's own upload writes."""
    root = published.instructir_like(tmp_path)
    expected = catalogue.load("instructir", str(root))
    repository = root / published.INSTRUCTIR
    written = pq.read_table(repository / "instruction" / "instruction-00000-of-00001.parquet").to_pylist()
    instructions = {row["query-id"]: row["instruction"] for row in written}
    edit(
        repository / "queries" / "queries-00000-of-00001.parquet",
        lambda rows: [{"id": r["_id"], "text": r["text"], "instruction": instructions[r["_id"]]} for r in rows],
    )
    card = (repository / "README.md").read_text(encoding="utf-8")
    (repository / "README.md").write_text(
        card.replace("config_name: instruction", "config_name: other"), encoding="utf-8"
    )

    assert catalogue.load("instructir", str(root)).queries == expected.queries


# ---------- FollowIR is read from its layout.


def test_followir_ranks_candidates_under_two_instructions(tmp_path: Path) -> None:
    task = catalogue.load("followir/core17", str(published.followir_like(tmp_path)))

    first, second = task.queries[:2]
    assert (first.id, first.kind, second.id, second.kind) == ("312-og", "og", "312-changed", "changed")
    assert first.query == second.query
    assert "were written after 2000" in (second.instruction or "")
    assert "were written after 2000" not in (first.instruction or "")
    assert task.candidates is not None
    assert len(task.candidates["312-og"]) == 48
    assert texts(task)[task.candidates["312-og"][0]] == f"{DOCUMENTS[0].title} {DOCUMENTS[0].text}"
    assert [(figure.measure, figure.kind) for figure in task.figures] == [("p-MRR", None), ("MAP@1000", "og")]
    assert len(task.changes) == 6
    change = task.changes[0]
    assert (change.original, change.changed) == ("312-og", "312-changed")
    for document in change.documents:
        assert task.qrels["312-og"][document] > 0
        assert task.qrels["312-changed"][document] == 0


GONE = {"corpus-id": "gone", "query-id": "312-og", "score": 1}


def with_gone(rows: Rows) -> Rows:
    return [row | {"corpus-ids": [*row["corpus-ids"], "gone"]} for row in rows]


@pytest.mark.parametrize(
    ("file", "change", "counted"),
    [
        ("data/test", added(**GONE), "judgements_of_absent_documents"),
        ("data/test", added(**{"query-id": "9-og"}), "judgements_of_absent_queries"),
        ("data/test", lambda rows: [r for r in rows if r["query-id"] != "312-og"], "queries_without_judgements"),
        ("top_ranked/top_ranked", with_gone, None),
        ("qrel_diff/qrel_diff", with_gone, None),
    ],
)
def test_unreachable_judgements_of_a_published_set_are_counted(
    tmp_path: Path, file: str, change: Change, counted: str | None
) -> None:
    directory, name = followir(tmp_path)
    whole = catalogue.load(name, str(tmp_path))
    edit(directory / f"{file}-00000-of-00001.parquet", change)
    task = catalogue.load(name, str(tmp_path))
    assert (counted is None) or task.about[counted] == 1
    gone = {"312-og"} if counted == "queries_without_judgements" else set()
    assert {query.id for query in task.queries} == {q.id for q in whole.queries} - gone
    assert task.qrels.get("312-og", {}).get("gone", 0) == int(counted == "judgements_of_absent_documents")
    assert not any("gone" in documents for documents in (task.candidates or {}).values())


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("queries.jsonl", first(text="?"), "query 312-changed has another text than its original"),
        ("queries.jsonl", each(instruction=None), "no query has an instruction"),
        ("qrels/test.jsonl", each(score=0), "never relevant to the original query"),
        ("qrel_diff.jsonl", each(**{"corpus-ids": ["gone"]}), "document gone, never relevant"),
        ("qrel_diff.jsonl", each(**{"query-id": "9"}), "the changed judgements need query 9-og"),
    ],
)
def test_changes_that_measure_nothing_are_refused(tmp_path: Path, file: str, change: Change, message: str) -> None:
    kinds = ("og", "changed")
    rows = {
        "corpus.jsonl": [{"_id": "0", "text": "a"}, {"_id": "1", "text": "b"}],
        "queries.jsonl": [{"_id": f"312-{kind}", "text": "q", "instruction": kind} for kind in kinds],
        "qrel_diff.jsonl": [{"query-id": "312", "corpus-ids": ["0"]}],
        "qrels/test.jsonl": [
            {"query-id": f"312-{kind}", "corpus-id": d, "score": kinds.index(kind) ^ 1} for kind in kinds for d in "01"
        ],
    }
    for name, of_file in rows.items():
        write_jsonl(tmp_path / name, of_file if name != file else change(of_file))
    with pytest.raises(InputError, match=message):
        catalogue.load(str(tmp_path))


def test_fractional_and_repeated_labels_of_a_published_set_keep_their_order() -> None:
    rows = [("q", "a", 0.5), ("q", "b", "1"), ("q", "c", 0.25), ("q", "a", 0.25), ("q", "d", 0)]
    assert judgements("t", rows, published=True) == {"q": {"a": 2, "b": 4, "c": 1, "d": 0}}
    for given in ("yes", None, float("nan"), float("inf"), 10**7):
        with pytest.raises(InputError, match="has the score"):
            judgements("t", [("q", "a", given)], published=True)


def test_a_query_under_neither_instruction_is_rejected(tmp_path: Path) -> None:
    root = published.followir_like(tmp_path)
    for file, key in (("queries/queries", "_id"), ("instruction/instruction", "query-id")):
        edit(
            root / published.FOLLOWIR["core17"] / f"{file}-00000-of-00001.parquet",
            lambda rows, key=key: [*rows, rows[0] | {key: "312-reversed"}],
        )

    with pytest.raises(InputError, match="query 312-reversed ends neither in -og nor in -changed"):
        catalogue.load("followir/core17", str(root))


# ---------- BRIGHT is read from its layout.


def test_bright_excludes_the_named_documents_and_none_for_n_a(tmp_path: Path) -> None:
    root = str(published.bright_like(tmp_path))

    with_none, with_some = catalogue.load("bright/biology", root), catalogue.load("bright/leetcode", root)

    assert with_none.excluded == {}
    assert with_some.excluded["0"] == {"coffee_and_sleep/leetcode_18.txt"}
    assert set(with_some.qrels["0"].values()) == {1}
    assert with_some.queries[0].instruction is None


# ---------- MAIR is read from its layout.


def test_mair_grades_documents(tmp_path: Path) -> None:
    task = catalogue.load("mair/fr-21", str(published.mair_like(tmp_path)))

    assert task.candidates is None
    assert {score for judged in task.qrels.values() for score in judged.values()} == {1, 2}
    assert task.queries[1].query == "electric buses"
    assert (task.queries[1].instruction or "").startswith("You search an archive.")
