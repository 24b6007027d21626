"""Training on a real Ray cluster with real DeepSpeed: what comes out, and what a second run or a resumed one does."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from infembed_ray.config import TrainSettings
from infembed_ray.errors import InputError
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.records import columns_of
from infembed_ray.training.distributed import run
from infembed_ray.training.metrics import read_metrics
from tests.training.test_tuples import record


@pytest.fixture(scope="module")
def records_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("records") / "records.jsonl"
    rows = [columns_of(record(n)) for n in range(6)]
    for n, row in enumerate(rows):  # of uneven lengths, so that the workers' batches differ in shape
        row["document_positive"] += " and so on" * 7 * n
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def settings(records_file, minilm, tmp_path_factory):
    return TrainSettings(
        records=str(records_file),
        model=minilm,
        output=str(tmp_path_factory.mktemp("train")),
        objective="multi{P,I}",
        instruction_negatives=2,
        records_per_worker=1,
        epochs=2,
        learning_rate=2e-4,
        checkpoint_every=2,
        cpus_per_worker=0.5,
    )


@pytest.fixture(scope="module")
def published(ray_cluster, settings):
    return run(settings)


@pytest.mark.ray
def test_training_lowers_the_loss_and_logs_every_step(published, settings):
    metrics = read_metrics(published.path)
    assert [m["step"] for m in metrics] == list(range(1, 7))  # 6 records / 2 workers / 1 each, 2 epochs
    assert metrics[-1]["loss"] < metrics[0]["loss"]
    assert metrics[0]["learning_rate"] == settings.learning_rate
    assert published.manifest["counts"] == {"records": 6, "steps": 6}


@pytest.mark.ray
def test_sentence_transformers_embeds_the_checkpoint_identically(published):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    ours = InstructionEncoder.from_pretrained(str(published.path))
    theirs = sentence_transformers.SentenceTransformer(str(published.path), device="cpu")
    instructions = ["For a clinician: doses only, no history.", "short"]
    queries = ["how is aspirin given", "what is a much longer question about a rather simple thing"]
    texts = [f"{i} {q}" for i, q in zip(instructions, queries, strict=True)]
    mine = ours.encode_queries(queries, instructions)
    cosine = (mine * theirs.encode(texts, normalize_embeddings=True)).sum(axis=1)
    assert cosine.min() >= 0.9999
    passages = ["Aspirin is given by mouth.", "word " * 400]
    cosine = (ours.encode_passages(passages) * theirs.encode(passages, normalize_embeddings=True)).sum(axis=1)
    assert cosine.min() >= 0.9999


@pytest.mark.ray
def test_training_moves_the_weights(published, minilm):
    before, after = (
        InstructionEncoder.from_pretrained(p).encode_passages(["passage 1"]) for p in (minilm, str(published.path))
    )
    assert not np.allclose(before, after, atol=1e-4)


@pytest.mark.ray
def test_the_same_run_again_has_nothing_to_do(published, settings):
    again = run(settings)
    assert not again.fresh
    assert again.path == published.path


@pytest.mark.ray
def test_a_run_whose_driver_is_killed_resumes_to_the_same_weights(published, settings, tmp_path):
    killed = settings.model_copy(update={"output": str(tmp_path)})
    overrides = [f"{k}={v}" for k, v in killed.model_dump().items() if v is not None]
    driver = subprocess.Popen(
        [sys.executable, "-m", "infembed_ray.cli", "train", *overrides],
        env={k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"},
        start_new_session=True,
    )
    partial = tmp_path / f".{published.path.name}.partial"
    deadline = time.monotonic() + 240
    while not list(partial.glob("states/step-*/complete.json")):
        assert driver.poll() is None, "the driver ended before it wrote a state"
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(driver.pid, signal.SIGKILL)
    driver.wait()
    assert not (tmp_path / published.path.name).exists()
    resumed = run(killed)
    assert resumed.fresh
    assert [m["loss"] for m in read_metrics(resumed.path)] == [m["loss"] for m in read_metrics(published.path)]
    a, b = (
        InstructionEncoder.from_pretrained(str(p)).encode_passages(["passage 1", "x"])
        for p in (published.path, resumed.path)
    )
    np.testing.assert_array_equal(a, b)


@pytest.mark.ray
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_every_zero_stage_trains_the_same_model(published, settings, tmp_path, stage):
    other = run(settings.model_copy(update={"output": str(tmp_path), "zero_stage": stage}))
    losses = [[m["loss"] for m in read_metrics(p.path)] for p in (published, other)]
    np.testing.assert_allclose(losses[1], losses[0], atol=1e-4)
    a, b = (
        InstructionEncoder.from_pretrained(str(p.path)).encode_passages(["passage 1", "x"]) for p in (published, other)
    )
    assert (a * b).sum(axis=1).min() > 0.9999


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"instruction_negatives": 0}, r"instruction_negatives=0: multi\{P,I\} contrasts instructions"),
        ({"objective": "multy{P,I}"}, r"objective='multy\{P,I\}'.*did you mean multi\{P,I\}"),
        ({"model": "/no/such/model"}, "model=/no/such/model: no such model directory"),
        ({"records": "/no/such/file.jsonl"}, "records=/no/such/file.jsonl: no such file"),
        ({"workers": 7}, "workers=7: more than the 6 records"),
        ({"split": "train"}, "no row has split=train"),
        ({"output": "/dev/null/x"}, "output=/dev/null/x: cannot be written"),
    ],
)
def test_bad_input_is_one_line_before_any_work(settings, change, message):
    with pytest.raises(InputError, match=message):
        run(settings.model_copy(update=change))
