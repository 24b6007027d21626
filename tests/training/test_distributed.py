"""Training on a Ray cluster: its output, resuming, ZeRO stages, adapters and error messages."""

import re
import signal

import pytest
import torch
from ray.train import WorkerGroupError

from infembed_ray.config.training import Lora
from infembed_ray.errors import InputError
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.training.distributed import _explained
from infembed_ray.training.launch import run
from infembed_ray.training.observability.logs import read_events, read_metrics
from tests.training.test_launch import assert_same_run, decoder_settings

ALONE = {"launcher": "process", "workers": 1}


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    return decoder_settings(tmp_path_factory.mktemp("train")).model_copy(
        update={"launcher": "ray", "workers": 2, "epochs": 3, "checkpoint_every": 2, "grad_cache_tokens": 96}
    )


@pytest.fixture(scope="module")
def published(ray_cluster, settings):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs with SIGINT ignored
    return run(settings)


@pytest.mark.ray
def test_training_lowers_the_loss_and_logs_every_step(published, settings):
    metrics = read_metrics(published.path)
    assert [m["step"] for m in metrics] == list(range(1, 7))  # 7 records, 4 a step, 3 epochs
    assert metrics[-1]["loss"] < metrics[0]["loss"]
    assert metrics[0]["learning_rate"] == settings.learning_rate
    assert published.manifest["counts"] == {"records": 7, "steps": 6}


@pytest.mark.ray
def test_sentence_transformers_embeds_the_exported_model_identically(published):
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
def test_ctrl_c_interrupts_the_process_after_a_training(published):
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.ray
def test_finished_run_is_not_repeated(published, settings):
    again = run(settings)
    assert not again.fresh
    assert again.path == published.path


@pytest.mark.ray
def test_ray_matches_one_process(published, settings, tmp_path):
    assert_same_run(published, run(settings.model_copy(update=ALONE | {"output": str(tmp_path)})))


@pytest.mark.ray
def test_stopped_run_is_not_retried_by_ray_and_its_log_has_the_reason(ray_cluster, settings, tmp_path):
    changes = {"workers": 1, "learning_rate": 1e25, "checkpoint_every": 1, "output": str(tmp_path)}
    with pytest.raises(InputError, match=r"^step 2: .* stopped"):
        run(settings.model_copy(update=changes))
    (partial,) = tmp_path.glob(".*.partial")
    (event,) = read_events(partial)  # a retry would have logged that it resumed
    assert (event.step, event.action) == (2, "stop")


@pytest.mark.integration
@pytest.mark.parametrize(
    "options",
    [
        *(pytest.param({"zero_stage": stage}, marks=pytest.mark.slow) for stage in (0, 2, 3)),
        {"share_encoder": False, "zero_stage": 3},
    ],
)
def test_only_adapters_are_trained_and_merged_on_export(settings, minilm, tmp_path, options):
    lora = Lora(rank=4, target_modules=("query", "value"))
    change = {"model": minilm, "output": str(tmp_path), "lora": lora, "learning_rate": 5e-3, "epochs": 1, **options}
    made = run(settings.model_copy(update=change | ALONE))
    before = InstructionEncoder.from_pretrained(minilm)
    after = InstructionEncoder.from_pretrained(str(made.path))
    assert len(after.backbones) == (2 if options.get("share_encoder") is False else 1)
    for backbone in after.backbones:
        moved = {
            name.rsplit(".", 2)[-2]
            for (name, a), (_, b) in zip(before.backbone.named_parameters(), backbone.named_parameters(), strict=True)
            if not torch.equal(a, b)
        }
        assert moved == {"query", "value"}
    assert list((made.path / "adapters").rglob("adapter_model.safetensors"))
    card = (made.path / "README.md").read_text()
    assert "multi{P,I}" in card
    assert str(tmp_path) not in card
    assert minilm not in card


@pytest.mark.ray
def test_placement_timeout_error_names_the_resources(ray_cluster, settings, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "2")
    asks = {"output": str(tmp_path), "cpus_per_worker": 3.0, "max_failures": 0}
    with pytest.raises(InputError, match=r"workers=2: no resources for 3 CPU each"):
        run(settings.model_copy(update=asks))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "/no/such/model"}, "model=/no/such/model: no such model directory"),
        ({"records": "/no/such/file.jsonl"}, "records=/no/such/file.jsonl: no such file"),
        ({"split": "train"}, "no row has split=train"),
        ({"matryoshka": (32,)}, "matryoshka=32: embeddings of .* have 32; set fewer"),
        ({"interaction": "cross_attention", "template": "query_first"}, "template=query_first: cross_attention has no"),
        ({"append_eos": True, "lora": Lora(target_modules=("nowhere",))}, "lora.target_modules"),
        ({"lora": Lora(quantized=True)}, "lora.quantized=true: needs gpus_per_worker=1"),
        ({"output": "/dev/null/x"}, "output=/dev/null/x: cannot be written"),
    ],
)
def test_bad_input_is_rejected_before_any_work(settings, change, message):
    with pytest.raises(InputError, match=message):
        run(settings.model_copy(update=change))


@pytest.mark.parametrize(
    ("rank", "kind", "said"), [(1, InputError, "^bad$"), (2, KeyError, "^worker 2 of 2.*KeyError")]
)
def test_error_shows_the_cause_among_the_failures_of_all_workers(settings, rank, kind, said):
    lost = RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer")
    failures = {0: lost, rank: kind("bad"), 3: torch.distributed.DistBackendError("NCCL communicator was aborted")}
    assert re.match(said, str(_explained(WorkerGroupError("", failures), settings)))
    assert "Connection closed" in str(_explained(WorkerGroupError("", {0: lost}), settings))
