"""Cost of the instruction marginal: all B x B joint encodings as prefix trees, and one by one.

    python benchmarks/instruction_marginals.py [--device cuda --dtype bf16 --model qwen2.5-1.5b-shape]

Texts are random token ids: B instructions of about 48 tokens and B queries of about 11, with the length distribution of
real texts. Queries share no prefixes. Random-init decoders (6 layers, width 256) run forward and backward on one thread.
All ways alternate in one run, and their results are compared. "Pairwise" is the usual joint encoding: all texts in one
padded batch. "Tuned" is the fastest pairwise variant at B = 12: packed or padded, sorted by length, whole or divided into
passes that fit the caches. Trees differ from "tuned" only by their fewer tokens. Trees may be divided, too.

The step is that of `infembed train`: DeepSpeed ZeRO 2 with one worker, real records, the first of 8 workers' share of 32.
multi{P,I} has five I-negatives a row, of one set for the step or drawn for each row.

The last line is one JSON object; with two architectures, of the slower one:
    vs_tuned_b12, ..._b24       time of tuned pairwise / time as trees; no way can gain more than token_ratio_b12, ..._b24
    speedup_b12, ..._b24        time pairwise / time as trees
    step_vs_uni_p               multi{P,I} step / uni{P} step
    memory_b12, ..._b24         bytes kept for the backward pass, pairwise / as trees
    embedding_difference        largest difference of a component over all runs
    gradient_difference         largest difference relative to the parameter's largest gradient, over all runs
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import material
import torch
from torch import Tensor
from transformers import AutoTokenizer, LlamaConfig, LlamaModel, Qwen2Config, Qwen2Model

from infembed_ray.config.training import TrainSettings
from infembed_ray.modeling.attention import prefix_tree
from infembed_ray.modeling.attention.packing import packed
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.modeling.layout import Layout, length_sorted_batches, padded
from infembed_ray.modeling.tokenizer import TextFormat, Tokens
from infembed_ray.training.collate import Batch, collate
from infembed_ray.training.engine import Engine
from infembed_ray.training.losses import Objective, marginal_loss
from infembed_ray.training.scores import score_batch

ONE_PASS = 1 << 40
TINY = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
QWEN_1_5B = {
    "vocab_size": 151936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
}
MODELS: dict[str, tuple[Any, Any, dict[str, int]]] = {
    "qwen2-tiny": (Qwen2Config, Qwen2Model, TINY),
    "llama-tiny": (LlamaConfig, LlamaModel, TINY),
    "qwen2.5-1.5b-shape": (Qwen2Config, Qwen2Model, QWEN_1_5B),
}
Passes = Iterable[tuple[list[int], Layout]]
Encode = Callable[[], Tensor]


class NoTokenizer:
    pad_token_id = 0


def encoder_of(model: str, options: argparse.Namespace) -> InstructionEncoder:
    config, backbone, shape = MODELS[model]
    torch.manual_seed(0)
    decoder = backbone(config(**shape))
    decoder.to(dtype={"fp32": torch.float32, "bf16": torch.bfloat16}[options.dtype])
    return InstructionEncoder(decoder, NoTokenizer(), "last", TextFormat()).to(options.device)


def texts(count: int, mean: float, spread: float, least: int, rng: random.Random) -> list[list[int]]:
    """Make texts of random ids with normally distributed lengths."""
    lengths = [max(least, round(rng.gauss(mean, spread))) for _ in range(count)]
    return [[rng.randrange(1, 4096) for _ in range(length)] for length in lengths]


def pairs_of(size: int) -> list[Tokens]:
    """Make all pairs of `size` instructions and queries."""
    rng = random.Random(size)
    instructions = texts(size, 48, 10, 20, rng)
    queries = texts(size, 11, 4, 4, rng)
    return [Tokens(i + q, "query", len(i)) for i in instructions for q in queries]


def in_packed_passes(sequences: list[Tokens], batch_tokens: int) -> Iterator[tuple[list[int], Layout]]:
    for rows in length_sorted_batches([len(s) for s in sequences], batch_tokens, padded=False):
        yield rows, packed([sequences[row] for row in rows])


def in_padded_passes(sequences: list[Tokens], batch_tokens: int) -> Iterator[tuple[list[int], Layout]]:
    for rows in length_sorted_batches([len(s) for s in sequences], batch_tokens):
        yield rows, padded([sequences[row] for row in rows], 0)


ONE_BY_ONE = {
    f"{name}, {'one pass' if budget == ONE_PASS else budget}": (layouts, budget)
    for name, layouts in (("packed", in_packed_passes), ("padded", in_padded_passes))
    for budget in (ONE_PASS, 4096, 1024)
}
PAIRWISE = "padded, one pass"


TREES = {
    f"trees, {'one pass' if budget == ONE_PASS else budget}": (prefix_tree.forests, budget)
    for budget in (ONE_PASS, 1024)
}


def encode(encoder: InstructionEncoder, passes: Passes) -> Tensor:
    rows, parts = [], []
    for group, layout in passes:
        rows += group
        parts.append(encoder(layout.to(encoder.device)))
    return torch.cat(parts)[torch.tensor(rows).argsort().to(encoder.device)]


def way(encoder: InstructionEncoder, sequences: list[Tokens], how: tuple[Any, int]) -> Encode:
    layouts, budget = how
    return lambda: encode(encoder, layouts(sequences, budget))


def seconds(work: Callable[[], Any], device: torch.device) -> float:
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def forward_and_backward(encoder: InstructionEncoder, encoded: Encode) -> Tensor:
    """Return embeddings; leave the gradients of their products with fixed random vectors in the parameters."""
    encoder.zero_grad()
    embeddings = encoded()
    generator = torch.Generator().manual_seed(0)
    (embeddings * torch.randn(embeddings.shape, generator=generator).to(embeddings.device)).sum().backward()
    return embeddings.detach()


def fastest(encoder: InstructionEncoder, sequences: list[Tokens], ways: dict[str, tuple[Any, int]]) -> str:
    forward_and_backward(encoder, way(encoder, sequences, (prefix_tree.forests, ONE_PASS)))  # warm-up
    times = {
        name: seconds(lambda how=how: forward_and_backward(encoder, way(encoder, sequences, how)), encoder.device)
        for name, how in ways.items()
    }
    print("  " + "; ".join(f"{name} {s:.2f} s" for name, s in times.items()), flush=True)
    return min(times, key=times.__getitem__)


def kept_bytes(encoder: InstructionEncoder, encoded: Encode) -> int:
    """Return the bytes that a forward pass saves for the backward pass, without parameters."""
    parameters = {p.untyped_storage().data_ptr() for p in encoder.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        embeddings = encoded()
    del embeddings
    return sum(kept.values())


def marginals(
    encoder: InstructionEncoder, size: int, one: str, tree: str, how: tuple[Any, int], rounds: int
) -> dict[str, float]:
    """Measure speed, memory and differences of the ways to encode a batch."""
    pairs = pairs_of(size)
    ways = {
        "pairwise": way(encoder, pairs, ONE_BY_ONE[PAIRWISE]),
        "tuned": way(encoder, pairs, ONE_BY_ONE[one]),
        "tree": way(encoder, pairs, how),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    found: dict[str, tuple[Tensor, list[Tensor]]] = {}
    for _ in range(rounds):
        for name, encoded in ways.items():
            result: list[Tensor] = []
            times[name].append(
                seconds(lambda e=encoded, r=result: r.append(forward_and_backward(encoder, e)), encoder.device)
            )
            gradients = [p.grad for p in encoder.parameters() if p.grad is not None]
            found[name] = (result[0], gradients)
    (one_embeddings, one_gradients), (tree_embeddings, tree_gradients) = found["pairwise"], found["tree"]
    tokens = (
        sum(map(len, pairs)),
        sum(layout.input_ids.numel() for _, layout in how[0](pairs, how[1])),
    )
    pairwise_s, tuned_s, tree_s = (statistics.median(of_way) for of_way in times.values())
    figures = {
        "speedup": pairwise_s / tree_s,
        "vs_tuned": tuned_s / tree_s,
        "token_ratio": tokens[0] / tokens[1],
        "memory": kept_bytes(encoder, ways["pairwise"]) / kept_bytes(encoder, ways["tree"]),
        "embeddings": float((one_embeddings - tree_embeddings).abs().max()),
        "gradients": max(
            float((a - b).abs().max() / a.abs().max()) for a, b in zip(one_gradients, tree_gradients, strict=True)
        ),
    }
    print(
        f"  B = {size}: {tokens[0]} tokens pairwise in {pairwise_s:.2f} s, tuned ({one}) in {tuned_s:.2f} s; {tokens[1]} as "
        f"trees ({tree}) in {tree_s:.2f} s: {tokens[0] / tokens[1]:.2f} times fewer, {figures['speedup']:.2f} and "
        f"{figures['vs_tuned']:.2f} times faster, {figures['memory']:.2f} times less memory; differences {figures['embeddings']:.1e}, {figures['gradients']:.1e}",
        flush=True,
    )
    return figures


def engine_of(model: str, options: argparse.Namespace) -> Engine:
    """Return the engine of `infembed train` with one worker, with a random decoder and MiniLM's tokenizer."""
    config, backbone, shape = MODELS[model]
    tokenizer = AutoTokenizer.from_pretrained(material.minilm())
    torch.manual_seed(0)
    decoder = backbone(config(**shape | {"vocab_size": len(tokenizer)})).to(options.device)
    gpus = 1 if options.device == "cuda" else 0
    settings = TrainSettings(
        records="-", model="-", output="-", workers=1, precision=options.dtype, gpus_per_worker=gpus
    )
    return Engine(InstructionEncoder(decoder, tokenizer, "last", TextFormat()), settings)


def steps(model: str, options: argparse.Namespace) -> dict[str, float]:
    """Measure the seconds of a training step of the product: the first of 8 workers' share of 32 real records."""
    chosen, source = material.records(32)
    shares = [chosen[rank::8] for rank in range(8)]
    ways = ("uni{P}", "multi{P,I}")
    times: dict[str, list[float]] = {name: [] for name in ways}
    tokens: dict[str, int] = {}
    engine = engine_of(model, options)
    engine.train()

    def step(objective: Objective, batch: Batch) -> None:
        queries, passages = engine.encode(batch.queries), engine.encode(batch.passages)
        scores = score_batch(objective, batch, queries, passages)
        engine.backward(
            marginal_loss(
                objective, scores.positive, scores.negatives, TrainSettings.model_fields["temperature"].default
            )
        )
        engine.update(1e-5)

    for number in range(options.rounds + 1):
        for name in ways:
            parsed = Objective.parse(name)
            batch = collate(engine.encoder, shares, 0, parsed, instruction_negatives=5, seed=str(number))
            times[name].append(seconds(lambda o=parsed, b=batch: step(o, b), engine.encoder.device))
            tokens[name] = int(engine.work.take()[1])
    medians = {name: statistics.median(of_way[1:]) for name, of_way in times.items()}
    figures = "; ".join(f"{name} {s:.2f} s for {tokens[name]} tokens" for name, s in medians.items())
    print(f"  step of 4 of 32 records ({source}): {figures}", flush=True)
    return medians


def measure(model: str, options: argparse.Namespace) -> dict[str, float]:
    print(f"{model}, {options.device}, {options.dtype}", flush=True)
    encoder = encoder_of(model, options)
    pairs = pairs_of(12)
    one, tree = fastest(encoder, pairs, ONE_BY_ONE), fastest(encoder, pairs, TREES)
    figures: dict[str, float] = {}
    differences = []
    for size in (12, 24):
        of_size = marginals(encoder, size, one, tree, TREES[tree], max(1, options.rounds - (size == 24)))
        figures |= {f"{name}_b{size}": of_size[name] for name in ("vs_tuned", "token_ratio", "speedup", "memory")}
        differences.append((of_size["embeddings"], of_size["gradients"]))
    figures["embedding_difference"], figures["gradient_difference"] = map(max, zip(*differences, strict=True))
    of_step = steps(model, options)
    figures["step_vs_uni_p"] = of_step["multi{P,I}"] / of_step["uni{P}"]
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, help="default: both tiny shapes")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--rounds", type=int, default=3, help="at B = 12; one fewer at B = 24")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}, one thread")
    models = [options.model] if options.model else ["qwen2-tiny", "llama-tiny"]
    of_models = [measure(model, options) for model in models]
    worse = {name: max for name in of_models[0] if "difference" in name or "step" in name}
    figures = {name: worse.get(name, min)(of[name] for of in of_models) for name in of_models[0]}
    print(json.dumps({name: float(f"{value:.3g}") for name, value in figures.items()}))


if __name__ == "__main__":
    main()
