import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infembed_ray.cli.main import main
from infembed_ray.config.retrieval import IndexSettings
from infembed_ray.errors import InputError
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.retrieval import build, distributed
from infembed_ray.retrieval.distributed import run
from infembed_ray.retrieval.index import Index
from infembed_ray.retrieval.shard_files import PASSAGES_FILE
from infembed_ray.retrieval.shards import shard_of
from infembed_ray.retrieval.updates.write_ahead_log import Delete, Put
from infembed_ray.retrieval.versions import change_log
from infembed_ray.storage.steps import Published, read_manifest, resolve
from tests.support.files import write_jsonl

TOPICS = ("espresso machines", "mountain glaciers", "tax returns", "sourdough bread", "satellite orbits")
ASPECTS = ("a beginner's guide", "common mistakes", "what it costs", "its history", "how experts do it", "the tools")
PASSAGES = {f"{t[:3]}-{n}": f"{t.capitalize()}: {a}." + f" {t}" * n for t in TOPICS for n, a in enumerate(ASPECTS)}


def write_corpus(path: Path, rows: Iterable[dict[str, Any]]) -> str:
    return str(write_jsonl(path, rows))


def rows_of(passages: dict[str, str]) -> list[dict[str, Any]]:
    return [{"id": i, "text": t, "words": len(t.split()), "topic": i[:3]} for i, t in passages.items()]


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory, minilm: str) -> IndexSettings:
    root = tmp_path_factory.mktemp("build")
    rows = rows_of(PASSAGES)
    return IndexSettings(
        corpus=write_corpus(root / "corpus.jsonl", ({"kind": row.pop("topic"), **row} for row in rows)),
        model=minilm,
        output=str(root / "index"),
        shards=3,
        metadata={"topic": "string", "words": "integer"},
        columns={"topic": "kind"},
        dimensions=128,
    )


@pytest.fixture(scope="module")
def made(settings: IndexSettings, ray_cluster: None) -> Published:
    """An index of an uninterrupted build."""
    return run(settings)


@pytest.mark.ray
def test_an_index_holds_every_passage_and_agrees_with_the_encoder(
    made: Published, settings: IndexSettings, ray_cluster: None
) -> None:
    assert made.fresh
    assert made.manifest["counts"] == {"passages": len(PASSAGES), "encoded": len(PASSAGES), "shards": 3}
    encoder = InstructionEncoder.from_pretrained(settings.model, dimensions=128)
    index = Index.open(made.path, encoder.fingerprint())
    assert (index.facts.dimension, index.facts.dimensions, index.facts.metadata) == (128, 128, settings.metadata)
    assert index.facts.lineage == index.version == made.path.name
    assert [s.passages for s in index.facts.shards] == [
        sum(shard_of(i, 3) == shard for i in PASSAGES) for shard in range(3)
    ]
    query = encoder.encode_queries(["how expensive is brewing coffee at home?"], ["For people new to it."])
    here = Index.build(rows_of(PASSAGES), encoder, shards=3, metadata={"topic": "string", "words": "integer"})
    for ours, theirs in zip(here.search(query, 40)[0], index.search(query, 40)[0], strict=True):
        assert (ours.id, ours.text, ours.metadata) == (theirs.id, theirs.text, theirs.metadata)
        assert ours.score == pytest.approx(theirs.score, abs=1e-4)
    facts = [
        [replace(s, checksums={PASSAGES_FILE: s.checksums[PASSAGES_FILE]}) for s in built.facts.shards]
        for built in (here, index)  # their vectors may differ by rounding
    ]
    assert facts[0] == facts[1]
    hits = index.search(query, len(PASSAGES))[0]
    assert {hit.id: hit.text for hit in hits} == PASSAGES
    assert all(hit.metadata == {"topic": hit.id[:3], "words": len(hit.text.split())} for hit in hits)
    assert hits[0].id.startswith("esp")
    assert {hit.id[:3] for hit in index.search(query, 3, {"topic": "tax"})[0]} == {"tax"}
    assert sorted(p.name for p in made.path.iterdir()) == ["manifest.json"] + [f"shard-0000{n}" for n in range(3)]
    assert [p.name for p in made.path.parent.glob(".*") if p.is_dir()] == []

    again = run(settings)
    assert not again.fresh
    assert again.path == made.path


def files_of(root: Path) -> dict[str, bytes]:
    """The content of an index."""
    return {str(file.relative_to(root)): file.read_bytes() for file in root.glob("shard-*/*")}


@pytest.mark.ray
def test_an_interrupted_or_failed_build_resumes_to_the_same_bytes(
    tmp_path: Path, made: Published, settings: IndexSettings, ray_cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "BLOCK_PASSAGES", 4)
    output = tmp_path / "index"
    settings = settings.model_copy(update={"output": str(output)})
    sent: list[str] = []
    from_items = distributed.ray.data.from_items

    def spied(items: list[dict[str, Any]], **options: Any) -> Any:
        sent.extend(build.Block(**item).name for item in items)
        return from_items(items, **options)

    monkeypatch.setattr(distributed.ray.data, "from_items", spied)

    def interrupted(**patches: Any) -> None:
        with monkeypatch.context() as patch:
            for name, value in patches.items():
                patch.setattr(build, name, value)
            with pytest.raises(KeyboardInterrupt):
                run(settings)
        assert not (output / "latest").exists()

    def lose_power(*_: Any) -> None:
        raise KeyboardInterrupt

    interrupted(sort_shards=lose_power)
    interrupted(encode_passages=lose_power)
    (room,) = output.glob(".*.encoded")

    def blocked(place: Path) -> None:
        """Fail because `place` cannot be written."""
        if place.name == build.ENCODED:
            place.touch()
        else:
            place.mkdir(parents=True)
        with pytest.raises(InputError, match=r"^output=\S+: cannot be written \(.+\); correct that and run") as refusal:
            run(settings)
        assert "\n" not in str(refusal.value)
        assert not (output / "latest").exists()
        place.unlink() if place.is_file() else place.rmdir()

    blocked(room / "shard-00000" / build.ENCODED)
    everything = set(sent)
    assert len(sent) == len(everything) >= 8
    encoded = {file.relative_to(room).as_posix() for file in room.glob("*/*/*.npy")}
    sent.clear()
    (partial,) = output.glob(".*.partial")
    blocked(partial / "shard-00002" / "vectors.npy")
    assert set(sent) == everything - encoded

    run_tasks = distributed.OnRay.run

    def up_to_the_first(self: distributed.OnRay, function: Any, calls: Any, *cpus: Any) -> Any:
        yield from run_tasks(self, function, calls[:1], *cpus)
        if calls:
            raise KeyboardInterrupt

    monkeypatch.setattr(distributed.ray.data, "from_items", None)  # no block is encoded again
    with monkeypatch.context() as patch:
        patch.setattr(distributed.OnRay, "run", up_to_the_first)
        interrupted()
    shutil.copytree(output, tmp_path / "other")
    (finished,) = output.glob(".*.partial/shard-00000/index.faiss")
    inode, written = finished.stat().st_ino, finished.stat().st_mtime_ns
    resumed = run(settings)
    now = (resumed.path / "shard-00000" / "index.faiss").stat()
    assert (now.st_ino, now.st_mtime_ns) == (inode, written)
    assert files_of(resumed.path) == files_of(made.path)
    assert resumed.manifest["index"] == made.manifest["index"]

    changes = {"output": str(tmp_path / "other"), "factory": "IVF2,SQ8"}
    retyped = run(settings.model_copy(update=changes))
    assert retyped.path.name != made.path.name
    assert retyped.manifest["index"]["shards"][0]["factory"] == "IVF2,SQ8"


@pytest.mark.ray
@pytest.mark.parametrize("setting", ["cpus_per_shard", "gpus_per_actor"])
def test_a_build_that_would_wait_without_end_is_refused_before_it_encodes(
    tmp_path: Path, settings: IndexSettings, ray_cluster: None, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributed.ray.data, "from_items", None)
    with pytest.raises(InputError, match=rf"^{setting}=1000.*: this machine has .* [CG]PU; lower it.* on a cluster"):
        run(settings.model_copy(update={"output": str(tmp_path / "index"), setting: 1000.0}))
    assert not (tmp_path / "index" / "latest").exists()


@pytest.mark.ray
def test_changes_are_compacted_into_the_next_version(
    tmp_path: Path, made: Published, settings: IndexSettings, ray_cluster: None, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "index"
    shutil.copytree(settings.output, output)
    command = ["index", "compact", f"index={output}"]
    assert main(command) == 0
    assert f"no changes since {made.path.name}" in capsys.readouterr().out
    assert resolve(output).name == made.path.name

    index = Index.open(output)
    gone, kept = sorted(PASSAGES)[:2]
    query = index.shards[shard_of(kept, 3)].vectors(slice(0, 1))
    changes = [Put("new", "a text", query[0], {"topic": "new", "words": 2}), Delete(gone)]
    change_log(index.path, index.facts).append(changes)
    expected = index.search(query, 100)[0]
    assert {hit.id for hit in expected} == {"new", *PASSAGES} - {gone}

    assert main(command) == 0
    compacted = Index.open(output)
    assert str(compacted.path) in capsys.readouterr().out.splitlines()[-1]
    assert (compacted.facts.folded, compacted.facts.passages) == (1, len(PASSAGES))
    assert compacted.facts.encoder == index.facts.encoder
    assert sorted(path.name for path in compacted.path.iterdir()) == sorted(path.name for path in made.path.iterdir())
    assert read_manifest(compacted.path, "index")["settings"]["recall_floor"] == settings.recall_floor
    hits = compacted.search(query, 100)[0]
    assert [(hit.id, hit.text, hit.metadata) for hit in hits] == [(h.id, h.text, h.metadata) for h in expected]
    assert main(command) == 0
    assert resolve(output) == compacted.path


@pytest.mark.integration
def test_bad_input_is_refused_before_any_work(tmp_path: Path, settings: IndexSettings, minilm: str) -> None:
    def refuse(message: str, **changes: Any) -> None:
        values = {"corpus": settings.corpus, "model": minilm, "output": str(tmp_path / "index"), **changes}
        with pytest.raises(InputError, match=message) as refusal:
            run(IndexSettings.from_mapping(values))
        assert "\n" not in str(refusal.value)
        assert list((tmp_path / "index").glob("[!.]*")) == []

    refuse("corpus=nowhere.jsonl: no such file", corpus="nowhere.jsonl")
    refuse("model=./nowhere: no such model directory", model="./nowhere")
    refuse("dimensions=385: embeddings of .* have 384; set 1 to 384", dimensions=385)
    refuse("factory=PQ8: makes a IndexPQ", factory="PQ8")
    refuse("memory_gib=1e-06: the smallest type, Flat, takes .* 1\d vectors of 384 dimensions", memory_gib=1e-6)
    refuse("metadata.id: this name is reserved", metadata={"id": "string"})
    refuse(r"row 1: column words must be a date as in 2024-05-31, not \d+", metadata={"words": "date"})
    refuse("no column text", corpus=write_corpus(tmp_path / "no_text.jsonl", [{"id": "a", "body": "x"}]))
    refuse("column text is empty", corpus=write_corpus(tmp_path / "blank.jsonl", [{"id": "a", "text": " "}]))
    refuse("empty, it has no rows", corpus=write_corpus(tmp_path / "empty.jsonl", []))
    damaged = tmp_path / "damaged"
    shutil.copytree(minilm, damaged)
    weights = next(damaged.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1000])
    refuse(r"model=\S+damaged: model.safetensors is damaged or truncated", model=str(damaged))
