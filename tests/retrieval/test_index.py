import json
import re
import shutil
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from infembed_ray.config.retrieval import IndexSettings
from infembed_ray.errors import InputError
from infembed_ray.evaluation.tasks import catalogue
from infembed_ray.evaluation.tasks.corpus import name_of
from infembed_ray.records.files import BAD_ROWS_FILE, raw_rows
from infembed_ray.records.tables import Passage
from infembed_ray.retrieval import build
from infembed_ray.retrieval.index import Index
from infembed_ray.retrieval.updates.write_ahead_log import Delete
from infembed_ray.retrieval.versions import IndexFacts, change_log, warn_of_changes
from infembed_ray.storage.object_store import SCRATCH, Folder
from infembed_ray.storage.places import open_binary, read_text
from infembed_ray.storage.steps import LATEST, MANIFEST, Step, read_manifest
from tests.records.test_files import COMPRESS, FORMS
from tests.retrieval.vectors import unit_vectors
from tests.support.shards import write_shard


def write_index(
    root: Path, vectors: np.ndarray, shards: int, encoder: str = "aaaa", lineage: str = "v1", folded: int = 0
) -> Path:
    """An index over passages p0, p1, ...; row i goes to shard i mod shards."""
    root.mkdir(parents=True)
    facts = []
    for shard in range(shards):
        rows = range(shard, len(vectors), shards)
        ids, texts = [f"p{r}" for r in rows], [f"text {r}" for r in rows]
        facts.append(write_shard(root / f"shard-{shard:05d}", ids, texts, vectors[list(rows)]))
    index = IndexFacts(
        encoder=encoder,
        model="some/model",
        template="instruction_first",
        dimension=vectors.shape[1],
        passages=len(vectors),
        shards=facts,
        lineage=lineage,
        folded=folded,
    )
    manifest = {"stage": "index", "identity": root.name, "created": f"2026-01-01T00:00:{folded:02d}+00:00"}
    (root / MANIFEST).write_text(json.dumps({**manifest, "index": index.as_json()}))
    return root


@settings(deadline=None, max_examples=12)
@given(n=st.integers(1, 60), d=st.integers(2, 16), shards=st.integers(1, 5), k=st.integers(1, 70), seed=st.integers(0))
def test_search_over_any_number_of_shards_is_exact(
    tmp_path_factory: pytest.TempPathFactory, n: int, d: int, shards: int, k: int, seed: int
) -> None:
    vectors, queries = unit_vectors(n, d, seed % 2**32), unit_vectors(3, d, (seed + 1) % 2**32)
    index = Index.open(write_index(tmp_path_factory.mktemp("index") / "v1", vectors, shards))
    exact = queries.astype(np.float64) @ vectors.astype(np.float64).T
    for row, hits in enumerate(index.search(queries, k)):
        assert len(hits) == min(k, n)
        scores = [hit.score for hit in hits]
        np.testing.assert_allclose(scores, np.sort(exact[row])[::-1][:k], atol=1e-5)
        assert [(h.score, h.id) for h in hits] == sorted(((h.score, h.id) for h in hits), reverse=True)
        for hit in hits:
            assert hit.text == f"text {hit.id[1:]}"
            np.testing.assert_allclose(hit.score, exact[row, int(hit.id[1:])], atol=1e-5)


def test_facts_round_trip_through_the_manifest(tmp_path: Path) -> None:
    root = write_index(tmp_path / "v1", unit_vectors(10, 4), 3)
    manifest = json.loads((root / MANIFEST).read_text())["index"]
    facts = IndexFacts.read(root)
    assert facts.as_json() == manifest
    assert manifest["recall_at_10"] == 1.0
    assert manifest["bytes"] == sum(file.stat().st_size for file in root.glob("shard-*/*"))
    assert [shard["factory"] for shard in manifest["shards"]] == ["Flat"] * 3


def test_an_index_of_another_format_is_refused_with_the_remedy(tmp_path: Path) -> None:
    root = write_index(tmp_path / "v1", unit_vectors(10, 4), 1)
    manifest = json.loads((root / MANIFEST).read_text())
    for written in (None, 2, 4):
        changed = {**manifest["index"], "format": written}
        (root / MANIFEST).write_text(json.dumps({**manifest, "index": changed}))
        with pytest.raises(InputError, match=f"an index of format {written}, .*; build it again"):
            Index.open(root)


def test_an_index_built_by_another_encoder_is_refused_naming_both(tmp_path: Path) -> None:
    path = write_index(tmp_path / "v1", unit_vectors(10, 4), 1, encoder="aaaa")
    Index.open(path, "aaaa")
    with pytest.raises(InputError, match=r"built by another encoder \(aaaa, some/model\) than the one given \(bbbb\)"):
        Index.open(path, "bbbb")


def test_a_directory_without_an_index_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"index=.*nowhere: no such file or directory"):
        Index.open(tmp_path / "nowhere")
    with pytest.raises(InputError, match="not a published output"):
        Index.open(tmp_path)
    (tmp_path / MANIFEST).write_text(json.dumps({"stage": "train", "identity": "x"}))
    with pytest.raises(InputError, match="the output of `train`"):
        Index.open(tmp_path)


PASSAGES = [
    "Espresso machines: what they cost, from 100 to 3000 euros.",
    "Mountain glaciers: their history since the ice age.",
    "Tax returns: common mistakes, and how to avoid them.",
    "Sourdough bread: a beginner's guide.",
    "Espresso machines: a beginner's guide.",
]


@pytest.fixture(scope="module")
def encoder(minilm: str) -> Any:
    from infembed_ray.modeling.encoder import InstructionEncoder

    return InstructionEncoder.from_pretrained(minilm)


@pytest.mark.integration
def test_an_encoder_whose_weights_changed_has_to_be_saved_first(minilm: str, tmp_path: Path) -> None:
    import torch

    from infembed_ray.modeling.encoder import InstructionEncoder

    encoder = InstructionEncoder.from_pretrained(minilm)
    encoder.train().eval().requires_grad_(False).half().float()
    assert not encoder.changed
    with torch.no_grad():
        next(encoder.parameters()).add_(0.01)
    with pytest.raises(InputError, match="encoder: its weights are in no file; save it with save_pretrained"):
        Index.build(PASSAGES, encoder)
    encoder.save_pretrained(str(tmp_path))
    saved = InstructionEncoder.from_pretrained(str(tmp_path))
    (hits,) = Index.build(PASSAGES, saved).search(encoder.encode_queries("coffee"), k=1)
    assert hits[0].score == pytest.approx(
        float((encoder.encode_passages(PASSAGES) @ encoder.encode_queries("coffee")).max()), abs=5e-4
    )
    dict(encoder.backbone.named_parameters())["encoder.layer.0.output.dense.weight"].data.fill_(3e38)  # overflows
    encoder.save_pretrained(str(tmp_path / "broken"))
    broken = InstructionEncoder.from_pretrained(str(tmp_path / "broken"))
    with pytest.raises(InputError, match=r"^model=.*broken: its embedding of passage \d is not finite; .* another"):
        Index.build(PASSAGES, broken)


@pytest.mark.integration
@pytest.mark.parametrize("shards", [1, 3])
def test_an_index_of_texts_finds_what_brute_force_finds(encoder: Any, shards: int) -> None:
    index = Index.build(PASSAGES, encoder, shards=shards)
    queries = encoder.encode_queries(["coffee", "ice"], ["Only prices.", "Only what is new to a beginner."])
    exact = encoder.encode_passages(PASSAGES).astype(np.float16).astype(np.float64) @ queries.astype(np.float64).T
    for row, hits in enumerate(index.search(queries)):
        order = np.argsort(-exact[:, row])
        assert [hit.id for hit in hits] == [str(number) for number in order]
        assert [hit.text for hit in hits] == [PASSAGES[number] for number in order]
        np.testing.assert_allclose([hit.score for hit in hits], exact[order, row], atol=1e-4)
    assert index.search(queries[0], k=2) == [index.search(queries)[0][:2]]
    as_served = type(encoder).from_pretrained(index.facts.model, dimensions=index.facts.dimensions)
    Index.open(index.path, as_served.fingerprint())

    scratch = index.path.parent
    del index
    assert not scratch.exists()


@pytest.mark.integration
def test_one_corpus_in_every_form_gives_one_index_and_the_texts_that_are_evaluated(
    encoder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SCRATCH, str(tmp_path / "scratch"))
    rows = [
        {"_id": str(n), "title": f"T{n}"[: 2 * (n % 2)], "text": f"{text} é 日本"} for n, text in enumerate(PASSAGES)
    ]
    forms = [tmp_path / f"corpus{suffix}" for suffix in (*FORMS, ".jsonl.gz", ".tsv.zst", ".csv.bz2")]
    for file in forms:
        codec = next((codec for codec in COMPRESS if codec and file.name.endswith(codec)), "")
        file.write_bytes(COMPRESS[codec](FORMS[file.name.removeprefix("corpus").removesuffix(codec)](rows)))
    (tmp_path / "nested.jsonl").write_bytes(
        FORMS[".jsonl"]([{"id": int(row["_id"]), "text": {"title": row["title"], "text": row["text"]}} for row in rows])
    )
    Dataset.from_list(rows).save_to_disk(tmp_path / "saved", num_shards=2)
    (tmp_path / "queries.jsonl").write_text('{"_id": "q", "text": "coffee"}')
    (tmp_path / "qrels").mkdir()
    (tmp_path / "qrels" / "test.tsv").write_text("\ufeffquery-id\tcorpus-id\tscore\r\nq\t1\t1\r\n", encoding="utf-8")
    built, evaluated = set(), set()
    for corpus in [*forms, tmp_path / "nested.jsonl", tmp_path / "saved", tmp_path / "saved" / "*.arrow"]:
        index = Index.build(corpus, encoder)
        built.add(json.dumps(index.facts.as_json()["shards"]))
        assert (index.facts.title, index.shards[0].passages.column("text")[1].as_py()) == (
            "title",
            f"T1 {rows[1]['text']}",
        )
        if corpus in forms:
            beir = tmp_path / f"beir-{corpus.name}"
            (beir / "qrels").mkdir(parents=True)
            for name in (corpus.name, "queries.jsonl", "qrels/test.tsv"):
                shutil.copy(tmp_path / name, beir / name)
            task = catalogue.load(str(beir))
            evaluated.add(name_of(task.corpus))
            assert task.corpus["text"].to_pylist() == index.shards[0].passages.column("text").to_pylist()
    assert (len(built), len(evaluated)) == (1, 1)
    without = Index.build(forms[0], encoder, columns={"title": ""})
    assert (without.facts.title, without.shards[0].passages.column("text")[1].as_py()) == (None, rows[1]["text"])


@pytest.mark.integration
def test_bad_rows_stop_a_build_or_are_written_beside_the_index(encoder: Any, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"id": str(n), "text": text} for n, text in enumerate(PASSAGES)]
    rows += [
        {"id": "a", "text": " "},
        {"id": "b", "text": ["x"]},
        {"text": "x"},
        {"id": "c", "text": "x", "year": "soon"},
    ]
    with pytest.raises(InputError, match=r"row 6: column text.*row 7: .*row 8: column id.*row 9: .*4 bad rows"):
        Index.build(rows, encoder, tmp_path, metadata={"year": "integer"})
    index = Index.build(rows, encoder, tmp_path, metadata={"year": "integer"}, on_bad_row="reject")
    assert index.facts.passages == len(PASSAGES)
    assert [row["where"] for row in raw_rows(index.path / BAD_ROWS_FILE, "")] == [f"row {n}" for n in (6, 7, 8, 9)]


@pytest.mark.integration
def test_rows_have_metadata_and_the_same_rows_are_not_indexed_again(
    encoder: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"id": f"p{n}", "text": text, "day": date(2024, 1, n + 1)} for n, text in enumerate(PASSAGES)]
    index = Index.build(rows, encoder, tmp_path, metadata={"day": "date"})
    (hits,) = index.search(encoder.encode_queries("coffee"), filter={"day": {"gte": "2024-01-03"}})
    assert {hit.id: hit.metadata["day"] for hit in hits} == {f"p{n}": f"2024-01-0{n + 1}" for n in (2, 3, 4)}
    assert "encode: 5/5" in capsys.readouterr().out

    file = tmp_path / "corpus.jsonl"
    file.write_text("".join(json.dumps(row, default=str) + "\n" for row in rows))
    assert Index.build(file, encoder, tmp_path, metadata={"day": "date"}).version == index.version
    assert capsys.readouterr().out == ""
    as_passages = [Passage(f"p{n}", text) for n, text in enumerate(PASSAGES)]
    other = Index.build(as_passages, encoder, tmp_path)
    assert (other.version != index.version, other.facts.passages) == (True, len(PASSAGES))
    assert Index.open(tmp_path).version == other.version

    words = Index.build(as_passages, encoder, tmp_path, lexical=True)
    assert (words.version != other.version, words.facts.lexical, other.facts.lexical) == (True, True, False)
    assert "0 of 5 passages were encoded" in capsys.readouterr().out  # their vectors are reused
    assert words.shards[0].lexical is not None

    index.path.joinpath("shard-00000", "index.faiss").write_bytes(b"damaged")
    again = Index.build(rows, encoder, tmp_path, metadata={"day": "date"})
    assert again.version == index.version
    assert again.search(encoder.encode_queries("ice"))[0][0].id == "p1"


def interrupted_after_two_blocks(monkeypatch: pytest.MonkeyPatch, blocks: int = 2) -> list[int]:
    """Interrupt builds before the third block; returns the first rows of the encoded ones. Clear it to go on."""
    encoded: list[int] = []
    encode_block = build.encode_block

    def up_to_two(*arguments: Any) -> int:
        if len(encoded) == blocks:
            raise KeyboardInterrupt
        encoded.append(arguments[2].start)
        return encode_block(*arguments)

    monkeypatch.setattr(build, "encode_block", up_to_two)
    return encoded


def files_of(index: Index) -> dict[str, bytes]:
    root = index.path
    if isinstance(root, Path):
        return {str(file.relative_to(root)): file.read_bytes() for file in root.glob("shard-*/*")}
    files = {name: open_binary(root / name).read() for name in root.entries() if name != MANIFEST}
    return {re.sub("-[0-9a-f]{8}/", "/", name): content for name, content in files.items()}


@pytest.mark.integration
def test_an_index_in_an_object_store_has_the_same_bytes_and_resumes(
    encoder: Any, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SCRATCH, str(tmp_path / "scratch"))
    monkeypatch.setattr(build, "BLOCK_PASSAGES", 2)
    rows = [{"id": f"p{n}", "text": text, "day": date(2024, 1, n + 1)} for n, text in enumerate(PASSAGES)]
    local = Index.build(rows, encoder, tmp_path / "local", metadata={"day": "date"}, shards=2, factory="IVF1,SQ8")
    given: dict[str, Any] = {"metadata": {"day": "date"}, "shards": 2, "factory": "IVF1,SQ8"}
    encoded = interrupted_after_two_blocks(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        Index.build(rows, encoder, f"{bucket}/built", **given)
    folder = Folder.open(f"{bucket}/built", "output")
    assert read_text(folder / LATEST) is None
    encoded.clear()
    stored = Index.build(rows, encoder, f"{bucket}/built", **given)
    assert len(encoded) == 1
    assert files_of(stored) == files_of(local)
    assert stored.version == local.version
    assert [name for name in folder.entries() if "encoded" in name] == []
    assert Index.build(rows, encoder, f"{bucket}/built", **given).version == stored.version  # encodes nothing
    queries = encoder.encode_queries(["coffee", "ice"])
    assert stored.search(queries) == local.search(queries) == Index.open(f"{bucket}/built").search(queries)
    change_log(stored.path, stored.facts).append([Delete("p1")])
    assert "p1" not in {hit.id for hit in stored.search(queries[0])[0]}


def scores_of(index: Index, queries: np.ndarray) -> list[dict[str, float]]:
    return [{hit.id: hit.score for hit in hits} for hits in index.search(queries, 100)]


@pytest.mark.integration
@pytest.mark.parametrize("store", [False, True])
def test_a_build_encodes_what_is_new_and_answers_as_a_full_one(
    encoder: Any,
    bucket: str,
    tmp_path: Path,
    store: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(SCRATCH, str(tmp_path / "scratch"))
    monkeypatch.setattr(build, "BLOCK_PASSAGES", 2)
    output = f"{bucket}/nightly" if store else str(tmp_path / "nightly")
    before = {f"p{n}": text for n, text in enumerate([*PASSAGES, *(f"{text} Again." for text in PASSAGES)])}
    after = before | {"p1": "Glaciers melt.", "p3": "Rye bread.", "p9": "New.", "q": PASSAGES[2]}
    del after["p4"]
    first = Index.build([Passage(*row) for row in before.items()], encoder, output, shards=2)
    assert read_manifest(first.path, "index")["counts"] == {"passages": 10, "encoded": 10, "shards": 2}
    given = [Passage(*row) for row in after.items()]
    with monkeypatch.context() as patch:
        encoded = interrupted_after_two_blocks(patch)
        with pytest.raises(KeyboardInterrupt):
            Index.build(given, encoder, output, shards=2)
    with monkeypatch.context() as patch:
        encoded = interrupted_after_two_blocks(patch, 9)
        second = Index.build(given, encoder, output, shards=2)
        assert 0 < len(encoded) <= 4
    assert "index: 4 of 10 passages were encoded" in capsys.readouterr().out
    assert read_manifest(second.path, "index")["counts"] == {"passages": 10, "encoded": 4, "shards": 2}
    full = Index.build(given, encoder, tmp_path / "full", shards=2)
    queries = encoder.encode_queries(["coffee", "bread", "What is new?"])
    for ours, theirs in zip(scores_of(second, queries), scores_of(full, queries), strict=True):
        assert list(ours) == list(theirs)
        assert ours == pytest.approx(theirs, abs=1e-4)
    if store:
        return
    reshaped = Index.build(given, encoder, output, shards=3)
    assert read_manifest(reshaped.path, "index")["counts"]["encoded"] == 0
    assert scores_of(reshaped, queries) == scores_of(second, queries)
    single = Index.build(given, encoder, output, shards=3, vectors="float32")  # not from rounded ones
    assert read_manifest(single.path, "index")["counts"]["encoded"] == 10
    assert single.shards[0].precision == "float32"


@pytest.mark.integration
def test_a_corpus_or_vectors_that_do_not_fit_are_refused(encoder: Any, tmp_path: Path) -> None:
    def refuse(message: str, corpus: Any, **settings: Any) -> None:
        with pytest.raises(InputError, match=message) as refusal:
            Index.build(corpus, encoder, tmp_path, **settings)
        assert "\n" not in str(refusal.value)
        assert not (tmp_path / LATEST).exists()

    refuse("row 2: column text is empty", ["a text", " "])
    refuse("several rows have the id a", [Passage("a", "x"), Passage("b", "y"), Passage("a", "z")])
    refuse("shards=0: Input should be greater than or equal to 1", PASSAGES, shards=0)
    refuse("corpus=nowhere.jsonl: no such file", "nowhere.jsonl")
    with pytest.raises(InputError, match=r"^encoder: its weights are in no file; save it"):
        Index.build(PASSAGES, type(encoder)(encoder.backbone, encoder.tokenizer, encoder.pooling, encoder.text))
    index = Index.build(PASSAGES, encoder)
    with pytest.raises(InputError, match=r"vectors: shape \(1, 3\), and the index has 384 dimensions"):
        index.search(np.ones(3))


def test_a_build_warns_of_changes_it_will_not_have(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "index"
    settings = IndexSettings(corpus="another", model="model", output=str(output))
    step = Step("index", settings, str(output), {}, {"corpus": "another"})
    warn_of_changes(step)
    step.root.mkdir(exist_ok=True)
    first = write_index(output / "v1", unit_vectors(10, 4), 1)
    (output / LATEST).write_text("v1\n")
    warn_of_changes(step)
    assert capsys.readouterr().out == ""
    index = Index.open(first)
    change_log(index.path, index.facts).append([Delete("p1")])
    warn_of_changes(step)
    assert "index: v1 has 1 segment of changes made through the API" in capsys.readouterr().out
