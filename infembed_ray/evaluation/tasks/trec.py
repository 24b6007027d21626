"""Collections in TREC's formats: files of documents and topics in SGML, and of judgements."""

from __future__ import annotations

import gzip
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from html import unescape

import pyarrow as pa

from infembed_ray.errors import InputError
from infembed_ray.evaluation.tasks.checks import judgements
from infembed_ray.evaluation.tasks.corpus import mapped
from infembed_ray.evaluation.tasks.task import Query, Task
from infembed_ray.storage.places import Place, errors_at, listing, open_binary, read_binary

PARTS = ("documents", "topics", "qrels")
"""Files of a collection, or folders of several: `documents.xml`, `documents/1.gz`, `topics.301-450`, `qrels.txt`."""
_GZIP = b"\x1f\x8b"
_BLOCK = 1 << 20
_TAG = re.compile(r"</?\w[^>]*>")


def parts(root: Place) -> dict[str, list[Place]]:
    """Return the files of each part that a directory has."""
    found: dict[str, list[Place]] = {}
    for name in sorted(listing(root)):
        part = name.split("/")[0].split(".")[0]
        if part in PARTS:
            found.setdefault(part, []).append(root / name)
    return found


def read(name: str, files: Mapping[str, Sequence[Place]]) -> Task:
    """Read a collection as a task without figures.

    - Documents: `<doc>` elements with a `<docno>`. The text is that of all other elements, with single spaces.
    - Topics: `<top>` elements with `<num>` and `<title>`, which is the query. The instruction is `<narr>`, if there is one.
      End tags may be missing. Topics without judgements are left out.
    - Judgements: see `read_qrels`.

    Raises:
        InputError: a part or an element is missing, or a file cannot be read.
    """
    if missing := [part for part in PARTS if part not in files]:
        raise InputError(f"tasks={name}: no file {missing[0]}.*, but topics; give {', '.join(PARTS)} in one directory")
    qrels = judgements(name, (row for file in files["qrels"] for row in read_qrels(file, f"tasks={name}: qrels")))
    topics = (_topic(name, file, content) for file in files["topics"] for content in _elements(file, "top"))
    return Task(
        name=name,
        corpus=mapped(
            name,
            files["documents"],
            lambda: (_document(name, file, text) for file in files["documents"] for text in _elements(file, "doc")),
        ),
        queries=tuple(query for query in topics if query.id in qrels),
        qrels=qrels,
        figures=(),
    )


def read_qrels(file: Place, name: str) -> Iterator[tuple[str, str, str]]:
    """Yield query, document and grade of TREC judgements (`query 0 document grade`) or BEIR's (with a header)."""
    for number, line in words(file, name):
        if number == 1 and len(line) == 3 and not line[2].lstrip("-").isdecimal():
            continue  # BEIR's header
        if len(line) not in (3, 4):
            raise InputError(f"{name}={file}: line {number} is not `query 0 document grade`; correct the line")
        yield line[0], line[-2], line[-1]


def words(file: Place, name: str) -> Iterator[tuple[int, list[str]]]:
    """Yield number and words of the lines of a text, perhaps compressed by gzip, that are not blank.

    Raises:
        InputError: the file cannot be read; `name` is the setting that gives it.
    """
    with errors_at(file, name):
        content = read_binary(file)
    try:
        text = (gzip.decompress(content) if content.startswith(_GZIP) else content).decode()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise InputError(f"{name}={file}: not readable ({error}); copy it again") from error
    for number, line in enumerate(text.split("\n"), start=1):
        if found := line.split():
            yield number, found


def _elements(file: Place, tag: str) -> Iterator[str]:
    """Yield the contents of the elements of a file, perhaps compressed by gzip, in bounded memory."""
    start, end = (re.compile(f"<{slash}{tag}>", re.IGNORECASE) for slash in ("", "/"))
    with open_binary(file) as source:
        stream = pa.CompressedInputStream(source, "gzip") if file.suffix == ".gz" else source
        text, rest = io.TextIOWrapper(pa.BufferedInputStream(stream, _BLOCK), "utf-8", errors="replace"), ""
        while block := text.read(_BLOCK):
            *whole, rest = end.split(rest + block)
            yield from (start.split(element, 1)[-1] for element in whole)


def _document(task: str, file: Place, content: str) -> tuple[str, str]:
    found = re.search(r"<docno>(.*?)</docno>", content, re.IGNORECASE | re.DOTALL)
    if found is None:
        raise InputError(f"tasks={task}: {file}: a document has no <docno> ({content.strip()!r:.60}); give it one")
    return found[1].strip(), _plain(content.replace(found[0], " ", 1))


def _topic(task: str, file: Place, content: str) -> Query:
    _, *fields = re.split(r"<(\w+)>", content)
    texts = {tag.lower(): _plain(text) for tag, text in zip(fields[::2], fields[1::2], strict=True)}
    number = texts.get("num", "").removeprefix("Number:").strip()
    if not number or not texts.get("title"):
        raise InputError(f"tasks={task}: {file}: a topic has no <num> or <title> ({content.strip()!r:.60}); give both")
    narrative = texts.get("narr", "").removeprefix("Narrative:").strip()
    return Query(number, texts["title"].removeprefix("Topic:").strip(), narrative or None)


def _plain(content: str) -> str:
    """Return the text between tags, with single spaces."""
    return " ".join(unescape(_TAG.sub(" ", content)).split())
