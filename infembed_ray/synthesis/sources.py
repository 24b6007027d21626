"""Seeds as a stream of (query, relevant passage) pairs, from tables of any kind or from data sets as published.

Memory grows with the number of seeds by a digest of each id only: rows are read in small blocks, and the passages that
the judge's distractors are drawn from are a sample of bounded size. A source can be read again and again.
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
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from infembed_ray import records
from infembed_ray.config import SynthesizeSettings
from infembed_ray.errors import InputError
from infembed_ray.records import Seed
from infembed_ray.storage import existing
from infembed_ray.synthesis.chat import sound

POOL_SIZE = 10_000
"""Most passages that distractors are drawn from."""

_DIGEST_BYTES = 16

LeftOut = str
"""Why a row of a published data set holds no pair: not a fault, but counted."""


@dataclass(frozen=True)
class Survey:
    """What a source holds, known before anything is asked."""

    seeds: int
    pool: tuple[str, ...]
    """Passages to draw distractors from: all distinct ones in the order of the seeds, or a sample of POOL_SIZE."""
    left_out: Mapping[LeftOut, int]


class Source:
    """The seeds of a run. Each iteration reads them anew, in the same order.

    A seed's query or passage may be empty: then the row is for the dead letters, not a reason to stop all others.

    Args:
        settings: `seeds` says where, `format`, `columns` and `split` say what they are; `limit` and `passage_words`
            how much of it to take.

    Raises:
        InputError: nothing there, nothing readable, or a column is missing.
    """

    def __init__(self, settings: SynthesizeSettings) -> None:
        self._settings = settings
        self.path = existing(settings.seeds, "seeds")
        if settings.columns and settings.format != "table":
            raise InputError(
                f"columns={settings.columns}: format={settings.format} has its own; leave columns out or set format=table"
            )
        self._items = _robust04(self.path) if settings.format == "robust04" else self._tables()

    def __iter__(self) -> Iterator[Seed]:
        """The seeds, up to the settings' limit."""
        return islice((item for item in self._all() if isinstance(item, Seed)), self._settings.limit)

    def survey(self) -> Survey:
        """Read all seeds once; their passages beyond the limit count, so that another limit asks the judge the same.

        Raises:
            InputError: a damaged file, an id that is missing or stands twice, no seeds.
        """
        left_out: Counter[LeftOut] = Counter()
        ids: set[bytes] = set()
        pool = _Pool(POOL_SIZE)
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
                raise InputError(f"seeds={self.path}: id {item.id} stands twice; ids must be unique")
            ids.add(digest)
            if item.passage.strip():
                pool.add(item.passage)
        if not ids:
            why = "; ".join(f"{count} x {reason}" for reason, count in left_out.items()) or "it has no rows"
            raise InputError(f"seeds={self.path}: no seeds in it as format={self._settings.format} ({why}); give some")
        return Survey(min(len(ids), self._settings.limit or len(ids)), pool.passages(), left_out)

    def _all(self) -> Iterator[Seed | LeftOut]:
        words = self._settings.passage_words
        for item in self._items():
            if isinstance(item, str):
                yield item
                continue
            passage = item.passage if words is None else _cut(item.passage, words)
            texts: dict[str, Any] = {**vars(item), "passage": passage}
            yield Seed(**{name: text and sound(text) for name, text in texts.items()})

    def _tables(self) -> Callable[[], Iterator[Seed | LeftOut]]:
        files = records.data_files(self.path, "seeds", self._settings.split)
        readers = []
        for file in files:
            first = next(records.raw_rows(file, "seeds"), None)
            if first is not None:
                readers.append((file, self._reader(file, first)))

        def read() -> Iterator[Seed | LeftOut]:
            for file, seeds_of in readers:
                split = records.split_of(file)
                for number, row in enumerate(records.raw_rows(file, "seeds"), start=1):
                    for item in seeds_of(row, number):
                        if isinstance(item, Seed):
                            item = replace(item, split=item.split or split)
                            if self._settings.split not in (None, item.split):
                                item = f"not of split {self._settings.split}"
                        yield item

        return read

    def _reader(self, file: Path, first: Mapping[str, Any]) -> RowReader:
        """What makes seeds of a file's rows, whose first one has all columns."""
        layout = self._settings.format
        if layout == "table":
            columns = records.mapping(first, Seed, file, "seeds", self._settings.columns)
            return lambda row, number: _table(row, columns)
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
                raise InputError(f"seeds={file}: row {number} is not as {layout} is published ({error!r})") from error

        return seeds_of


RowReader = Callable[[Mapping[str, Any], int], Iterator[Seed | LeftOut]]
"""Makes seeds of a row, given its number in its file from 1."""


class _Pool:
    """The distinct passages whose hashes are smallest: the same sample whatever their order, in bounded memory."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._largest: list[tuple[int, int, str]] = []  # (minus the hash, minus its place, passage): a heap
        self._hashes: set[int] = set()
        self._added = 0

    def add(self, passage: str) -> None:
        digest = int.from_bytes(hashlib.blake2b(passage.encode(), digest_size=8).digest(), "big")
        self._added += 1
        if digest in self._hashes:
            return
        entry = (-digest, -self._added, passage)
        if len(self._largest) < self._size:
            heapq.heappush(self._largest, entry)
        elif digest < -self._largest[0][0]:
            self._hashes.discard(-heapq.heapreplace(self._largest, entry)[0])
        else:
            return
        self._hashes.add(digest)

    def passages(self) -> tuple[str, ...]:
        """In the order in which they were added first."""
        return tuple(passage for _, _, passage in sorted(self._largest, key=lambda entry: -entry[1]))


def _cut(text: str, words: int) -> str:
    """The text up to its N-th word, white space as it was."""
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
    """MS MARCO v2.1: a query, about ten passages, and which of them people selected; a seed for each selected one."""
    passages = row["passages"]
    selected = [place for place, chosen in enumerate(passages["is_selected"]) if chosen]
    for place in selected:
        text = passages["passage_text"][place]
        yield Seed(f"{row['query_id']}-{place}", row["query"] or "", text or "", "msmarco", topic=row.get("query_type"))
    if not selected:
        yield "a query without a selected passage"


_LANGUAGES = {"java": "Java", "c++": "C++", "python": "Python", "javascript": "JavaScript"}


def _leetcode(row: Mapping[str, Any], _: str) -> Iterator[Seed | LeftOut]:
    """LeetCode: a problem and a solution in each of some languages; a seed for each solution (appendix B.2)."""
    for column, language in _LANGUAGES.items():
        if (row.get(column) or "").strip():
            key = f"{row['id']}-{column}"
            yield Seed(
                key, row["content"] or "", row[column], "leetcode", topic=row.get("difficulty"), language=language
            )
        else:
            yield f"a problem without a {language} solution"


def _metamath(row: Mapping[str, Any], place: str) -> Iterator[Seed]:
    """MetaMathQA: a problem and its worked solution (appendix B.2); rows have no id of their own."""
    yield Seed(place, row["query"] or "", row["response"] or "", "metamath", topic=row.get("type"))


_PUBLISHED: Mapping[str, tuple[tuple[str, ...], Callable[[Mapping[str, Any], str], Iterator[Seed | LeftOut]]]] = {
    "msmarco": (("query_id", "query", "passages"), _msmarco),
    "leetcode": (("id", "content", "python"), _leetcode),
    "metamath": (("query", "response"), _metamath),
}
"""Format -> the columns it needs, and what makes seeds of a row (given a name for it, too)."""


def _robust04(directory: Path) -> Callable[[], Iterator[Seed | LeftOut]]:
    """TREC Robust 2004: a seed for each topic's title and each document judged relevant to it.

    Args:
        directory: holds one file with `topics` or `testset` in its name, one with `qrels`, and, in directories below,
            the documents of TREC disks 4 and 5 in SGML, plain or .gz.
    """
    if not directory.is_dir():
        raise InputError(f"seeds={directory}: format=robust04 is a directory of topics, qrels and documents; give that")
    topics_file, qrels_file = _only(directory, "topics", "testset"), _only(directory, "qrels")
    titles = _topics(topics_file)
    wanted: dict[str, list[str]] = defaultdict(list)
    for number, line in enumerate(_lines(qrels_file), start=1):
        judged = line.split()
        if not judged:
            continue
        if len(judged) != 4 or not judged[3].lstrip("-").isdigit():
            raise InputError(f"seeds={qrels_file}: line {number} is no judgement; write `topic 0 document relevance`")
        if int(judged[3]) > 0:
            if judged[0] not in titles:
                raise InputError(f"seeds={qrels_file}: line {number}: topic {judged[0]} is not in {topics_file.name}")
            wanted[judged[2]].append(judged[0])
    files = [
        file
        for file in sorted(directory.rglob("*"))
        if file.is_file() and not records.hidden(file.relative_to(directory)) and file not in (topics_file, qrels_file)
    ]
    for file in files:
        if re.fullmatch(r"\.\d?z", file.suffix.lower()):
            raise InputError(f"seeds={file}: compressed as on the TREC disks; uncompress it (gzip -d)")

    def read() -> Iterator[Seed | LeftOut]:
        found: set[str] = set()
        for file in files:
            for name, text in _documents(file):
                for topic in wanted.get(name, ()):
                    yield Seed(f"{topic}-{name}", titles[topic], text, "robust04", topic=topic)
                found |= {name} & wanted.keys()
        yield from ("a relevant document that is not in the directory" for _ in range(len(wanted) - len(found)))

    return read


def _only(directory: Path, *names: str) -> Path:
    """The one file at the top of a directory that has one of some words in its name."""
    found = [f for f in sorted(directory.iterdir()) if f.is_file() and any(name in f.name.lower() for name in names)]
    if len(found) != 1:
        raise InputError(
            f"seeds={directory}: has {len(found)} files with {' or '.join(names)} in their name; format=robust04 takes one"
        )
    return found[0]


def _topics(file: Path) -> dict[str, str]:
    """Number -> title of TREC topics, whose fields have no end tags."""
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
    """(DOCNO, headline and text) of the documents of an SGML file."""
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
    known = _COMMENT.sub(" ", markup).replace("&blank;", " ").replace("&hyph;", "-")  # not what HTML means by them
    parts = (_TAG.sub(" ", part) for _, part in _READ.findall(known))
    return "\n".join(" ".join(_ENTITY.sub(" ", html.unescape(part)).split()) for part in parts).strip()


def _lines(file: Path) -> Iterator[str]:
    stream: TextIO
    with gzip.open(file, "rt", encoding="latin-1") if file.suffix == ".gz" else file.open(encoding="latin-1") as stream:
        yield from stream
