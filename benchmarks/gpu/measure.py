"""What the cases share: random models and texts, timing, memory, differences."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import torch
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2Model

import infembed_ray
from benchmarks.gpu.suite import Context
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.modeling.layout import Layout, pool
from infembed_ray.modeling.tokenizer import Tokens
from infembed_ray.training.observability.flops import Workload, peak_flops

GIB = 2**30
QUERY_LENGTH, PASSAGE_LENGTH = 256, 512
"""Largest lengths of the paper's official code."""
INSTRUCTION, QUERY, PASSAGE = 48, 11, 75
"""Mean tokens of the published records."""
SPREAD = 0.4
"""Standard deviation of the logarithm of a length."""
WORDS = [a + b for a in ascii_lowercase for b in ascii_lowercase]
"""Words that are one token each; see `tokenizer`."""
_KNOWN = Path(infembed_ray.__file__).parent / "planning" / "backbones.yaml"
_SMALLEST = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14}
_TINY = {
    "vocab_size": 2048,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def dtype_of(context: Context) -> torch.dtype:
    """Return bf16 on a GPU; fp32 on a CPU, where bf16 may be emulated."""
    return torch.bfloat16 if context.device == "cuda" else torch.float32


def config_of(size: str, context: Context, layers: int | None = None) -> Qwen2Config:
    """Return the configuration of Qwen2.5 in a size, with all layers or the first few."""
    known = yaml.safe_load(_KNOWN.read_text(encoding="utf-8"))
    shape = dict(known[f"Qwen/Qwen2.5-{'1.5B' if size == '0.5B' else size}"]["config"])
    shape |= _SMALLEST if size == "0.5B" else {}
    shape |= _TINY if context.tiny else {}
    if layers is not None and not context.tiny:
        shape["num_hidden_layers"] = layers
    del shape["model_type"]
    return Qwen2Config(**shape)


def backbone_of(
    size: str, context: Context, dtype: torch.dtype | None = None, layers: int | None = None, seed: int = 0
) -> Any:
    """Make a random Qwen2 on the device."""
    torch.manual_seed(seed)
    config = config_of(size, context, layers)
    config._attn_implementation = "sdpa"
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or dtype_of(context))
    try:
        with torch.device(context.device):
            return Qwen2Model(config)
    finally:
        torch.set_default_dtype(before)


def texts(
    count: int, mean: int, vocabulary: int, most: int = PASSAGE_LENGTH, seed: int = 0, prefix: Sequence[int] = ()
) -> list[Tokens]:
    """Make texts of random ids behind a common prefix; `mean` 0 makes all as long as `most`."""
    rng = random.Random(f"{seed}/{count}/{mean}")
    made = []
    for _ in range(count):
        length = most if mean == 0 else round(mean * rng.lognormvariate(-(SPREAD**2) / 2, SPREAD))
        length = max(1, min(length, most) - len(prefix))
        made.append(Tokens([*prefix, *(rng.randrange(1, vocabulary) for _ in range(length))]))
    return made


def sentence(length: int, rng: random.Random) -> str:
    """Make a text of some `WORDS`."""
    return " ".join(rng.choices(WORDS, k=length))


def tokenizer(family: str = "qwen2") -> PreTrainedTokenizerFast:
    """Make a tokenizer to which each of `WORDS` is one token.

    transformers 5 loads a saved tokenizer in the class of the model's family, which splits texts in its own way: at spaces
    (bert), or so that a word has the space before it (qwen2). The vocabulary fits that way.
    """
    if family == "bert":
        named = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
        names = (*named.values(), *WORDS)
        backend = Tokenizer(models.WordPiece({name: n for n, name in enumerate(names)}, unk_token="[UNK]"))
        backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        marks = [(mark, names.index(mark)) for mark in ("[CLS]", "[SEP]")]
        backend.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", special_tokens=marks)
    else:
        named = dict.fromkeys(("pad_token", "eos_token", "unk_token"), "<|endoftext|>")
        spaced = [f"Ġ{word}" for word in WORDS]
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        names = ("<|endoftext|>", *alphabet, *WORDS, *spaced)
        merges = [*map(tuple, WORDS), *(("Ġ", word) for word in WORDS)]
        backend = Tokenizer(models.BPE({name: n for n, name in enumerate(names)}, merges))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=PASSAGE_LENGTH, **named)


def read_by(model: Any, work: Callable[[], Any]) -> tuple[int, int]:
    """Return the number and the sum of the token ids, without padding, that a SentenceTransformer reads."""
    read: list[Tensor] = []

    def note(_: nn.Module, positional: tuple[Any, ...]) -> None:
        (features,) = positional
        ids, mask = features["input_ids"], features["attention_mask"]
        read.append(torch.stack([mask.sum(), (ids * mask).sum()]))

    hook = model[0].register_forward_pre_hook(note)
    try:
        work()
    finally:
        hook.remove()
    count, total = torch.stack(read).sum(dim=0).tolist()
    return count, total


def of_tokens(sequences: Iterable[Tokens]) -> tuple[int, int]:
    """Return the number and the sum of the ids of texts, as `read_by`."""
    ids = [i for tokens in sequences for i in tokens.ids]
    return len(ids), sum(ids)


def same_ids(found: tuple[int, int], expected: tuple[int, int]) -> dict[str, tuple[float, float]]:
    """Return the check that both sides of a ratio read the same ids."""
    return {"tokens read": (float(abs(found[0] - expected[0])), 0.0), "ids": (float(abs(found[1] - expected[1])), 0.0)}


def forward_flops(encoder: InstructionEncoder, sequences: Sequence[Tokens]) -> float:
    """Return the model FLOPs of embedding texts: a third of those of a step."""
    work = Workload(encoder)
    for _, layout in encoder.lay_out(sequences, 1 << 40, encoder.device, encoder.dtype):
        work.add(layout)
    return float(work.take()[2]) / 3


def mfu(flops: float, taken: float, context: Context) -> dict[str, float]:
    """Return the share of the device's peak, if it is known."""
    peak = peak_flops(torch.cuda.get_device_name(), torch.bfloat16) if context.device == "cuda" else None
    return {"MFU": flops / taken / peak} if peak else {}


def embed(backbone: nn.Module, passes: Iterable[tuple[list[int], Layout]], device: str) -> Tensor:
    """Embed the texts of some passes, in their own order: (texts, d) unit vectors with gradient."""
    rows, parts = [], []
    for group, layout in passes:
        rows += group
        placed = layout.to(torch.device(device))
        states = backbone(**placed.backbone_inputs(backbone), use_cache=False).last_hidden_state
        parts.append(nn.functional.normalize(pool(states, placed, "last").float(), dim=-1))
    return torch.cat(parts)[torch.tensor(rows).argsort().to(device)]


def gradients(backbone: nn.Module, encode: Callable[[], Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return embeddings, and the gradients of their products with fixed random vectors."""
    backbone.zero_grad()
    embeddings = encode()
    generator = torch.Generator().manual_seed(0)
    (embeddings * torch.randn(embeddings.shape, generator=generator).to(embeddings.device)).sum().backward()
    return embeddings.detach(), [p.grad.detach().clone() for p in backbone.parameters() if p.grad is not None]


def difference(found: Sequence[Tensor] | Tensor, expected: Sequence[Tensor] | Tensor) -> float:
    """Return |found - expected| / |expected|, over all tensors together."""
    pairs = list(zip(*((t,) if isinstance(t, Tensor) else t for t in (found, expected)), strict=True))
    off = sum((a.double() - b.double()).square().sum() for a, b in pairs)
    return float((off / sum(b.double().square().sum() for _, b in pairs)).sqrt())


def synchronize(context: Context) -> None:
    """Wait for the device."""
    if context.device == "cuda":
        torch.cuda.synchronize()


def seconds(work: Callable[[], Any], context: Context, rounds: int = 5, warm_up: int = 1) -> float:
    """Return the median seconds of some calls, fewer if the case's time ends; at least one is measured."""
    for _ in range(warm_up):
        work()
    synchronize(context)
    taken: list[float] = []
    while len(taken) < rounds and (not taken or context.left > 0):
        began = time.perf_counter()
        work()
        synchronize(context)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


class Peak:
    """Peak memory of the tensors on a GPU over a block; nothing on a CPU.

    Attributes:
        before, most: GiB at the start, and at the peak; NaN on a CPU.
    """

    def __init__(self, context: Context) -> None:
        self._measures = context.device == "cuda"
        self.before = self.most = float("nan")

    def __enter__(self) -> Peak:
        if self._measures:
            free()
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated() / GIB
        return self

    def __exit__(self, *_: object) -> None:
        if self._measures:
            torch.cuda.synchronize()
            self.most = torch.cuda.max_memory_allocated() / GIB


def allocated(context: Context) -> float:
    """Return GiB of the tensors on a GPU; NaN on a CPU."""
    return torch.cuda.memory_allocated() / GIB if context.device == "cuda" else float("nan")


def free() -> None:
    """Return memory of deleted tensors to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def if_measured(**figures: float) -> dict[str, float]:
    """Return the figures that are numbers; those of memory are not, on a CPU."""
    return {name: value for name, value in figures.items() if value == value}
