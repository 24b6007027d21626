"""Sources of training data: what is read of a mix, in which order it trains, and what is refused."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from infembed_ray.config.training import TrainSettings
from infembed_ray.errors import InputError
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.records.files import BAD_ROWS_FILE, raw_rows
from infembed_ray.training import sources
from infembed_ray.training.dataset import Dataset
from infembed_ray.training.launch import run
from infembed_ray.training.observability.logs import read_metrics
from infembed_ray.training.sampler import Sampler
from tests.modeling import backbones
from tests.support.files import write_jsonl
from tests.training.test_collate import example, record
from tests.training.test_launch import assert_same_run


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    root = tmp_path_factory.mktemp("sources")
    plain = [{"question": f"plain {n}", "answers": [f"plain answer {n}"]} for n in range(12)]
    write_jsonl(root / "infir.jsonl", (vars(record(n)) for n in range(9)))
    write_jsonl(root / "plain.jsonl", plain)
    write_jsonl(root / "one.jsonl", [{"id": "a", "query_positive": "q"}])
    write_jsonl(root / "scored.jsonl", (vars(example(n, instruction=f"asked {n}")) for n in range(20)))
    return root


def mix(files, **changes):
    given = {
        "infir": {"path": str(files / "infir.jsonl")},
        "plain": {"path": str(files / "plain.jsonl"), "columns": {"query": "question", "positives": "answers"}},
        "scored": {"path": str(files / "scored.jsonl")},
    }
    return TrainSettings(**{"sources": given, "model": "-", "output": "-", **changes})


def read(settings, tallies=None):
    return list(sources.read(settings, sources.locate(settings), {} if tallies is None else tallies))


def test_bad_rows_of_every_source_are_told_or_left_out_and_written(files, tmp_path):
    bad = write_jsonl(
        tmp_path / "bad.jsonl", [{"question": "q", "answers": []}, {"question": "q", "answers": "a"}, [1]]
    )
    given = {"plain": {"path": str(bad), "columns": {"query": "question", "positives": "answers"}}}
    with pytest.raises(InputError, match=r"sources.plain.path=.*bad.jsonl: row 1: .* no passage.*row 3: .*2 bad rows"):
        read(mix(files, sources=given, objective="uni{P}"))
    chosen = mix(files, sources=given, objective="uni{P}", on_bad_row="reject")
    rows = sources.write(chosen, sources.locate(chosen), tmp_path / "states" / "records.arrow", {})
    assert len(rows) == 1
    assert len(list(raw_rows(tmp_path / "states" / BAD_ROWS_FILE, "records"))) == 2


def test_a_mix_is_read_as_one_set_with_the_names_of_its_sources(files, tmp_path):
    tallies = {}
    rows = read(mix(files), tallies)
    assert Counter(row.source for row in rows) == {"infir": 9, "plain": 12, "scored": 20}
    assert rows[0] == replace(record(0), id="infir/r0", source="infir")
    assert rows[9].id == "plain/row-1"
    named = read(mix(files, sources={"v1.5": {"path": str(files / "scored.jsonl")}}, objective="uni{P}"))
    assert (named[0].id, named[0].source) == ("v1.5/x0", "v1.5")
    assert rows[21] == replace(example(0, instruction="asked 0"), id="scored/x0", source="scored")
    assert [tally.describe(Path(name)) for name, tally in tallies.items()] == [
        "9 of sources.infir.path",
        "12 of sources.plain.path, 12 without instructions",
        "20 of sources.scored.path, 100 hard negatives, 20 with a teacher's scores",
    ]
    dataset = Dataset.write(tmp_path / "records.arrow", rows)
    assert list(dataset) == rows
    assert [dataset[n] for n in (0, 9, 40)] == [rows[n] for n in (0, 9, 40)]


def test_a_source_keeps_the_names_that_its_records_have(files, tmp_path):
    """The licence of the model card depends on them; `mixture` weighs the source as a whole."""
    write_jsonl(tmp_path / "a.jsonl", ({**vars(record(n)), "source": "msmarco"} for n in range(4)))
    settings = mix(files, sources={"a": {"path": str(tmp_path / "a.jsonl")}}, mixture={"a": 1}, workers=1)
    rows = read(settings)
    assert {row.source for row in rows} == {"a/msmarco"}
    assert Sampler.from_settings(settings, rows).epoch_size == 4


def test_a_source_of_weight_0_may_lack_what_the_objective_needs(files):
    settings = mix(files, objective="uni{I}", mixture={"infir": 1, "plain": 0, "scored": 1})
    assert len(read(settings)) == 41


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"records": "a.jsonl"}, "records=a.jsonl: set either records, or sources.NAME.path"),
        ({"sources": {}}, "records=null: set either records, or sources.NAME.path"),
        ({"split": "train"}, "split=train: applies to records only; set sources.NAME.split"),
        (
            {"objective": "uni{I}"},
            "objective=uni{I}: nothing of sources.plain.path would train, because its records have no",
        ),
        (
            {"keep": ["plain"]},
            "objective=multi{P,I}: contrasts instructions, and no record has one; set objective='uni{P}'",
        ),
        (
            {"distillation": {}, "hard_negatives": 0},
            "hard_negatives=0: distillation and head=score train on hard negatives; set",
        ),
        (
            {"sources": {"org/a": {"path": "infir"}}},
            "sources.org/a: the name of a source is a part of its records' ids",
        ),
        ({"keep": ["infir"], "distillation": {}}, "distillation: no record has positive_scores and negative_scores"),
        (
            {"sources": {"a": {"path": "infir", "columns": {"document_positive": ["a", "b"]}}}},
            "columns.document_positive=['a', 'b']: a column of InF-IR records is one text",
        ),
        (
            {"sources": {"a": {"path": "plain"}}},
            "query, nor those of InF-IR records (found: question, answers); set sources.a.columns.query=<its name>",
        ),
        (
            {"sources": {"a": {"path": "one"}}},
            "(found: id, query_positive); set sources.a.columns.instruction_positive=<its name>, ",
        ),
        (
            {"sources": {"a": {"path": "plain", "columns": {"query": "question"}}}},
            "no column positives (found: question",
        ),
    ],
)
def test_what_cannot_train_is_refused_before_the_run(files, changes, message):
    keep = changes.pop("keep", None)
    settings = mix(files, **changes)
    if keep:
        settings = settings.model_copy(update={"sources": {name: settings.sources[name] for name in keep}})
    for label, source in settings.sources.items():
        if source.path in ("infir", "plain", "one"):
            settings.sources[label] = source.model_copy(update={"path": str(files / f"{source.path}.jsonl")})
    with pytest.raises(InputError) as refused:
        read(settings)
    assert message in str(refused.value)


def test_columns_and_sources_are_part_of_the_identity_and_paths_are_not(files):
    settings = mix(files)
    moved = {name: s.model_copy(update={"path": "elsewhere"}) for name, s in settings.sources.items()}
    assert settings.model_copy(update={"sources": moved}).identity() == settings.identity()
    renamed = moved | {"plain": moved["plain"].model_copy(update={"columns": {"query": "title"}})}
    assert settings.model_copy(update={"sources": renamed}).identity() != settings.identity()


@pytest.mark.ray
@pytest.mark.slow
def test_a_mix_with_distillation_trains_the_same_in_one_process_and_two(ray_cluster, files, tmp_path):
    """It also learns: the loss falls. The decoder has no dropout, so workers do not change the result."""
    (tmp_path / "model").mkdir()
    settings = mix(
        files,
        model=backbones.write("qwen2", tmp_path / "model"),
        output=str(tmp_path / "one"),
        launcher="process",
        workers=1,
        records_per_step=8,
        instruction_negatives=2,
        hard_negatives=3,
        distillation={"weight": 0.3},
        mixture={"infir": 2, "plain": 1, "scored": 1},
        learning_rate=1e-3,
        cpus_per_worker=0.5,
    )
    one = run(settings)
    two = settings.model_copy(update={"launcher": "ray", "workers": 2, "output": str(tmp_path / "two")})
    assert_same_run(one, run(two))
    losses = [line["loss"] for line in read_metrics(one.path)]
    assert sum(losses[-3:]) < sum(losses[:3])
    assert InstructionEncoder.from_pretrained(str(one.path)).encode_queries(["plain 1"]).shape[0] == 1
    assert "plain" in (one.path / "README.md").read_text()
