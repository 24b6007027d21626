"""`infembed mine` on a Ray cluster: any number of actors, an interruption, and what is refused before Ray starts."""

import shutil
from pathlib import Path

import pytest

from infembed_ray.config.mining import MineSettings
from infembed_ray.errors import InputError
from infembed_ray.mining import distributed
from infembed_ray.mining.miner import Miner, known_positives
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.records import tuples
from infembed_ray.records.tuples import Example
from infembed_ray.retrieval.index import Index
from infembed_ray.retrieval.updates.write_ahead_log import Delete
from infembed_ray.retrieval.versions import change_log
from infembed_ray.storage.steps import STATES
from tests.mining.test_miner import PASSAGES
from tests.support.files import write_jsonl


@pytest.fixture(scope="module")
def settings(minilm, tmp_path_factory):
    root = tmp_path_factory.mktemp("mine")
    encoder = InstructionEncoder.from_pretrained(minilm)
    index = Index.build(PASSAGES, encoder, root / "index", factory="Flat", vectors="float32")
    rows = [{"query": passage[12:40], "positives": [passage]} for passage in PASSAGES]
    file = write_jsonl(root / "tuples.jsonl", rows)
    return MineSettings(records=str(file), index=str(index.path), output=str(root / "out"), negatives=40)


@pytest.mark.slow
def test_any_number_of_actors_and_an_interruption_give_the_same(ray_cluster, settings, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(distributed, "ROWS_PER_BLOCK", 7)
    rows = [Example(f"row-{n + 1}", p[12:40], (p,)) for n, p in enumerate(PASSAGES)]
    alone = Miner(settings, settings.index, None, "cpu").mine(rows, known_positives(lambda: rows))
    published = distributed.run(settings)
    assert list(tuples.stream(published.path, "records")) == alone.rows
    short = sum(len(row.negatives) < 40 for row in alone.rows)
    assert short
    assert published.manifest["counts"] == {
        "tuples": 40, "mined": alone.mined, "too_similar": alone.too_similar, "short": short,
    }  # fmt: skip
    assert not (published.path / STATES).exists()
    assert f"mine: {alone.mined:,} negatives for 40 tuples" in capsys.readouterr().out

    two = settings.model_copy(update={"workers": 2, "output": str(tmp_path)})
    with monkeypatch.context() as patch:
        patch.setattr(distributed, "_join", lambda *_: 1 / 0)  # interrupted when all blocks are done
        with pytest.raises(ZeroDivisionError):
            distributed.run(two)
    (parts,) = tmp_path.glob(f".*.partial/{STATES}")
    (parts / "part-000003.parquet").unlink()
    kept = {file.name: file.stat().st_mtime_ns for file in parts.glob("part-*")}
    with monkeypatch.context() as patch:
        patch.setattr(distributed.shutil, "rmtree", lambda path, **_: None)
        again = distributed.run(two)
    after = {file.name: file.stat().st_mtime_ns for file in (again.path / STATES).glob("part-*")}
    assert len(kept) == 5
    assert {name: after[name] for name in kept} == kept  # only the lost block was mined again
    assert list(tuples.stream(again.path, "records")) == alone.rows
    assert again.path.name == published.path.name
    assert not distributed.run(two).fresh


def test_the_check_says_what_would_be_mined(settings, tmp_path):
    lines = list(distributed.describe(settings.model_copy(update={"output": str(tmp_path / "new")})))
    assert f"tuples: 40 of {settings.records}" in lines
    assert any(line.startswith("index ") and "40 passages, model " in line for line in lines)
    assert "negatives: 40 of 200 passages per tuple, judged by the index's encoder" in lines
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"records": "/nope"}, "records=/nope: no such file"),
        ({"index": "/nope"}, "index=/nope: no such"),
        ({"teacher": "bm25"}, "teacher=bm25: ranks whole tasks; give an encoder or a reranker"),
        ({"teacher": {"kind": "run", "model": __file__}}, "teacher=run: ranks whole tasks"),
        ({"teacher": "no-such-baseline"}, "teacher=no-such-baseline: no such baseline"),
        ({"teacher": "/no/model"}, "teacher.model=/no/model: no such model directory"),
    ],
)
def test_inputs_that_cannot_be_used_are_refused(settings, changes, message):
    with pytest.raises(InputError) as refused:
        distributed.prepare(settings.model_copy(update=changes))
    assert message in str(refused.value)


def test_changes_of_the_index_count_as_another_input(settings, tmp_path):
    shutil.copytree(Path(settings.index).parent, tmp_path / "index")
    changed = settings.model_copy(update={"index": str(tmp_path / "index" / Path(settings.index).name)})
    assert distributed.prepare(changed)[1].identity == distributed.prepare(settings)[1].identity
    index = Index.describe(changed.index)
    change_log(index.path, index.facts).append([Delete("0")])
    assert distributed.prepare(changed)[1].identity != distributed.prepare(settings)[1].identity
