"""The engine on real DeepSpeed and gloo against plain PyTorch, which holds the whole batch in one process."""

import os
import socket

import pytest
import torch
import torch.multiprocessing as mp
from transformers import AutoTokenizer, BertConfig, BertModel

from infembed_ray.config import TrainSettings
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.training.collectives import gather_rows, world

ROWS, STEPS, RATE, PEAK = 5, 3, 1e-3, 1e-2
STAGES = (0, 1, 2, 3)


@pytest.fixture(scope="module")
def tiny(minilm, tmp_path_factory):
    """A random BERT of two layers with dropout and MiniLM's tokenizer; its pooler, as ever, gets no gradient."""
    path = tmp_path_factory.mktemp("tiny")
    tokenizer = AutoTokenizer.from_pretrained(minilm)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        architectures=["BertModel"],
    )
    BertModel(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def texts(encoder, rank, step):
    """Queries and passages of a worker; worker 1's passages are longer, so that it needs more passes of 64 tokens."""
    queries = [f"query {rank} {n} " + "very " * n * step for n in range(ROWS)]
    passages = [f"passage {rank} {n} " + "word " * (5 + n + 40 * rank) for n in range(ROWS)]
    return encoder.tokenize_queries(queries, [None] * ROWS), encoder.tokenize_passages(passages)


def contrast(queries, passages, temperature, first):
    """InfoNCE of some rows among all passages."""
    return torch.nn.functional.cross_entropy(queries @ passages.T / temperature, torch.arange(len(queries)) + first)


def trained(settings, path, dropout=False, separate=False, resume_in=None):
    """Three steps of an engine: losses, gradients of each step, temperatures, norms, and the weights after them."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad

    from infembed_ray.training.engine import Engine

    def start():
        encoder = InstructionEncoder.from_pretrained(path, share_encoder=not separate)
        engine = Engine(encoder, settings)
        engine._engine.train(dropout)
        return encoder, engine

    encoder, engine = start()
    rank, workers = world()
    got = {"losses": [], "gradients": [], "temperatures": [], "norms": []}
    for step in range(STEPS):
        if resume_in is not None and step == STEPS - 1:
            engine.save(resume_in, "state", {"step": step})
            engine._engine.destroy()
            encoder, engine = start()
            assert engine.load(resume_in, "state")["step"] == step
        torch.manual_seed(100 * step + rank)
        queries, passages = (engine.encode(t) for t in texts(encoder, rank, step))
        loss = contrast(queries, gather_rows(passages, [ROWS] * workers), engine.temperature, ROWS * rank)
        got["losses"].append(loss.item())
        got["temperatures"].append(float(engine.temperature))
        engine.backward(loss)
        named = dict(engine._engine.module.named_parameters())
        full = {n: p.grad if settings.zero_stage == 0 else safe_get_full_grad(p) for n, p in named.items()}
        got["gradients"].append({n: g.clone() for n, g in full.items() if g is not None})
        got["norms"].append(engine.update(RATE))
    plain = settings.zero_stage == 0
    got["weights"] = {n: (p.detach() if plain else safe_get_full_fp32_param(p)).clone() for n, p in named.items()}
    engine._engine.destroy()
    return got


def worker(rank, workers, port, runs, results):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(workers)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    results[rank] = [trained(*run) for run in runs]
    torch.distributed.destroy_process_group()


def run_all(workers, runs):
    """The results of several runs in the same processes: what each worker got, run by run."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with mp.Manager() as manager:
        results = manager.dict()
        mp.spawn(worker, args=(workers, port, runs, results), nprocs=workers)
        return [results[rank] for rank in range(workers)]


def settings_of(stage, tokens=None, learned=False, **changes):
    return TrainSettings(
        records="-",
        model="-",
        output="-",
        zero_stage=stage,
        grad_cache_tokens=tokens,
        temperature_learned=learned,
        learning_rate=RATE,
        temperature_learning_rate=PEAK,
        **changes,
    )


def reference(path, workers, separate=False, learned=True):
    """The same steps in plain PyTorch: one process, one pass a side and worker, AdamW, clipping."""
    torch.set_num_threads(1)  # as the workers: AdamW makes much of a gradient that is nothing but rounding
    encoder = InstructionEncoder.from_pretrained(path, share_encoder=not separate).eval()
    logit = torch.nn.Parameter(torch.tensor([torch.tensor(0.05 / 0.01).log() / torch.tensor(100.0).log()]).logit())
    parameters = {f"encoder.{n}": p for n, p in encoder.named_parameters()}
    groups = [{"params": list(encoder.parameters())}]
    if learned:
        parameters["temperature.logit"] = logit
        groups.append({"params": [logit], "lr": PEAK})
    optimizer = torch.optim.AdamW(groups, lr=RATE, weight_decay=0.0)
    got = {"losses": [], "gradients": [], "temperatures": [], "norms": []}
    for step in range(STEPS):
        of_workers = [texts(encoder, rank, step) for rank in range(workers)]
        temperature = 0.01 * 100 ** logit.sigmoid() if learned else torch.tensor(0.05)
        queries, passages = (
            torch.cat([in_one_pass(encoder, side) for side in sides]) for sides in zip(*of_workers, strict=True)
        )
        loss = contrast(queries, passages, temperature, 0)
        optimizer.zero_grad()
        loss.backward()
        got["losses"].append(loss.item())
        got["temperatures"].append(temperature.item())
        got["gradients"].append({n: p.grad.clone() for n, p in parameters.items() if p.grad is not None})
        got["norms"].append(torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0).item())
        optimizer.step()
    got["weights"] = {n: p.detach().clone() for n, p in parameters.items()}
    return got


def in_one_pass(encoder, sequences):
    """Embeddings in the order of the texts."""
    [(rows, layout)] = encoder.layouts(sequences, 1 << 40)
    return encoder(layout)[torch.tensor(rows).argsort()]


def assert_equal_runs(got, expected, tolerance):
    for step in range(STEPS):
        gradients, wanted = got["gradients"][step], expected["gradients"][step]
        largest = max(g.abs().max() for g in wanted.values())
        for name, gradient in wanted.items():
            torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=float(tolerance * largest), msg=name)
        torch.testing.assert_close(got["norms"][step], expected["norms"][step], rtol=tolerance, atol=0)
    torch.testing.assert_close(got["temperatures"], expected["temperatures"], rtol=1e-5, atol=0)


@pytest.mark.parametrize("workers", [1, 2])
def test_every_stage_with_and_without_grad_cache_steps_like_plain_pytorch(tiny, workers):
    kinds = [(stage, tokens) for stage in STAGES for tokens in (None, 64)]
    runs = [(settings_of(stage, tokens, learned=True), tiny) for stage, tokens in kinds]
    expected = reference(tiny, workers)
    assert expected["temperatures"][0] == pytest.approx(0.05, rel=1e-6)
    assert len(set(expected["temperatures"])) == STEPS
    results = run_all(workers, runs)
    for n, (stage, tokens) in enumerate(kinds):
        assert_equal_runs(results[0][n], expected, 1e-5)
        means = [sum(got[n]["losses"][step] for got in results) / workers for step in range(STEPS)]
        torch.testing.assert_close(means, expected["losses"], rtol=1e-5, atol=0, msg=f"stage {stage}, {tokens}")


def test_weights_after_three_steps_are_those_of_plain_pytorch(tiny):
    [[got]] = run_all(1, [(settings_of(0), tiny)])
    for name, weight in reference(tiny, 1, learned=False)["weights"].items():
        torch.testing.assert_close(got["weights"][name], weight, rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("workers", [1, 2])
def test_two_towers_of_which_a_pass_reaches_one(tiny, workers):
    """ZeRO-3 adds the passages' gradients to what the step before left, unless that is cleared."""
    stages = STAGES if workers == 2 else (3,)
    results = run_all(workers, [(settings_of(stage, 64, True), tiny, False, True) for stage in stages])
    for got in results[0]:
        assert_equal_runs(got, reference(tiny, workers, separate=True), 1e-5)


def test_dropout_is_repeated_and_a_resumed_run_is_the_uninterrupted_one(tiny, tmp_path):
    runs = []
    for stage in STAGES:
        for tokens, resume_in in ((None, None), (64, None), (64, tmp_path / str(stage))):
            runs.append((settings_of(stage, tokens, True), tiny, True, False, resume_in))
    got = run_all(2, runs)[0]
    for stage in STAGES:
        _, cached, resumed = got[3 * stage : 3 * stage + 3]
        assert cached["losses"] == resumed["losses"]
        assert cached["temperatures"] == resumed["temperatures"]
        for name, weight in cached["weights"].items():
            assert torch.equal(weight, resumed["weights"][name]), name
        assert_equal_runs(cached, got[1], 1e-5)  # the same dropout in every stage
    assert got[0]["losses"] != got[1]["losses"]  # other passes, other dropout: it was on


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bf16_adds_its_passes_up_in_fp32(tiny, stage):
    whole, cached = run_all(1, [(settings_of(stage, tokens, True, precision="bf16"), tiny) for tokens in (None, 64)])[0]
    for step in range(STEPS):
        assert cached["losses"][step] == pytest.approx(whole["losses"][step], rel=0.02)
        assert cached["norms"][step] == pytest.approx(whole["norms"][step], rel=0.05)
    assert whole["losses"][-1] < whole["losses"][0]
