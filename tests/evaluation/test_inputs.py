"""Models and tasks of an evaluation are resolved and checked without Ray."""

import json
import shutil

import numpy as np
import pytest

from infembed_ray.config.evaluation import EvaluateSettings
from infembed_ray.errors import InputError
from infembed_ray.evaluation.inputs import content_hash, resolve
from infembed_ray.evaluation.retrievers import baselines
from infembed_ray.storage.object_store import SCRATCH, Folder
from infembed_ray.storage.places import listing, read_text
from tests.evaluation import published
from tests.evaluation.retrievers import models
from tests.evaluation.tasks.test_infir import record
from tests.modeling import backbones
from tests.support.files import write_jsonl
from tests.support.object_store import upload


@pytest.fixture(scope="module")
def settings(minilm, tmp_path_factory):
    root = tmp_path_factory.mktemp("inputs")
    published.bright_like(root / "mirror")
    records = write_jsonl(root / "records.jsonl", [vars(record(topic)) for topic in ("tides", "bread")])
    distractors = write_jsonl(root / "distractors.jsonl", [{"id": "1", "passage": "a passage about something else"}])
    return EvaluateSettings(
        tasks=("bright/leetcode",),
        data=str(root / "mirror"),
        records=str(records),
        models={"base": minilm, "bm25": models.BM25, "cross": models.cross_encoder(root)},
        first_stage="bm25",
        rerank=5,
        distractors=str(distractors),
        output=str(root / "output"),
    )


def test_inputs_have_all_models_and_tasks_with_shared_corpora(settings):
    inputs = resolve(settings)
    assert [model.label for model in inputs.models] == ["base", "bm25", "cross"]
    assert [task.name for task in inputs.tasks] == ["bright/leetcode", "records"]
    assert all(task.corpus_file.is_file() for task in inputs.tasks)
    assert inputs.size == (6 + 6, 144 + 6 + 1)


def test_corpora_that_are_not_shared_give_the_same_identity_without_a_copy(settings, tmp_path):
    here = settings.model_copy(update={"embeddings": str(tmp_path)})
    resolved = resolve(here, share_corpora=False)
    assert not list(tmp_path.iterdir())
    assert resolved.step(here).identity == resolve(here).step(here).identity
    assert all(task.corpus_file.is_file() for task in resolved.tasks)  # where the second call wrote them


def test_faults_of_all_tasks_are_told_at_once_and_a_gate_needs_changed_instructions(settings, tmp_path):
    for name in ("one", "two"):
        (tmp_path / name / "qrels").mkdir(parents=True)
        write_jsonl(tmp_path / name / "corpus.jsonl", [{"_id": "1", "text": "x"}])
        write_jsonl(tmp_path / name / "queries.jsonl", [{"_id": "q", "text": "x"}])
        (tmp_path / name / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq\tgone\t1\n")
    names = tuple(str(tmp_path / name) for name in ("one", "two"))
    with pytest.raises(InputError) as error:
        resolve(settings.model_copy(update={"tasks": names, "records": None, "distractors": None}))
    assert [fault.value for fault in error.value.faults] == list(names)
    plain = settings.model_copy(update={"records": None, "distractors": None, "gate": "bm25"})
    with pytest.raises(
        InputError, match="gate=bm25: no task has changed instructions; evaluate InF-IR records or FollowIR"
    ):
        resolve(plain)
    assert resolve(plain.model_copy(update={"gate": None})).bad[0].count == 0


def test_bad_records_and_distractors_are_left_out_on_request(settings, tmp_path):
    files = {name: tmp_path / f"{name}.jsonl" for name in ("records", "distractors")}
    write_jsonl(files["records"], [vars(record("tides")), {"query_positive": ["q"]}])
    write_jsonl(files["distractors"], [{"id": "1", "passage": "p"}, {"id": "2", "passage": " "}])
    given = settings.model_copy(update={name: str(file) for name, file in files.items()})
    with pytest.raises(InputError, match=r"records.jsonl: row 2: .*set on_bad_row=reject"):
        resolve(given)
    inputs = resolve(given.model_copy(update={"on_bad_row": "reject"}))
    assert [(bad.name, bad.count) for bad in inputs.bad[-2:]] == [("records", 1), ("distractors", 1)]
    assert inputs.tasks[-1].about == {"records": 1, "distractors": 1}


def test_the_identity_changes_with_tasks_and_the_order_of_models(settings):
    def identity(**change):
        changed = settings.model_copy(update=change)
        return resolve(changed).step(changed).identity

    swapped = dict(reversed(settings.models.items()))
    assert identity() == identity(actors=4)
    assert len({identity(), identity(models=swapped), identity(tasks=()), identity(depth=10)}) == 4


def test_a_tasks_hash_changes_with_any_of_its_contents(settings):
    first, second = (resolve(settings.model_copy(update={"max_distractors": n})).tasks[1] for n in (0, 1))
    assert content_hash(first) != content_hash(second)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"models": {}}, "models is empty"),
        ({"models": {"base": "/no/such/model"}}, "/no/such/model: no such model directory"),
        ({"records": None, "tasks": ()}, "tasks is empty"),
        ({"records": None}, "needs records; set records"),
        ({"tasks": ("bright/biologie",)}, "bright/biolog"),
        ({"records": "/no/such/records.jsonl"}, "records=/no/such/records.jsonl: no such file"),
        ({"distractors": "/no/such/passages.jsonl"}, "distractors=/no/such/passages.jsonl: no such file"),
        ({"split": "nowhere"}, "no row has split=nowhere"),
        ({"embeddings": "ftp://bucket/embeddings"}, "embeddings=ftp://bucket/embeddings: must be a path"),
        ({"first_stage": "bm26"}, "first_stage=bm26: is not a label of models"),
        (
            {"first_stage": None},
            "models.cross: is a reranker, but bright/leetcode has no lists of 1000 candidates or fewer",
        ),
        ({"first_stage": "cross"}, "first_stage=cross: is a reranker itself"),
    ],
)
def test_bad_input_is_rejected_in_one_line(settings, change, message):
    with pytest.raises(InputError) as error:
        resolve(EvaluateSettings.from_mapping(settings.model_dump() | change))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    return backbones.write("qwen2", tmp_path_factory.mktemp("decoder"))


@pytest.mark.parametrize(
    ("model", "fault"),
    [
        ("cross", "is a BertForSequenceClassification, not a model of kind=encoder"),
        ("listed", "is a BertForSequenceClassification, not a model of kind=encoder"),
        ({"kind": "classifier", "model": "base"}, "is a BertModel, not a model of kind=classifier"),
        ({"kind": "causal", "model": "decoder"}, "is a Qwen2Model, not a model of kind=causal"),
        ({"kind": "causal", "model": "cross"}, "is a BertForSequenceClassification, not a model of kind=causal"),
    ],
)
def test_a_reranker_given_as_an_encoder_and_the_reverse_are_refused(settings, decoder, tmp_path, model, fault):
    places = {"cross": settings.models["cross"].model, "base": settings.models["base"], "decoder": decoder}
    places["listed"] = str(shutil.copytree(places["cross"], tmp_path / "listed"))  # as sentence-transformers saves one
    modules = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    (tmp_path / "listed" / "modules.json").write_text(json.dumps(modules))
    answers = {"pair": "{query} {passage}", "answers": ("a", "b")}
    if isinstance(model, dict):
        formats = {"instructed_query": "{instruction} {query}", "plain_query": "{query}"}
        given = {**formats, **(answers if model["kind"] == "causal" else {}), **model, "model": places[model["model"]]}
    else:
        given = places[model]
    with pytest.raises(InputError) as error:
        resolve(EvaluateSettings.from_mapping(settings.model_dump() | {"models": {"x": given}, "first_stage": None}))
    (told,) = error.value.faults
    assert told.setting == "models.x.model"
    assert told.value in places.values()
    assert told.fault == fault
    assert "or set its own kind: encoder, causal, seq2seq, classifier" in told.remedy


def test_inputs_in_an_object_store_are_those_of_directories(settings, minilm, bucket, tmp_path, monkeypatch):
    monkeypatch.setenv(SCRATCH, str(tmp_path / "scratch"))
    own = str(published.beir_like(tmp_path / "own"))
    local = resolve(settings.model_copy(update={"tasks": (*settings.tasks, own)}))
    folder = Folder.open(f"{bucket}/{tmp_path.name}", "x")
    for name, place in (("own", own), ("data", settings.data), ("base", minilm)):
        upload(place, folder / name)
    for name in ("records", "distractors"):
        upload(getattr(settings, name), folder / f"{name}.jsonl")
    stored = resolve(
        settings.model_copy(
            update={
                "tasks": (*settings.tasks, f"{folder}/own"),
                "data": f"{folder}/data",
                "models": {**settings.models, "base": f"{folder}/base"},
                "output": f"{folder}/output",
                **{name: f"{folder}/{name}.jsonl" for name in ("records", "distractors")},
            }
        )
    )
    assert [content_hash(task) for task in stored.tasks] == [content_hash(task) for task in local.tasks]
    assert [task.corpus_file.base for task in stored.tasks] == [
        f"{folder}/output/embeddings/corpora/{task.corpus_file.name}" for task in local.tasks
    ]
    # The driver has the corpora, and what checks the model: no records, no weights.
    assert not [n for n in listing(tmp_path / "scratch") if n.endswith((".safetensors", ".bin", ".jsonl", ".parquet"))]
    encoders = [baselines.load(resolved.models[0].retriever) for resolved in (local, stored)]
    assert np.array_equal(*(encoder.encode_passages(["a passage"]) for encoder in encoders))


def test_a_changed_model_in_an_object_store_has_another_identity(minilm, bucket, tmp_path, monkeypatch):
    monkeypatch.setenv(SCRATCH, str(tmp_path))
    folder = Folder.open(f"{bucket}/{tmp_path.name}", "x")
    upload(minilm, folder)
    settings = baselines.resolve("x", str(folder))
    before = baselines.identity(settings)
    assert baselines.identity(settings) == before
    config = read_text(folder / "config.json")
    folder.write("config.json", config + " ")
    assert baselines.identity(settings) != before
