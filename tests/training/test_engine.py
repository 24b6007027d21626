"""The engine with DeepSpeed and gloo against plain PyTorch with the whole batch in one process."""

import gc
import math
import os
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoTokenizer, BertConfig, BertModel

from benchmarks.host_cost import Sent
from infembed_ray.config.training import TrainSettings
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.training.collectives import gather_rows, world
from tests.modeling import backbones
from tests.support.ports import free_port
from tests.support.workers import PROCESSES

pytestmark = pytest.mark.integration
ROWS, STEPS, RATE, TEMPERATURE = 5, 2, 1e-3, 0.05
STAGES = (0, 1, 2, 3)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    return backbones.write("qwen2", tmp_path_factory.mktemp("decoder"))


@pytest.fixture(scope="module")
def tiny(decoder, tmp_path_factory):
    """A random BERT of two layers with dropout; its pooler gets no gradient."""
    path = tmp_path_factory.mktemp("tiny")
    tokenizer = AutoTokenizer.from_pretrained(decoder)
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
    """Tokenize queries and passages of a worker; worker 1's passages are longer and need more passes of 64 tokens."""
    queries = [f"query {rank} {n} " + "how " * n * step for n in range(ROWS)]
    passages = [f"passage {rank} {n} " + "bread " * (2 + n + 10 * rank) for n in range(ROWS)]
    instructions = [f"For nurses, in plain words; no brand names {n % 2}" for n in range(ROWS)]
    return encoder.tokenize_queries(queries, instructions), encoder.tokenize_passages(passages)


def contrast(queries, passages, first):
    """Compute InfoNCE of some rows among all passages."""
    return torch.nn.functional.cross_entropy(queries @ passages.T / TEMPERATURE, torch.arange(len(queries)) + first)


def trained(settings, path, dropout=False, separate=False, resume_in=None):
    """Run some steps of an engine; return losses, gradients and norms of each, and the final weights.

    After them, update with an infinite gradient on worker 0: return the norm, the operators of the update, and whether all
    weights are as before.
    """
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad

    from infembed_ray.training.engine import Engine

    def start():
        encoder = InstructionEncoder.from_pretrained(path, share_encoder=not separate)
        engine = Engine(encoder, settings)
        engine._deepspeed.train(dropout)
        return encoder, engine

    encoder, engine = start()
    rank, workers = world()
    got = {"losses": [], "gradients": [], "norms": []}
    for step in range(STEPS):
        if resume_in is not None and step == STEPS - 1:
            saving = engine.save(resume_in, "state")
            loss = engine.encode(texts(encoder, rank, 0)[0]).square().sum()  # the weights move while it is written
            engine.backward(loss)
            engine.update(1.0)
            assert saving.result().error is None
            engine._deepspeed.destroy()
            encoder, engine = start()
            engine.load(resume_in, "state")
        torch.manual_seed(100 * step + rank)
        queries, passages = (engine.encode(side) for side in texts(encoder, rank, step))
        loss = contrast(queries, gather_rows(passages, [ROWS] * workers), ROWS * rank)
        engine.backward(loss)
        got["losses"].append(loss.item())
        named = dict(engine._deepspeed.module.named_parameters())
        if not engine._deepspeed.managed_gradient_accumulation():
            engine._deepspeed.optimizer.finalize_gradient_accumulation_boundary()  # the update does it again
        full = {n: p.grad if settings.zero_stage == 0 else safe_get_full_grad(p) for n, p in named.items()}
        got["gradients"].append({n: g.clone() for n, g in full.items() if g is not None})
        got["norms"].append(engine.update(RATE))
    read = (lambda p: p.detach()) if settings.zero_stage == 0 else safe_get_full_fp32_param
    got["weights"] = {n: read(p).clone() for n, p in named.items()}
    engine.backward(engine.encode(texts(encoder, rank, 0)[0]).square().sum() * (1 if rank else torch.inf))
    with Sent() as operators:
        norm = engine.update(RATE)
    kept = all(torch.equal(read(p), got["weights"][n]) for n, p in named.items())
    got["infinite"] = norm, operators.count, kept
    engine._deepspeed.destroy()
    return got


def serve(rank, workers, port, pipe):
    """Train, as a worker, the runs that come through the pipe, until None comes."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(workers)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    import deepspeed  # noqa: F401

    gc.freeze()  # otherwise each garbage collection of DeepSpeed scans all imported modules for a second
    while (runs := pipe.recv()) is not None:
        pipe.send([trained(*run) for run in runs])
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module", params=[1, 2])
def workers(request):
    """Processes of one group; `train` returns the results of several runs, per worker and run."""
    port = free_port()
    pipes, processes = [], []
    for rank in range(request.param):
        pipe, theirs = PROCESSES.Pipe()
        process = PROCESSES.Process(target=serve, args=(rank, request.param, port, theirs), daemon=True)
        process.start()
        theirs.close()  # so that the pipe ends if the worker fails
        pipes.append(pipe)
        processes.append(process)

    def train(runs):
        for pipe in pipes:
            pipe.send(runs)
        return [pipe.recv() for pipe in pipes]

    yield SimpleNamespace(count=request.param, train=train)
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send(None)
        process.join()


def settings_of(stage, tokens=None, **changes):
    common = {"records": "-", "model": "-", "output": "-", "learning_rate": RATE}
    return TrainSettings(zero_stage=stage, grad_cache_tokens=tokens, **common, **changes)


def reference(path, workers, separate=False, dtype=torch.float32):
    """Run the same steps in plain PyTorch: one process, one pass per side and worker, clipping, AdamW on fp32 weights."""
    torch.set_num_threads(1)  # as the workers, because AdamW amplifies gradients that are only rounding errors
    encoder = InstructionEncoder.from_pretrained(path, share_encoder=not separate, dtype=dtype).eval()
    low = dict(encoder.named_parameters())
    parameters = {n: p.detach().float().requires_grad_() for n, p in low.items()} if dtype != torch.float32 else low
    optimizer = torch.optim.AdamW(parameters.values(), lr=RATE, weight_decay=0.0)
    got = {"losses": [], "gradients": [], "norms": []}
    for step in range(STEPS):
        of_workers = [texts(encoder, rank, step) for rank in range(workers)]
        queries, passages = (
            torch.cat([in_one_pass(encoder, side) for side in sides]) for sides in zip(*of_workers, strict=True)
        )
        loss = contrast(queries, passages, 0)
        optimizer.zero_grad()
        encoder.zero_grad()
        loss.backward()
        for name, parameter in low.items():
            parameters[name].grad = None if parameter.grad is None else parameter.grad.float()
        got["losses"].append(loss.item())
        got["gradients"].append({n: p.grad.clone() for n, p in parameters.items() if p.grad is not None})
        got["norms"].append(torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0).item())
        optimizer.step()
        for name, parameter in low.items():
            parameter.data.copy_(parameters[name].data)
    got["weights"] = {n: p.detach().clone() for n, p in parameters.items()}
    return got


def in_one_pass(encoder, sequences):
    """Return the embeddings in the order of the texts."""
    [(rows, layout)] = encoder.layouts(sequences, 1 << 40)
    return encoder(layout)[torch.tensor(rows).argsort()]


def assert_equal_runs(got, expected, tolerance, steps=STEPS):
    for step in range(steps):
        gradients, wanted = got["gradients"][step], expected["gradients"][step]
        largest = max(g.abs().max() for g in wanted.values())
        for name, gradient in wanted.items():
            torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=float(tolerance * largest), msg=name)
        torch.testing.assert_close(got["norms"][step], expected["norms"][step], rtol=tolerance, atol=0)


def assert_all_equal(results, expected, kinds):
    for n, kind in enumerate(kinds):
        assert_equal_runs(results[0][n], expected, 1e-5)
        means = [sum(got[n]["losses"][step] for got in results) / len(results) for step in range(STEPS)]
        torch.testing.assert_close(means, expected["losses"], rtol=1e-5, atol=0, msg=str(kind))


def test_a_case_of_every_zero_stage_matches_plain_pytorch(workers, tiny):
    kinds = [(0, 64), (1, None), (2, 64), (3, None)]
    expected = reference(tiny, workers.count)
    assert_all_equal(workers.train([(settings_of(*kind), tiny) for kind in kinds]), expected, kinds)


@pytest.mark.slow  # quick: the test above
@pytest.mark.parametrize("workers", [2], indirect=True)
def test_every_zero_stage_with_every_offload_and_with_grad_cache_matches_plain_pytorch(workers, tiny):
    kinds = [(stage, tokens, None) for stage in STAGES for tokens in (None, 64)]
    kinds += [(1, 64, "optimizer"), (2, 64, "optimizer"), (3, 64, "optimizer"), (3, 64, "all")]
    runs = [(settings_of(stage, tokens, offload=offload), tiny) for stage, tokens, offload in kinds]
    assert_all_equal(workers.train(runs), reference(tiny, workers.count), kinds)


@pytest.mark.parametrize("workers", [1], indirect=True)
def test_weights_match_plain_pytorch(workers, tiny):
    for got in workers.train([(settings_of(0), tiny)]):
        for name, weight in reference(tiny, workers.count)["weights"].items():
            torch.testing.assert_close(got[0]["weights"][name], weight, rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("workers", [2], indirect=True)
def test_two_towers_match_plain_pytorch(workers, tiny):
    """A pass reaches one tower only; ZeRO-3 adds its gradients to those of the step before unless they are cleared."""
    kinds = [(2, None), (3, None), (2, "optimizer"), (3, "optimizer")]
    runs = [(settings_of(stage, 64, offload=offload), tiny, False, True) for stage, offload in kinds]
    assert_all_equal(workers.train(runs), reference(tiny, workers.count, separate=True), kinds)


@pytest.mark.parametrize("workers", [2], indirect=True)
def test_dropout_repeats_and_resumed_run_is_identical(workers, tiny, tmp_path):
    runs = []
    for stage in STAGES:
        for resume_in in (None, tmp_path / str(stage)):
            runs.append((settings_of(stage, 64), tiny, True, False, resume_in))
    got = workers.train([*runs, (settings_of(0, None), tiny, True)])[0]
    for stage in STAGES:
        cached, resumed = got[2 * stage : 2 * stage + 2]
        assert cached["losses"] == resumed["losses"]
        for name, weight in cached["weights"].items():
            assert torch.equal(weight, resumed["weights"][name]), name
        assert_equal_runs(cached, got[0], 1e-5)  # every stage has the same dropout
    assert got[-1]["losses"] != got[0]["losses"]  # other passes have other dropout, so it was on


@pytest.mark.parametrize("workers", [1], indirect=True)
def test_activation_checkpointing_gives_the_same_gradients_in_every_layout(workers, tiny, decoder):
    """Layouts are packed (BERT) and prefix trees (a decoder), with dropout; ZeRO-3 gathers the parameters again."""
    kinds = [(2, None, tiny), (3, 64, tiny), (2, 64, decoder)]
    runs = [
        (settings_of(stage, tokens, activation_checkpointing=anew), path, True)
        for stage, tokens, path in kinds
        for anew in (False, True)
    ]
    got = workers.train(runs)[0]
    for n, _ in enumerate(kinds):
        kept, anew = got[2 * n : 2 * n + 2]
        torch.testing.assert_close(anew["losses"], kept["losses"], rtol=1e-6, atol=0)
        assert_equal_runs(anew, kept, 1e-5)


def test_a_gradient_that_is_not_finite_on_one_worker_changes_no_weight_on_any(workers, tiny):
    runs = [(settings_of(stage), tiny) for stage in (0, 1, 2)]
    runs += [(settings_of(stage, precision="bf16"), tiny) for stage in (1, 2)]
    for of_worker in workers.train(runs):
        for got in of_worker:
            norm, _, kept = got["infinite"]
            assert not math.isfinite(norm)
            assert kept


@pytest.mark.parametrize("workers", [1], indirect=True)
def test_an_update_in_bf16_has_fewer_operators_than_parameters(workers, tiny):
    """A loop over the parameters would keep a fast device waiting. Stage 1 in bf16 has another optimizer of DeepSpeed."""
    [[got]] = workers.train([(settings_of(2, precision="bf16"), tiny)])
    assert got["infinite"][1] < len(got["weights"])


@pytest.mark.parametrize("workers", [1], indirect=True)
def test_bf16_accumulates_passes_in_fp32(workers, tiny):
    runs = [(settings_of(stage, tokens, precision="bf16"), tiny) for stage in (1, 2, 3) for tokens in (None, 64)]
    got = workers.train(runs)[0]
    plain = reference(tiny, 1, dtype=torch.bfloat16)
    for whole in got[:4:2]:
        assert_equal_runs(whole, plain, 1e-5, steps=1)  # another kernel of AdamW then rounds a few weights otherwise
        off = torch.cat([(whole["weights"][n] - w).abs().flatten() for n, w in plain["weights"].items()])
        assert off.mean() < RATE / 50
    for whole, cached in zip(got[::2], got[1::2], strict=True):
        for step in range(STEPS):
            assert cached["losses"][step] == pytest.approx(whole["losses"][step], rel=0.02)
            assert cached["norms"][step] == pytest.approx(whole["norms"][step], rel=0.05)


@pytest.mark.integration
def test_the_weights_in_training_come_back_also_after_an_error():
    from infembed_ray.training.engine import Engine

    layer = torch.nn.Linear(3, 2)
    trained, own = layer.weight.detach().clone(), {"weight": torch.zeros(2, 3)}
    engine = SimpleNamespace(encoder=layer, _own=own, _settings=SimpleNamespace(interpolation=0.25))
    with pytest.raises(InterruptedError), Engine.published_weights(engine):
        torch.testing.assert_close(layer.weight.detach(), trained / 4)
        raise InterruptedError
    assert torch.equal(layer.weight.detach(), trained)
