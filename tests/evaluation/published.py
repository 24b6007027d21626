"""Small data sets in the layouts in which the benchmarks are published on the Hugging Face hub.

Every function writes repositories below the root of a mirror (`root/<owner>/<name>`), with the card (`README.md`) whose
`configs` say which files are which split. So our tasks and `datasets.load_dataset(path, config, split)`, and with it
mteb, read the very same files.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import yaml

from infembed_ray.evaluation.tasks.task import Task
from tests.support.files import write_jsonl, write_parquet

TOPICS = (
    ("coffee and sleep", "caffeine delays the onset of deep sleep by about forty minutes"),
    ("electric buses", "battery buses cut the fuel cost of a city fleet by half"),
    ("salt marshes", "salt marshes store carbon ten times faster than upland forests"),
    ("ransomware in hospitals", "attackers encrypt patient records and ask to be paid in bitcoin"),
    ("urban beekeeping", "hives on rooftops compete with wild bees for the same flowers"),
    ("concussion in football", "repeated blows to the head change the white matter of players"),
)
SOURCES = (
    ("clinical trial", "A randomised trial with 240 participants reports that"),
    ("government report", "The ministry's annual report to parliament finds that"),
    ("newspaper article", "In Tuesday's paper our correspondent writes that"),
    ("vendor page", "Our product page explains, with a discount until Friday, that"),
)
YEARS = (1998, 2009, 2021)
PLACES = ("Norway", "Chile")

FOLLOWIR = {
    "robust04": "mteb/Robust04InstructionRetrieval",
    "news21": "mteb/News21InstructionRetrieval",
    "core17": "mteb/Core17InstructionRetrieval",
}
"""Task -> its repository in mteb."""
MAIR_QUERIES, MAIR_DOCS = "MAIR-Bench/MAIR-Queries", "MAIR-Bench/MAIR-Docs"
MAIR = {
    "dd-15": "DD_2015",
    "dd-16": "DD_2016",
    "dd-17": "DD_2017",
    "fr-21": "FairRanking_2021",
    "fr-22": "FairRanking_2022",
}
"""Task -> its configuration of both repositories."""
BRIGHT = "mteb/BRIGHT"
INSTRUCTIR = "mteb/InstructIR-mteb"
MFOLLOWIR = ("jhu-clsp/mFollowIR-parquet-mteb", "jhu-clsp/mFollowIR-cross-lingual-parquet-mteb")
IFIR = {name: f"if-ir/{name}" for name in ("fiqa", "scifact_open", "nfcorpus", "aila", "fire", "pm", "cds")}
BRIGHT_PRO = {
    name: f"mteb/BrightPro{name.title().replace('_', '')}Retrieval"
    for name in (
        "biology",
        "earth_science",
        "economics",
        "psychology",
        "robotics",
        "stackoverflow",
        "sustainable_living",
    )
}
NEVIR = "orionweller/NevIR-mteb"
EXCLUIR = "zwh-sdu/ExcluIR"


@dataclass(frozen=True)
class Document:
    """A made-up text and its topic."""

    number: int
    topic: int
    source: int
    year: int
    place: str

    @property
    def title(self) -> str:
        return f"{TOPICS[self.topic][0].capitalize()} in {self.place}, {self.year}"

    @property
    def text(self) -> str:
        _, fact = TOPICS[self.topic]
        return f"{SOURCES[self.source][1]} {fact}. The figures are for {self.place} and date from {self.year}."


DOCUMENTS = tuple(
    Document(number, topic, source, year, place)
    for number, (topic, source, year, place) in enumerate(
        product(range(len(TOPICS)), range(len(SOURCES)), YEARS, PLACES)
    )
)
"""144 texts: every topic in every kind of source, year and country."""


def followir_like(root: Path) -> Path:
    """Write FollowIR's tasks: candidates, two instructions per query, and documents that the second excludes."""
    for shift, repository in enumerate(FOLLOWIR.values()):
        _write_mteb(root / repository, _followir(shift))
    return root


def mfollowir_like(root: Path) -> Path:
    """Write both repositories of mFollowIR, with the configurations of every language."""
    for start, repository in enumerate(MFOLLOWIR, 3):
        of_languages = {language: _followir(start + 2 * n) for n, language in enumerate(("fas", "rus", "zho"))}
        _write_mteb(
            root / repository,
            {f"{config}-{lang}": split for lang, configs in of_languages.items() for config, split in configs.items()},
        )
    return root


def _followir(shift: int) -> dict[str, tuple[str, list[dict[str, Any]]]]:
    """Return the configurations of a task: name -> (split, rows)."""
    ids = {d: f"{1_000_000 + 7 * d.number}_{d.number % 3}" for d in DOCUMENTS}
    queries, instructions, qrels, ranked, differences = [], [], [], [], []
    for topic, (name, _) in enumerate(TOPICS):
        number = str(310 + 11 * topic + shift)
        source = (topic + shift) % len(SOURCES)
        narrower = {
            "og": f"Relevant documents report measurements about {name}; a vendor's own page is not relevant.",
            "changed": f"Relevant documents report measurements about {name} and were written after 2000; a "
            f"{SOURCES[source][0]} is not relevant.",
        }
        relevant = {
            "og": {d for d in DOCUMENTS if d.topic == topic and d.source != 3},
            "changed": {d for d in DOCUMENTS if d.topic == topic and d.source not in (3, source) and d.year > 2000},
        }
        pool = [d for d in DOCUMENTS if d.topic in (topic, (topic + 1) % len(TOPICS))]
        for version, instruction in narrower.items():
            query = f"{number}-{version}"
            queries.append({"_id": query, "text": f"What is known about {name}?"})
            instructions.append({"query-id": query, "instruction": instruction})
            ranked.append({"query-id": query, "corpus-ids": [ids[d] for d in pool]})
            qrels += [
                {"query-id": query, "corpus-id": ids[d], "score": float(_grade(d) if d in relevant[version] else 0)}
                for d in DOCUMENTS
                if d.topic == topic
            ]
        gone = [ids[d] for d in DOCUMENTS if d in relevant["og"] - relevant["changed"]]
        differences.append({"query-id": number, "corpus-ids": gone})
    return {
        "corpus": ("corpus", [{"_id": ids[d], "title": d.title, "text": d.text} for d in DOCUMENTS]),
        "queries": ("queries", queries),
        "default": ("test", qrels),
        "top_ranked": ("top_ranked", ranked),
        "instruction": ("instruction", instructions),
        "qrel_diff": ("qrel_diff", differences),
    }


def ifir_like(root: Path, names: Sequence[str] = tuple(IFIR)) -> Path:
    """Write sets of IFIR: every query under three instructions, each narrower than the one before."""
    for name in names:
        queries, instructions, qrels = [], [], []
        for topic, (title, _) in enumerate(TOPICS):
            wishes = (f"I want to know more about {title}.", " It must be an official source.", " It must be recent.")
            for level in (1, 2, 3):
                query = f"{topic}_v{level}"
                queries.append({"_id": query, "text": title})
                instructions.append({"query-id": query, "instruction": "".join(wishes[:level])})
                right = [
                    d
                    for d in DOCUMENTS
                    if d.topic == topic and d.source < 3 - level // 2 and d.year > 2000 * (level > 2)
                ]
                qrels += [{"query-id": query, "corpus-id": str(d.number), "score": 1} for d in right]
        _write_mteb(
            root / IFIR[name],
            {
                "corpus": ("corpus", [{"_id": str(d.number), "title": "", "text": d.text} for d in DOCUMENTS]),
                "queries": ("queries", [*queries, {"_id": "unjudged", "text": "a query of another split"}]),
                "default": ("test", qrels),
                "instruction": ("instruction", [*instructions, {"query-id": "unjudged", "instruction": "None."}]),
            },
        )
    return root


def bright_pro_like(root: Path) -> Path:
    """Write BRIGHT-Pro, a repository per subset with the split `standard`."""
    for repository in BRIGHT_PRO.values():
        right = [d for d in DOCUMENTS if d.source < 2]
        _write_mteb(
            root / repository,
            {
                "corpus": ("standard", [{"id": str(d.number), "title": "", "text": d.text} for d in DOCUMENTS]),
                "queries": ("standard", [{"id": f"q{n}", "text": fact} for n, (_, fact) in enumerate(TOPICS)]),
                "qrels": (
                    "standard",
                    [{"query-id": f"q{d.topic}", "corpus-id": str(d.number), "score": 1} for d in right],
                ),
            },
        )
    return root


def nevir_like(root: Path) -> Path:
    """Write NevIR: pairs of documents that differ in a negation, each with its query; further queries of other splits."""
    directory = root / NEVIR
    rows: dict[str, list[dict[str, Any]]] = {"corpus": [], "queries": [], "qrels/test": [], "top_ranked/test": []}
    for document in DOCUMENTS[:40]:
        pair, name = f"{1000 + document.number // 3}-{document.number % 3}", TOPICS[document.topic][0]
        documents = [f"{pair}_doc{side}" for side in (1, 2)]
        texts = (document.text, document.text.replace(" that ", " that it is not true that "))
        asked = (
            f"Which {SOURCES[document.source][0]} confirms what is said about {name}?",
            f"Who denies it about {name}?",
        )
        for side in (1, 2):
            query = f"{pair}_q{side}"
            rows["corpus"].append({"_id": documents[side - 1], "text": texts[side - 1]})
            rows["queries"].append({"_id": query, "text": asked[side - 1]})
            rows["qrels/test"].append({"query-id": query, "corpus-id": documents[side - 1], "score": 1})
            rows["top_ranked/test"].append({"query-id": query, "corpus-ids": documents})
    rows["queries"].append({"_id": "9-1_q1", "text": "a query of the training split"})
    for name, of_file in rows.items():
        write_jsonl(directory / f"{name}.jsonl", of_file)
    files = {"corpus": "corpus", "queries": "queries", "default": "qrels/test", "top_ranked": "top_ranked/test"}
    splits = {"corpus": "corpus", "queries": "queries"}
    _write_card(directory, {config: {splits.get(config, "test"): f"{file}.jsonl"} for config, file in files.items()})
    return root


def excluir_like(root: Path) -> Path:
    """Write ExcluIR as its authors: a list of passages, and queries with the numbers of an excluded and a relevant one."""
    directory = root / EXCLUIR
    directory.mkdir(parents=True)
    (directory / "corpus.json").write_text(json.dumps([d.text for d in DOCUMENTS]), encoding="utf-8")
    queries = [
        {
            "question0": f"What is known about {name}?",
            "ExcluQ": f"What is known about {name}, other than what vendors say?",
            "index": [next(d.number for d in DOCUMENTS if (d.topic, d.source) == (topic, source)) for source in (3, 0)],
        }
        for topic, (name, _) in enumerate(TOPICS)
    ]
    (directory / "test_manual_final.json").write_text(json.dumps(queries), encoding="utf-8")
    return root


def mair_like(root: Path) -> Path:
    """Write MAIR's five tasks."""
    configs: dict[str, dict[str, dict[str, str]]] = {MAIR_QUERIES: {}, MAIR_DOCS: {}}
    for shift, config in enumerate(MAIR.values()):
        kept = [d for d in DOCUMENTS if d.number % 5 != shift]
        _write_mair(root, config, kept, shift)
        configs[MAIR_QUERIES][config] = {"queries": f"{config}/queries.jsonl"}
        configs[MAIR_DOCS][config] = {"docs": f"{config}/docs.jsonl"}
    for repository, of_repository in configs.items():
        _write_card(root / repository, of_repository)
    return root


def bright_like(root: Path, subsets: Sequence[str] = ("biology", "leetcode")) -> Path:
    """Write subsets of BRIGHT; in `leetcode` a query's own source is excluded from its ranking."""
    files: dict[str, dict[str, str]] = {"documents": {}, "examples": {}}
    for subset in subsets:
        ids = {d: f"{TOPICS[d.topic][0].replace(' ', '_')}/{subset}_{d.number}.txt" for d in DOCUMENTS}
        examples = []
        for topic, (name, fact) in enumerate(TOPICS):
            own = next(d for d in DOCUMENTS if d.topic == topic and d.source == 3)
            gold = [ids[d] for d in DOCUMENTS if d.topic == topic and d.source < 2]
            examples.append(
                {
                    "query": f"A friend told me that {fact}. I could not find where this comes from. Is there any "
                    f"study or official source about {name}, and not an advertisement?",
                    "reasoning": f"The question asks for primary sources about {name}.",
                    "id": str(topic),
                    "excluded_ids": [ids[own]] if subset == "leetcode" else ["N/A"],
                    "gold_ids_long": ["N/A"],
                    "gold_ids": gold,
                    "gold_answer": "N/A",
                }
            )
        documents = [{"id": ids[d], "content": d.text} for d in DOCUMENTS]
        for config, rows in (("documents", documents), ("examples", examples)):
            write_parquet(root / BRIGHT / config / f"{subset}-00000-of-00001.parquet", rows)
            files[config][subset] = f"{config}/{subset}-*"
    _write_card(root / BRIGHT, files)
    return root


def instructir_like(root: Path) -> Path:
    """Write InstructIR: a query under several instructions, each with its own relevant document."""
    corpus = [{"_id": f"{7_865_137 + d.topic}_{d.number}", "title": "", "text": d.text} for d in DOCUMENTS]
    queries, instructions, qrels = [], [], []
    for topic, (name, _) in enumerate(TOPICS):
        answers = [d for d in DOCUMENTS if d.topic == topic and d.year == YEARS[topic % 3] and d.place == PLACES[0]]
        for number, answer in enumerate(answers, start=1):
            query = f"{1_078_446 + topic}_{number}"
            queries.append({"_id": query, "text": name})
            wish = f"I collect what each kind of source says about {name}. Find me a {SOURCES[answer.source][0]} from "
            instructions.append({"query-id": query, "instruction": f"{wish}{answer.place}, {answer.year}."})
            qrels.append({"query-id": query, "corpus-id": corpus[answer.number]["_id"], "score": 1})
    _write_mteb(
        root / INSTRUCTIR,
        {
            "corpus": ("corpus", corpus),
            "queries": ("queries", queries),
            "default": ("test", qrels),
            "instruction": ("instruction", instructions),
        },
    )
    return root


def beir_like(directory: Path, instructions: bool = True) -> Path:
    """Write a directory in BEIR's layout: `corpus.jsonl`, `queries.jsonl`, `qrels/test.tsv`, `qrels/dev.tsv`."""
    corpus = [{"_id": str(d.number), "title": d.title, "text": d.text, "metadata": {}} for d in DOCUMENTS]
    queries: list[dict[str, Any]] = [
        {"_id": f"q{topic}", "text": f"evidence about {name}"} for topic, (name, _) in enumerate(TOPICS)
    ]
    for topic, query in enumerate(queries):
        if instructions and topic % 2 == 0:
            query["instruction"] = "Only official reports count."
    write_jsonl(directory / "corpus.jsonl", corpus)
    write_jsonl(directory / "queries.jsonl", queries)
    for split, topics in (("test", (0, 1, 2, 3)), ("dev", (4, 5))):
        rows = [f"q{d.topic}\t{d.number}\t{_grade(d)}" for d in DOCUMENTS if d.topic in topics and d.source < 2]
        path = directory / "qrels" / f"{split}.tsv"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(["query-id\tcorpus-id\tscore", *rows]) + "\n", encoding="utf-8")
    return directory


def texts(task: Task) -> dict[str, str]:
    """Return the corpus of a task: document id -> text."""
    return dict(zip(task.corpus["id"].to_pylist(), task.corpus["text"].to_pylist(), strict=True))


def edit(file: Path, change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> None:
    """Change the rows of a Parquet or JSONL file."""
    if file.suffix == ".parquet":
        write_parquet(file, change(pq.read_table(file).to_pylist()))
    else:
        write_jsonl(file, change([json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]))


def _grade(document: Document) -> int:
    return 2 if document.source == 0 else 1


def _write_mair(root: Path, config: str, documents: Sequence[Document], shift: int) -> None:
    queries = []
    for topic, (name, _) in enumerate(TOPICS):
        source = (topic + shift) % len(SOURCES)
        right = [d for d in documents if d.topic == topic and d.source == source]
        queries.append(
            {
                "qid": f"{config}-{topic}",
                "instruction": f"You search an archive. Retrieve every {SOURCES[source][0]} that answers the query; "
                "documents of another kind are not relevant.",
                "query": name,
                "labels": [{"id": f"{config}-{d.number}", "score": 2 if d.year > 2000 else 1} for d in right],
            }
        )
    write_jsonl(root / MAIR_QUERIES / config / "queries.jsonl", queries)
    docs = [{"id": f"{config}-{d.number}", "doc": f"{d.title}\n{d.text}"} for d in documents]
    write_jsonl(root / MAIR_DOCS / config / "docs.jsonl", docs)


def _write_mteb(directory: Path, configs: Mapping[str, tuple[str, list[dict[str, Any]]]]) -> None:
    """Write configuration -> (split, rows). The default one is in `data/`, where `push_to_hub` writes it."""
    card = {}
    for config, (split, rows) in configs.items():
        folder = "data" if config == "default" else config
        write_parquet(directory / folder / f"{split}-00000-of-00001.parquet", rows)
        card[config] = {split: f"{folder}/{split}-*"}
    _write_card(directory, card)


def _write_card(directory: Path, configs: Mapping[str, Mapping[str, str]]) -> None:
    """Write a card from configuration -> split -> pattern of its files."""
    listed = [
        {"config_name": config, "data_files": [{"split": split, "path": path} for split, path in splits.items()]}
        for config, splits in configs.items()
    ]
    front = yaml.safe_dump({"language": ["en"], "configs": listed}, sort_keys=False)
    (directory / "README.md").write_text(f"---\n{front}---\n# {directory.name}\n\nMade by a test.\n", encoding="utf-8")
