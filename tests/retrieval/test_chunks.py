"""Cutting passages, and an index of chunks against brute force over the chunks of every passage."""

import pickle
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infembed_ray.config.retrieval import IndexSettings
from infembed_ray.errors import InputError
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.modeling.tokenizer import TextTokenizer
from infembed_ray.retrieval import build, versions
from infembed_ray.retrieval.build import prepare_engine
from infembed_ray.retrieval.chunks import Cutter, as_chunks
from infembed_ray.retrieval.index import Index
from infembed_ray.retrieval.shards import Hit
from infembed_ray.retrieval.updates.write_ahead_log import ChangeError, Delete, Put
from infembed_ray.retrieval.versions import change_log
from tests.modeling import backbones
from tests.retrieval.lineage import fold_all

PIECES = [
    "The dose is 3.5 mg.",
    " aspirin",
    "nurses",
    "\n",
    "\t ",
    "日本語の文です。",
    "🩺",
    "e\u0301",
    "x" * 150,
    "ﷺ",
    '"No!" ',
]
TEXTS = st.lists(st.sampled_from(PIECES), min_size=1, max_size=80).map("".join).filter(str.strip)
SENTENCES = [f"Sentence number {n} says that dose {n} is right for {'old ' * (n % 7)}nurses." for n in range(40)]


@pytest.fixture(scope="module", params=["minilm", "qwen2", "llama3"])
def tokenizer(request: pytest.FixtureRequest, minilm: str, tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    family = request.param
    path = minilm if family == "minilm" else backbones.write(family, tmp_path_factory.mktemp(family))
    return InstructionEncoder.from_pretrained(path, device="meta", passage_prefix="passage: ").texts


def spans_of(bounds: list[int]) -> list[tuple[int, int]]:
    return list(zip(bounds[::2], bounds[1::2], strict=True))


@pytest.mark.integration
@settings(deadline=None, max_examples=40)
@given(text=TEXTS, tokens=st.integers(32, 64), data=st.data())
def test_chunks_cover_a_passage_and_are_read_whole(
    tokenizer: TextTokenizer, text: str, tokens: int, data: st.DataObject
) -> None:
    cutter = Cutter(tokenizer, tokens, overlap := data.draw(st.integers(0, tokens // 2)))

    def lengths(texts: list[str]) -> list[int]:
        return [len(one) for one in tokenizer.tokenize([f"passage: {t}" for t in texts], "passage", 100_000)]

    bounds = cutter.cut(text)
    starts, ends = zip(*(spans := spans_of(bounds)), strict=True)
    assert (starts[0], ends[-1]) == (0, len(text))
    assert all(start <= end for start, end in zip(starts[1:], ends, strict=False))  # no character is lost
    assert list(starts) == sorted(set(starts))
    assert list(ends) == sorted(set(ends))
    assert all(start < end for start, end in spans)
    chunks = [chunk.text for chunk in as_chunks(text, bounds)]
    assert chunks == [text[start:end] for start, end in spans]
    assert max(lengths(chunks)) <= tokens
    assert (len(spans) == 1) == (lengths([text])[0] <= tokens)
    shared = [text[start:end] for start, end in zip(starts[1:], ends, strict=False) if start < end]
    none, of_a_character = lengths([""])[0], max(lengths([*"🩺ﷺ日x"]))  # a character can be several tokens
    assert not shared or max(lengths(shared)) - none <= overlap + of_a_character


@pytest.mark.integration
def test_chunks_end_after_sentences_and_begin_with_words(tokenizer: TextTokenizer) -> None:
    text = " ".join(SENTENCES)
    spans = spans_of((cutter := Cutter(tokenizer, 128, 16)).cut(text))
    assert spans_of(pickle.loads(pickle.dumps(cutter)).cut(text)) == spans
    assert len(spans) > 4
    for (_, end), (start, _) in pairwise(spans):
        assert text[:end].rstrip().endswith("nurses.")
        assert start < end
        assert text[start - 1].isspace() or text[start].isspace()


ROWS = [
    {
        "id": f"d{n}",
        "title": f"Leaflet {n}" if n % 3 else None,
        "text": " ".join(SENTENCES[n : n + n % 6 + 1]),
        "year": 2015 + n % 5,
    }
    for n in range(20)
]
CUT = {"chunk_tokens": 48, "chunk_overlap": 8}
QUERIES = ["dose 7 for nurses", "number 31", "what is right for old nurses"]


@pytest.fixture(scope="module")
def encoder(minilm: str) -> InstructionEncoder:
    return InstructionEncoder.from_pretrained(minilm)


def built(rows: list[dict[str, Any]], encoder: InstructionEncoder, output: Path, **more: Any) -> Index:
    given = {"metadata": {"year": "integer"}, "shards": 2, "vectors": "float32", "lexical": True, **CUT, **more}
    return Index.build(rows, encoder, output, **given)


def check(index: Index, encoder: InstructionEncoder, expected: dict[str, tuple[str, int]]) -> None:
    """Compare all searches with brute force; `expected` is id -> text and year."""
    queries = encoder.encode_queries(QUERIES)
    cutter = Cutter(encoder.texts, 48, 8)
    spans_of_all = {id: spans_of(cutter.cut(text)) for id, (text, _) in expected.items()}
    read = [expected[id][0][start:end] for id, spans in spans_of_all.items() for start, end in spans]
    scores_of_all = np.split(encoder.encode_passages(read) @ queries.T, np.cumsum([*map(len, spans_of_all.values())]))
    chunks = {id: (spans, scores) for (id, spans), scores in zip(spans_of_all.items(), scores_of_all, strict=False)}
    assert max(len(spans) for spans, _ in chunks.values()) > 2
    for k, since in ((3, None), (100, None), (5, 2018)):
        hits_of_all = index.search(queries, k, {"year": {"gte": since}} if since else None)
        for number, hits in enumerate(hits_of_all):
            best = {
                id: float(scores[:, number].max())
                for id, (_, scores) in chunks.items()
                if since is None or expected[id][1] >= since
            }
            assert len({hit.id for hit in hits}) == len(hits) == min(k, len(best))
            np.testing.assert_allclose([h.score for h in hits], sorted(best.values(), reverse=True)[:k], atol=1e-5)
            for hit in hits:
                assert hit.text == expected[hit.id][0]
                spans, scores = chunks[hit.id]
                assert hit.chunk is not None
                assert hit.chunk.text == hit.text[hit.chunk.start : hit.chunk.end]
                place = spans.index((hit.chunk.start, hit.chunk.end))
                np.testing.assert_allclose([hit.score, best[hit.id]], scores[place, number], atol=1e-5)


def whole(rows: list[dict[str, Any]]) -> dict[str, tuple[str, int]]:
    return {row["id"]: (f"{row['title'] or ''} {row['text']}".strip(), row["year"]) for row in rows}


@pytest.mark.integration
def test_an_index_of_chunks_equals_brute_force_through_builds_changes_and_compaction(
    encoder: InstructionEncoder, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "BLOCK_PASSAGES", 7)
    index = built(ROWS, encoder, tmp_path)
    check(index, encoder, state := whole(ROWS))
    assert (index.facts.passages, versions.verify(index.path)) == (20, index.facts.bytes)
    longer = [{**row, "text": f"{row['text']} And more."} if n % 4 == 0 else row for n, row in enumerate(ROWS)]
    newer = built(longer, encoder, tmp_path)
    assert "index: 5 of 20 passages were encoded; the vectors of the others" in capsys.readouterr().out
    check(newer, encoder, state := whole(longer))

    log, cutter = change_log(newer.path, newer.facts), Cutter(encoder.texts, 48, 8)
    texts = {"d3": " ".join(SENTENCES[20:26]), "d9": "Short now.", "new": " ".join(SENTENCES[5:14])}
    puts = []
    for id, text in texts.items():
        bounds = cutter.cut(text)
        vectors = encoder.encode_passages([chunk.text for chunk in as_chunks(text, bounds)])
        puts.append(Put(id, text, vectors, {"year": 2018}, bounds))
        state[id] = (text, 2018)
    log.append([*puts, Delete("d4"), Delete("d5")])
    del state["d4"], state["d5"]
    check(newer, encoder, state)
    with pytest.raises(ChangeError, match="cut it into chunks"):
        log.append([Put("d0", "whole", puts[0].vector[0])])
    fold_all(tmp_path)
    compacted = Index.open(tmp_path)
    assert compacted.facts.folded == 1
    check(compacted, encoder, state)
    for live in newer._live:
        for id in state:
            hit = live.get(id)
            assert hit is None or hit == Hit(id, 0.0, state[id][0], {"year": state[id][1]})


@pytest.mark.integration
@pytest.mark.parametrize("factory", ["HNSW32", "IVF4,SQ8"])
def test_approximate_types_answer_as_many_passages_as_are_asked_for(
    encoder: InstructionEncoder, tmp_path: Path, factory: str
) -> None:
    index = built(ROWS, encoder, tmp_path, factory=factory, shards=1)
    for hits in index.search(encoder.encode_queries(QUERIES), 20):
        assert {hit.id for hit in hits} == {row["id"] for row in ROWS}


def test_chunks_that_cannot_be_are_refused_before_work(minilm: str, tmp_path: Path) -> None:
    encoder = InstructionEncoder.from_pretrained(minilm)
    with pytest.raises(InputError, match="chunk_overlap=21: above half of chunk_tokens=40"):
        Index.build(["a"], encoder, tmp_path, chunk_tokens=40, chunk_overlap=21)
    with pytest.raises(
        InputError, match="chunk_tokens=257: the encoder reads 256 tokens of a passage; set at most 256"
    ):
        Index.build(["a"], encoder, tmp_path, chunk_tokens=257)
    prefixed = InstructionEncoder.from_pretrained(minilm, passage_prefix="word " * 20)
    fault = "chunk_tokens=32: passage_prefix and special tokens take 22 of them; set at least 44"
    with pytest.raises(InputError, match=fault):
        Index.build(["a"], prefixed, tmp_path, chunk_tokens=32)
    common = {"corpus": "c", "model": "m", "output": "milvus+http://127.0.0.1:1/a"}
    with pytest.raises(InputError, match="chunk_tokens=64: is for FAISS shards"):
        prepare_engine(IndexSettings(**common, chunk_tokens=64))
    without = IndexSettings(**common)
    assert not {"chunk_tokens", "chunk_overlap"} & without.identity().keys()
