"""Calibration: which runtime and precision run a replica's encoder, by measurement when it starts.

The candidates are torch and ONNX Runtime in float32, torch in bfloat16 where the CPU has instructions for it, and ONNX
Runtime in int8. The fastest runs whose embeddings have at least the cosine `min_cosine` with those of torch in float32.
The measurements are kept in the user's cache directory, under the encoder's fingerprint and the CPU's instructions, with
the embeddings of torch in float32. A later start builds the fastest candidate only, and checks its cosine again: for a graph
without torch.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import importlib.util
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from infembed_ray.config.serving import ServeSettings
from infembed_ray.errors import InputError, in_one_line
from infembed_ray.modeling.precision import cpu_capabilities, cpu_has_bf16
from infembed_ray.modeling.tokenizer import TextTokenizer, Tokens
from infembed_ray.progress import say
from infembed_ray.serving.encoder.known import KnownEncoder
from infembed_ray.serving.encoder.runtime import (
    VERSIONS,
    OnnxRuntime,
    Runtime,
    TorchRuntime,
    cache_directory,
    graph_files,
    graphs,
    threads,
)
from infembed_ray.storage import durable

if TYPE_CHECKING:
    from infembed_ray.modeling.encoder import InstructionEncoder

PROBE_LENGTHS = (4, 8, 16, 24, 32, 64, 96, 128, 256, 512)
"""Lengths in tokens of the texts that compare and warm up the runtimes."""
MAX_PARAMETERS = 1_000_000_000
"""Parameters above which nothing is measured, because it would take minutes."""
BUSY_TOKENS = 512
"""Tokens of a timed batch; small ones would favour the runtime with the least overhead."""
MAX_ROUNDS, TIMING_S = 3, 2.0
"""Rounds in which the candidates are timed, and the seconds after which no further round begins."""
INT8_COSINE = 0.995
"""Largest `min_cosine` at which int8 is a candidate; per-tensor scales of activations do not reach more."""
_PROBE_TEXTS = (
    "An instruction says what a query asks for besides its topic: which sources, which years, whose words. ",
    "def mean(xs): return sum(xs) / len(xs)  # raises ZeroDivisionError for []; see issue #1042 of 2019-03-07. ",
    "Give passages for a patient, in plain words; leave out dosages over 400 mg and anything about animals. ",
)


class Candidate(NamedTuple):
    """A way to run an encoder."""

    runtime: str
    dtype: str

    def __str__(self) -> str:
        return f"{self.runtime} {self.dtype}"


class Measurement(NamedTuple):
    """What the calibration measured of a candidate."""

    seconds: float
    """Time for the probes."""
    cosine: float
    """Smallest cosine of a probe's embedding with that of torch in float32."""


class Choice(NamedTuple):
    """The runtime of a replica, and the measurements behind it."""

    runtime: Runtime
    candidate: Candidate
    measured: Mapping[Candidate, Measurement]
    """Empty if the settings or the hardware leave no choice."""


REFERENCE = Candidate("torch", "float32")


def require_runnable(encoder: InstructionEncoder, settings: ServeSettings, model: str) -> None:
    """InputError if the settings demand a runtime that cannot run this encoder. Starts nothing."""
    if settings.runtime == "onnx" or settings.dtype == "int8":
        _require_onnx(encoder, settings, model)


def resume(known: KnownEncoder, settings: ServeSettings) -> Choice | None:
    """Return the graph that an earlier start measured as the fastest, without torch; None if there is none, or it fails.

    Args:
        known: the encoder.
        settings: runtime, dtype, floor and threads.
    """
    if settings.gpus_per_encoder:
        return None

    def build(candidate: Candidate) -> Runtime:
        if candidate.runtime != "onnx":
            raise LookupError(f"{candidate} needs torch")
        files = graph_files(known.fingerprint, known.backbones, candidate.dtype == "int8")
        return OnnxRuntime(files, threads(settings))

    return _Record(known.fingerprint, known.texts, settings).fastest(_allowed(settings), build)


def choose(encoder: InstructionEncoder, settings: ServeSettings, model: str) -> Choice:
    """Return the fastest runtime that the settings allow.

    If torch does not run in the encoder's own precision, its weights are freed: from then on it can only tokenise.

    Args:
        encoder: on its device, in its precision.
        settings: runtime, dtype, floor, threads, batches and memory.
        model: its name in messages.

    Raises:
        InputError: the settings demand a runtime that cannot run this encoder or gives different vectors.
    """
    candidates = _candidates(encoder, settings, model)
    in_torch = TorchRuntime(encoder, settings.batch_tokens, settings.prefix_cache_mib * 2**20)
    dtype = str(encoder.dtype).removeprefix("torch.")
    if dtype != REFERENCE.dtype or candidates == [REFERENCE]:
        return Choice(in_torch, Candidate("torch", dtype), {})
    record = _Record(encoder.fingerprint(), encoder.texts, settings)
    build = functools.partial(_build, in_torch=in_torch, encoder=encoder, settings=settings)
    choice = record.fastest(candidates, build) or _measure(candidates, build, record, settings, model)
    if choice.candidate != REFERENCE:
        encoder.to("meta")
    return choice


def probes(texts: TextTokenizer) -> list[Tokens]:
    """Return passages of `PROBE_LENGTHS` tokens, up to the encoder's maximum length, shortest first."""
    several = [tokens.ids for tokens in texts.tokenize_passages([text * 50 for text in _PROBE_TEXTS])]
    lengths = [length for length in PROBE_LENGTHS if length <= len(several[0])]
    cut = [(several[turn % len(several)], length) for turn, length in enumerate(lengths)]
    return [Tokens(ids[: length - 1] + ids[-1:]) for ids, length in cut]


def _allowed(settings: ServeSettings) -> list[Candidate]:
    """Return the candidates that the settings and this machine allow."""
    candidates = [REFERENCE, Candidate("onnx", "float32")]
    if settings.dtype == "bfloat16" or (settings.dtype == "auto" and cpu_has_bf16()):
        candidates.append(Candidate("torch", "bfloat16"))
    if settings.dtype == "int8" or settings.min_cosine <= INT8_COSINE:
        candidates.append(Candidate("onnx", "int8"))
    return [c for c in candidates if settings.runtime in ("auto", c.runtime) and settings.dtype in ("auto", c.dtype)]


def _candidates(encoder: InstructionEncoder, settings: ServeSettings, model: str) -> list[Candidate]:
    """Return the allowed candidates, except those that cannot run the encoder."""
    candidates = _allowed(settings)
    if REFERENCE in candidates and settings.gpus_per_encoder:
        return [REFERENCE]
    if REFERENCE in candidates and sum(p.numel() for p in encoder.parameters()) > MAX_PARAMETERS:
        return [REFERENCE]
    try:
        if not candidates or any(candidate.runtime == "onnx" for candidate in candidates):
            _require_onnx(encoder, settings, model)
    except InputError as error:  # torch runs every model; export and ONNX Runtime do not
        if REFERENCE not in candidates:
            raise
        say(f"serve: the encoder runs in torch ({in_one_line(error)})")
        candidates = [candidate for candidate in candidates if candidate.runtime == "torch"]
    return candidates


def _build(candidate: Candidate, in_torch: Runtime, encoder: InstructionEncoder, settings: ServeSettings) -> Runtime:
    """Build a candidate: `in_torch` for the reference."""
    import torch

    if candidate == REFERENCE:
        return in_torch
    if candidate.runtime == "onnx":
        return OnnxRuntime(graphs(encoder, candidate.dtype == "int8"), threads(settings))
    converted = copy.deepcopy(encoder, {id(encoder.tokenizer): encoder.tokenizer}).to(getattr(torch, candidate.dtype))
    return TorchRuntime(converted, settings.batch_tokens, settings.prefix_cache_mib * 2**20)


Build = Callable[[Candidate], Runtime]


class _Record:
    """The measurements of an encoder on this kind of machine; `texts` are the probes."""

    def __init__(self, fingerprint: str, texts: TextTokenizer, settings: ServeSettings) -> None:
        machine = json.dumps([cpu_capabilities(), threads(settings), VERSIONS])
        digest = hashlib.sha256(machine.encode()).hexdigest()[:16]
        self._file = cache_directory() / "calibration" / f"{fingerprint}-{digest}.json"
        self._floor, self.texts = settings.min_cosine, probes(texts)
        # Its fingerprint is its name: the graph and the kept reference may both be of weights that the hub has replaced.
        self._may_be_stale = fingerprint.startswith("hub:")

    def fastest(self, candidates: Sequence[Candidate], build: Build) -> Choice | None:
        """Return the fastest of the candidates; None if one is not recorded, or the fastest fails or is no longer close."""
        if self._may_be_stale:
            return None
        with suppress(Exception):
            recorded = json.loads(self._file.read_bytes())
            measured = {Candidate(*row[:2]): Measurement(*row[2:]) for row in recorded["measured"]}
            measured = {candidate: measured[candidate] for candidate in candidates}
            near = [candidate for candidate in measured if measured[candidate].cosine >= self._floor]
            fastest = min(near, key=lambda candidate: measured[candidate].seconds)
            runtime, half = build(fastest), len(self.texts) // 2 + 1
            cosine = _cosine(runtime, self.texts[:half], np.array(recorded["reference"][:half], np.float32))
            measured[fastest] = measured[fastest]._replace(cosine=cosine)
            if cosine >= self._floor:
                return _chosen(fastest, runtime, measured)
        return None

    def write(self, measured: Mapping[Candidate, Measurement], reference: np.ndarray) -> None:
        """Keep measurements and the reference's embeddings of the probes for later starts."""
        content = {"measured": [[*c, *m] for c, m in measured.items()], "reference": reference.tolist()}
        with suppress(OSError):  # without a cache, the next start measures again
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with durable.replacing(self._file, shared=True) as stream:
                stream.write(json.dumps(content).encode())


def _measure(
    candidates: Sequence[Candidate], build: Build, record: _Record, settings: ServeSettings, model: str
) -> Choice:
    """Build and measure all candidates, record the measurements, and return the fastest that is close enough."""
    texts, in_torch = record.texts, build(REFERENCE)
    reference = np.concatenate([in_torch.embed([text]) for text in texts])
    built: dict[Candidate, Runtime] = {}
    cosines: dict[Candidate, float] = {}
    for candidate in candidates:
        try:
            built[candidate] = build(candidate)
            cosines[candidate] = _cosine(built[candidate], texts, reference)
        except Exception as error:
            if REFERENCE not in candidates:
                raise
            say(f"serve: the encoder does not run in {candidate} ({in_one_line(error)})")
    seconds = {candidate: float("inf") for candidate in cosines}
    start = time.perf_counter()
    for turn in range(MAX_ROUNDS):  # in turn, so that other work on the machine slows all of them
        if turn and time.perf_counter() - start > TIMING_S:
            break
        for candidate in seconds:
            seconds[candidate] = min(seconds[candidate], _seconds(built[candidate], texts))
    measured = {candidate: Measurement(seconds[candidate], cosines[candidate]) for candidate in cosines}
    if len(cosines) == len(candidates):
        record.write(measured, reference)
    close = [candidate for candidate in cosines if cosines[candidate] >= settings.min_cosine]
    if not close:
        figures = ", ".join(f"{candidate} {m.cosine:.4f}" for candidate, m in measured.items())
        raise InputError(
            f"runtime={settings.runtime} dtype={settings.dtype}: gives different vectors for {model} (smallest cosine: "
            f"{figures}); set runtime=torch dtype=float32, or lower min_cosine={settings.min_cosine:g}"
        )
    fastest = min(close, key=lambda candidate: measured[candidate].seconds)
    return _chosen(fastest, built[fastest], measured)


def _chosen(candidate: Candidate, runtime: Runtime, measured: Mapping[Candidate, Measurement]) -> Choice:
    figures = ", ".join(f"{c} {1e3 * m.seconds:.0f} ms and cosine {m.cosine:.5f}" for c, m in measured.items())
    say(f"serve: the encoder runs in {candidate} ({figures})")
    return Choice(runtime, candidate, measured)


def _cosine(runtime: Runtime, texts: list[Tokens], reference: np.ndarray) -> float:
    """Return the smallest cosine between each probe alone in the reference and all probes in one batch."""
    return float((reference * runtime.embed(texts)).sum(axis=1).min())


def _require_onnx(encoder: InstructionEncoder, settings: ServeSettings, model: str) -> None:
    if settings.gpus_per_encoder:
        raise InputError(
            f"gpus_per_encoder={settings.gpus_per_encoder:g}: ONNX Runtime runs on CPUs only here; set runtime=torch"
        )
    if settings.dtype == "bfloat16" or (settings.dtype == "int8" and settings.runtime == "torch"):
        raise InputError(
            f"runtime={settings.runtime} dtype={settings.dtype}: ONNX Runtime has float32 and int8 here, and torch "
            "float32 and bfloat16; set runtime=auto, or dtype=auto"
        )
    from infembed_ray.modeling.onnx import require_exportable

    require_exportable(encoder, model)
    if importlib.util.find_spec("onnxruntime") is None:
        raise InputError("onnxruntime is not installed; pip install 'infembed-ray[onnx]', or set runtime=torch")


def _seconds(runtime: Runtime, texts: list[Tokens]) -> float:
    """Time a short text alone, and batches of 16 and of 64 tokens a text, as a busy replica has them."""
    start = time.perf_counter()
    for batch in [texts[1:2], *([text] * (BUSY_TOKENS // len(text)) for text in texts[2:6:3])]:
        runtime.embed(batch)
    return time.perf_counter() - start
