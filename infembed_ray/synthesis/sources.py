"""Seeds: (query, relevant passage) pairs, streamed from tables or from data sets as published.

Memory grows only by a digest of each id: rows are read in small blocks, and the judge's distractors come from a sample of
bounded size. A source can be iterated any number of times.
"""

from __future__ import annotations

import gzip
import hashlib
import heapq
import html
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import compress, islice
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from infembed_ray.config.synthesis import SynthesizeSettings
from infembed_ray.errors import InputError
from infembed_ray.llm.chat import replace_surrogates
from infembed_ray.records import tables
from infembed_ray.records.tables import Seed
from infembed_ray.storage.steps import resolve_input
from infembed_ray.synthesis.selection import Embed, select

POOL_SIZE = 10_000
"""Most passages to draw distractors from."""

_DIGEST_BYTES = 16

LeftOut = str
"""Reason why a row of a published data set holds no pair. This is no error, but it is counted."""


@dataclass(frozen=True)
class SeedSurvey:
    """Contents of a source, known before any request is sent."""

    seeds: int
    pool: tuple[str, ...]
    """Passages to draw distractors from: all distinct ones in seed order, or a sample of POOL_SIZE."""
    left_out: Mapping[LeftOut, int]


class Source:
    """The seeds of a run. Each iteration reads the files again, in the same order.

    A seed with an empty query or passage becomes a dead letter; it does not stop the others.

    Args:
        settings: `seeds` names the files; `format`, `columns` and `split` describe them; `limit` and `passage_words`
            bound what is taken.

    Raises:
        InputError: a file is missing or unreadable, or lacks a column.
    """

    def __init__(self, settings: SynthesizeSettings) -> None:
        self._settings = settings
        self.path = resolve_input(settings.seeds, "seeds")
        if settings.columns and settings.format != "table":
            raise InputError(
                f"columns={settings.columns}: format={settings.format} has its own; leave columns out or set format=table"
            )
        self._chosen: np.ndarray | None = None
        self._items = _robust04(self.path) if settings.format == "robust04" else self._tables()

    def __iter__(self) -> Iterator[Seed]:
        """Iterate over the seeds, or the chosen ones of them, up to the limit."""
        seeds: Iterator[Seed] = (item for item in self._all() if isinstance(item, Seed))
        if self._chosen is not None:
            seeds = compress(seeds, self._chosen)
        return islice(seeds, self._settings.limit)

    def choose(self, wanted: int, embed: Embed) -> None:
        """Let all iterations skip the seeds that `selection.select` does not choose by their queries and passages."""
        texts = (f"{seed.query}\n{seed.passage}" for seed in self._all() if isinstance(seed, Seed))
        self._chosen = np.bincount(select(texts, wanted, embed, self._settings.seed))  # 1 for a chosen seed, else 0

    def survey(self) -> SeedSurvey:
        """Read all seeds once. Passages beyond the limit are in the pool too, so the judge's requests do not depend on it.

        Raises:
            InputError: a file is damaged, an id is missing or occurs twice, or there are no seeds.
        """
        left_out: Counter[LeftOut] = Counter()
        ids: set[bytes] = set()
        pool = _PassageSample(POOL_SIZE)
        for item in self._all():
            if isinstance(item, str):
                left_out[item] += 1
                continue
            if not item.id.strip():
                raise InputError(
                    f"seeds={self.path}: seed {len(ids) + 1} has no id; fill its column id or drop the row"
                )
            digest = hashlib.blake2b(item.id.encode(), digest_size=_DIGEST_BYTES).digest()
            if digest in ids:
                raise InputError(f"seeds={self.path}: id {item.id} occurs twice; ids must be unique")
            ids.add(digest)
            if item.passage.strip():
                pool.add(item.passage)
        if not ids:
            why = "; ".join(f"{count} x {reason}" for reason, count in left_out.items()) or "it has no rows"
            raise InputError(f"seeds={self.path}: no seeds in it as format={self._settings.format} ({why}); give some")
        chosen = len(ids) if self._settings.select is None else min(len(ids), self._settings.select.seeds)
        return SeedSurvey(min(chosen, self._settings.limit or chosen), pool.passages(), left_out)

    def _all(self) -> Iterator[Seed | LeftOut]:
        words = self._settings.passage_words
        for item in self._items():
            if isinstance(item, str):
                yield item
                continue
            passage = item.passage if words is None else _cut(item.passage, words)
            texts: dict[str, Any] = {**vars(item), "passage": passage}
            yield Seed(**{name: text and replace_surrogates(text) for name, text in texts.items()})

    def _tables(self) -> Callable[[], Iterator[Seed | LeftOut]]:
        readers = []
        for file in tables.data_files(self.path, "seeds", self._settings.split):
            first = next(tables.raw_rows(file, "seeds"), None)
            if first is not None:
                readers.append((file, self._reader(file, first)))

        def read() -> Iterator[Seed | LeftOut]:
            for file, seeds_of in readers:
                for number, row in enumerate(tables.raw_rows(file, "seeds"), start=1):
                    for item in seeds_of(row, number):
                        yield self._with_split(item, tables.split_of(file)) if isinstance(item, Seed) else item

        return read

    def _with_split(self, seed: Seed, split: str | None) -> Seed | LeftOut:
        """Give a seed its file's split if it has none; leave it out if it is not of the wanted split."""
        seed = replace(seed, split=seed.split or split)
        wanted = self._settings.split
        return seed if wanted in (None, seed.split) else f"not of split {wanted}"

    def _reader(self, file: Path, first: Mapping[str, Any]) -> RowReader:
        """Return the function that makes seeds of a file's rows; `first` is the first row, which has all required columns."""
        layout = self._settings.format
        if layout == "table":

            def columns(present: Mapping[str, Any]) -> dict[str, str]:
                return tables.mapping(present, Seed, file, "seeds", self._settings.columns)

            of_first = columns(first)  # a row of JSON may have more
            return lambda row, _: _table(row, of_first if row.keys() <= first.keys() else columns({**first, **row}))
        required, read = _PUBLISHED[layout]
        for column in required:
            if column not in first:
                raise InputError(
                    f"seeds={file}: column {column} is missing (found: {', '.join(first)}), so it is not {layout} as "
                    "published; set format=table and columns"
                )

        def seeds_of(row: Mapping[str, Any], number: int) -> Iterator[Seed | LeftOut]:
            try:
                yield from read(row, f"{file.stem}-{number}")
            except (LookupError, TypeError, AttributeError) as error:
                raise InputError(
                    f"seeds={file}: row {number} does not have the layout of {layout} ({error!r}); check format={layout}"
                ) from error

        return seeds_of


RowReader = Callable[[Mapping[str, Any], int], Iterator[Seed | LeftOut]]
"""Makes seeds of a row; its number counts from 1 in its file."""


class _PassageSample:
    """The distinct passages with the smallest hashes: a sample in bounded memory that does not depend on the order."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._kept: dict[bytes, str] = {}  # by hash, in the order in which they were first added

    def add(self, passage: str) -> None:
        self._kept.setdefault(hashlib.blake2b(passage.encode(), digest_size=8).digest(), passage)
        if len(self._kept) >= 2 * self._size:
            self._prune()

    def passages(self) -> tuple[str, ...]:
        """Return the sample in the order in which its passages were first added."""
        self._prune()
        return tuple(self._kept.values())

    def _prune(self) -> None:
        smallest = set(heapq.nsmallest(self._size, self._kept))
        self._kept = {digest: passage for digest, passage in self._kept.items() if digest in smallest}


def _cut(text: str, words: int) -> str:
    """Return the text up to its N-th word, with its white space."""
    end = next(islice(re.finditer(r"\S+", text), words - 1, None), None)
    return text if end is None else text[: end.end()]


def _table(row: Mapping[str, Any], columns: Mapping[str, str]) -> Iterator[Seed]:
    values = {ours: row.get(theirs) for ours, theirs in columns.items()}
    required = {name: str(values.pop(name) or "") for name in ("query", "passage")}
    seed_id = values.pop("id")
    given = {name: str(value) for name, value in values.items() if value is not None}
    yield Seed(id="" if seed_id is None else str(seed_id), **required, **given)


# ------------------------------------------------------------------------------------------- data sets as published


def _msmarco(row: Mapping[str, Any], _: str) -> Iterator[Seed | LeftOut]:
    """MS MARCO v2.1: a query and about ten passages, some selected by people; a seed for each selected passage."""
    passages = row["passages"]
    selected = [place for place, chosen in enumerate(passages["is_selected"]) if chosen]
    for place in selected:
        text = passages["passage_text"][place]
        yield Seed(f"{row['query_id']}-{place}", row["query"] or "", text or "", "msmarco", topic=row.get("query_type"))
    if not selected:
        yield "a query without a selected passage"


_LANGUAGES = {"java": "Java", "c++": "C++", "python": "Python", "javascript": "JavaScript"}


def _leetcode(row: Mapping[str, Any], _: str) -> Iterator[Seed | LeftOut]:
    """LeetCode: a problem and its solutions in several languages; a seed for each solution (appendix B.2)."""
    for column, language in _LANGUAGES.items():
        if (row.get(column) or "").strip():
            key = f"{row['id']}-{column}"
            yield Seed(
                key, row["content"] or "", row[column], "leetcode", topic=row.get("difficulty"), language=language
            )
        else:
            yield f"a problem without a {language} solution"


def _metamath(row: Mapping[str, Any], place: str) -> Iterator[Seed]:
    """MetaMathQA: a problem and its worked solution (appendix B.2); the row's place is its id."""
    yield Seed(place, row["query"] or "", row["response"] or "", "metamath", topic=row.get("type"))


_PUBLISHED: Mapping[str, tuple[tuple[str, ...], Callable[[Mapping[str, Any], str], Iterator[Seed | LeftOut]]]] = {
    "msmarco": (("query_id", "query", "passages"), _msmarco),
    "leetcode": (("id", "content", "python"), _leetcode),
    "metamath": (("query", "response"), _metamath),
}
"""Format -> its required columns, and a function of (row, place) that makes seeds."""


def _robust04(directory: Path) -> Callable[[], Iterator[Seed | LeftOut]]:
    """TREC Robust 2004: a seed for each topic's title and each document judged relevant to it.

    Args:
        directory: holds one file with `topics` or `testset` in its name, one with `qrels`, and in subdirectories the
            documents of TREC disks 4 and 5 in SGML, plain or .gz.
    """
    if not directory.is_dir():
        raise InputError(f"seeds={directory}: format=robust04 is a directory of topics, qrels and documents; give that")
    topics_file, qrels_file = _single_file(directory, "topics", "testset"), _single_file(directory, "qrels")
    titles = _topics(topics_file)
    relevant = _relevant(qrels_file, titles, topics_file.name)
    files = [
        file
        for file in sorted(directory.rglob("*"))
        if file.is_file() and not tables.hidden(file.relative_to(directory)) and file not in (topics_file, qrels_file)
    ]
    for file in files:
        if re.fullmatch(r"\.\d?z", file.suffix.lower()):
            raise InputError(f"seeds={file}: compressed as on the TREC disks; uncompress it (gzip -d)")

    def read() -> Iterator[Seed | LeftOut]:
        found: set[str] = set()
        for file in files:
            for name, text in _documents(file):
                for topic in relevant.get(name, ()):
                    yield Seed(f"{topic}-{name}", titles[topic], text, "robust04", topic=topic)
                found |= {name} & relevant.keys()
        yield from ("a relevant document that is not in the directory" for _ in range(len(relevant) - len(found)))

    return read


def _single_file(directory: Path, *names: str) -> Path:
    """Return the one file at the top of a directory that has one of some words in its name."""
    found = [f for f in sorted(directory.iterdir()) if f.is_file() and any(name in f.name.lower() for name in names)]
    if len(found) != 1:
        raise InputError(
            f"seeds={directory}: has {len(found)} files with {' or '.join(names)} in their name; format=robust04 takes one"
        )
    return found[0]


def _relevant(qrels: Path, topics: Mapping[str, str], topics_file: str) -> dict[str, list[str]]:
    """Read the judgements: document -> topics that it is relevant to."""
    relevant: dict[str, list[str]] = defaultdict(list)
    for number, line in enumerate(_lines(qrels), start=1):
        judged = line.split()
        if not judged:
            continue
        if len(judged) != 4 or not judged[3].lstrip("-").isdigit():
            raise InputError(f"seeds={qrels}: line {number} is no judgement; write `topic 0 document relevance`")
        if int(judged[3]) > 0:
            if judged[0] not in topics:
                raise InputError(f"seeds={qrels}: line {number}: topic {judged[0]} is not in {topics_file}; add it")
            relevant[judged[2]].append(judged[0])
    return relevant


def _topics(file: Path) -> dict[str, str]:
    """Read TREC topics, whose fields have no end tags: number -> title."""
    titles: dict[str, str] = {}
    for topic in "".join(_lines(file)).split("<top>")[1:]:
        number = re.search(r"<num>\s*(?:Number:)?\s*(\d+)", topic)
        title = re.search(r"<title>\s*(?:Topic:)?([^<]*)", topic)
        if number is None or title is None or not title[1].strip():
            raise InputError(f"seeds={file}: topic {len(titles) + 1} has no number or no title; give TREC topics")
        titles[number[1]] = " ".join(title[1].split())
    if not titles:
        raise InputError(f"seeds={file}: no <top> in it; give TREC topics")
    return titles


def _documents(file: Path) -> Iterator[tuple[str, str]]:
    """Yield (DOCNO, headline and text) of the documents of an SGML file."""
    document: list[str] | None = None
    for line in _lines(file):
        if line.startswith("<DOC>"):
            document = []
        elif line.startswith("</DOC>") and document is not None:
            markup = "".join(document)
            name = re.search(r"<DOCNO>\s*(\S+?)\s*</DOCNO>", markup)
            if name is not None:
                yield name[1], _text(markup)
            document = None
        elif document is not None:
            document.append(line)


_READ = re.compile(r"<(HEADLINE|TI|TEXT)>(.*?)</\1>", re.DOTALL)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_TAG = re.compile(r"</?[A-Za-z][^>]*>")
_ENTITY = re.compile(r"&[A-Za-z]+;")


def _text(markup: str) -> str:
    known = _COMMENT.sub(" ", markup).replace("&blank;", " ").replace("&hyph;", "-")  # they mean something else in HTML
    parts = (_TAG.sub(" ", part) for _, part in _READ.findall(known))
    return "\n".join(" ".join(_ENTITY.sub(" ", html.unescape(part)).split()) for part in parts).strip()


def _lines(file: Path) -> Iterator[str]:
    stream: TextIO
    with gzip.open(file, "rt", encoding="latin-1") if file.suffix == ".gz" else file.open(encoding="latin-1") as stream:
        yield from stream
