"""Calibration: which runtime and precision run a replica's encoder, by measurement when it starts.

The candidates are torch and ONNX Runtime in float32, torch in bfloat16 where the CPU has instructions for it, and ONNX
Runtime in int8. The fastest runs whose embeddings have at least the cosine `min_cosine` with those of torch in float32.
The measurements are kept in the user's cache directory, under the encoder's fingerprint and the CPU's instructions. A
later start builds the fastest candidate only, and checks its cosine again.
"""

from __future__ import annotations

import copy
import hashlib
import importlib.util
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from infembed_ray import durable
from infembed_ray.config.serving import ServeSettings
from infembed_ray.errors import InputError, in_one_line
from infembed_ray.modeling import onnx
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.modeling.layout import Tokens
from infembed_ray.modeling.precision import cpu_capabilities, cpu_has_bf16
from infembed_ray.progress import say
from infembed_ray.serving.encoder.runtime import (
    VERSIONS,
    OnnxRuntime,
    Runtime,
    TorchRuntime,
    cache_directory,
    graphs,
    threads,
)
from infembed_ray.serving.encoder.vllm_runtime import VllmRuntime, require_vllm

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


class Measured(NamedTuple):
    """What the calibration found of a candidate."""

    seconds: float
    """Time for the probes."""
    cosine: float
    """Smallest cosine of a probe's embedding with that of torch in float32."""


class Choice(NamedTuple):
    """The runtime of a replica, and the measurements behind it."""

    runtime: Runtime
    candidate: Candidate
    measured: Mapping[Candidate, Measured]
    """Empty if the settings or the hardware leave no choice."""


REFERENCE = Candidate("torch", "float32")


def require_runnable(encoder: InstructionEncoder, settings: ServeSettings, model: str) -> None:
    """InputError if the settings demand a runtime that cannot run this encoder. Starts nothing."""
    if settings.runtime == "vllm":
        require_vllm(encoder, settings, model)
    elif settings.runtime == "onnx" or settings.dtype == "int8":
        _require_onnx(encoder, settings, model)


def choose(encoder: InstructionEncoder, settings: ServeSettings, model: str) -> Choice:
    """Return the fastest runtime that the settings allow.

    If torch does not run in the encoder's own precision, its weights are freed: from then on it can only tokenise.

    Args:
        encoder: on its device, in its precision; without weights for vLLM.
        settings: runtime, dtype, floor, threads, batches and memory.
        model: its name in messages.

    Raises:
        InputError: the settings demand a runtime that cannot run this encoder or gives different vectors.
    """
    if settings.runtime == "vllm":
        vllm = VllmRuntime(encoder, settings, model)
        return Choice(vllm, Candidate("vllm", vllm.dtype), {})
    candidates = _candidates(encoder, settings, model)
    in_torch = TorchRuntime(encoder, settings.batch_tokens, settings.prefix_cache_mib * 2**20)
    if encoder.dtype != torch.float32 or candidates == [REFERENCE]:
        return Choice(in_torch, Candidate("torch", str(encoder.dtype).removeprefix("torch.")), {})
    calibration = _Calibration(in_torch, encoder, settings, candidates)
    if not calibration.close:
        cosines = ", ".join(f"{candidate} {m.cosine:.4f}" for candidate, m in calibration.measured.items())
        raise InputError(
            f"runtime={settings.runtime} dtype={settings.dtype}: gives different vectors for {model} (smallest cosine: "
            f"{cosines}); set runtime=torch dtype=float32, or lower min_cosine={settings.min_cosine:g}"
        )
    measured = calibration.measured
    candidate = min(calibration.close, key=lambda c: measured[c].seconds)
    figures = ", ".join(f"{c} {1e3 * m.seconds:.0f} ms and cosine {m.cosine:.5f}" for c, m in measured.items())
    say(f"serve: the encoder runs in {candidate} ({figures})")
    if candidate != REFERENCE:
        encoder.to("meta")
    return Choice(calibration.close[candidate], candidate, measured)


def probes(encoder: InstructionEncoder) -> list[Tokens]:
    """Return passages of `PROBE_LENGTHS` tokens, up to the encoder's maximum length, shortest first."""
    several = [tokens.ids for tokens in encoder.tokenize_passages([text * 50 for text in _PROBE_TEXTS])]
    lengths = [length for length in PROBE_LENGTHS if length <= len(several[0])]
    cut = [(several[turn % len(several)], length) for turn, length in enumerate(lengths)]
    return [Tokens(ids[: length - 1] + ids[-1:]) for ids, length in cut]


def _candidates(encoder: InstructionEncoder, settings: ServeSettings, model: str) -> list[Candidate]:
    """Return the candidates that the settings and this machine allow, except those that cannot run the encoder."""
    found = [REFERENCE, Candidate("onnx", "float32")]
    if settings.dtype == "bfloat16" or (settings.dtype == "auto" and cpu_has_bf16()):
        found.append(Candidate("torch", "bfloat16"))
    if settings.dtype == "int8" or settings.min_cosine <= INT8_COSINE:
        found.append(Candidate("onnx", "int8"))
    found = [c for c in found if settings.runtime in ("auto", c.runtime) and settings.dtype in ("auto", c.dtype)]
    if REFERENCE in found and settings.gpus_per_encoder:
        return [REFERENCE]
    if REFERENCE in found and sum(p.numel() for p in encoder.parameters()) > MAX_PARAMETERS:
        return [REFERENCE]
    try:
        if not found or any(candidate.runtime == "onnx" for candidate in found):
            _require_onnx(encoder, settings, model)
    except InputError as error:  # torch runs every model; export and ONNX Runtime do not
        if REFERENCE not in found:
            raise
        say(f"serve: the encoder runs in torch ({in_one_line(error)})")
        found = [candidate for candidate in found if candidate.runtime == "torch"]
    return found


class _Calibration:
    """Builds and measures candidates.

    Attributes:
        close: the built candidates with at least `min_cosine`.
        measured: what is known of each candidate.
    """

    def __init__(
        self, in_torch: Runtime, encoder: InstructionEncoder, settings: ServeSettings, candidates: Sequence[Candidate]
    ) -> None:
        self._in_torch, self._encoder, self._settings = in_torch, encoder, settings
        self.close: dict[Candidate, Runtime] = {}
        self.measured: dict[Candidate, Measured] = {}
        record, texts = _record(encoder, settings), probes(encoder)
        known = _read(record)
        if set(candidates) <= set(known):
            self._embed_reference(texts[: len(texts) // 2 + 1])
            self._take_fastest({candidate: known[candidate] for candidate in candidates})
        if not self.close:
            self._embed_reference(texts)
            self._measure(candidates, record)

    def _embed_reference(self, texts: list[Tokens]) -> None:
        self._texts = texts
        self._vectors = np.concatenate([self._in_torch.embed([text]) for text in texts])

    def _take_fastest(self, known: dict[Candidate, Measured]) -> None:
        """Build the fastest candidate of an earlier start; build none if it fails or is no longer close."""
        near = [candidate for candidate in known if known[candidate].cosine >= self._settings.min_cosine]
        if near:
            fastest = min(near, key=lambda candidate: known[candidate].seconds)
            with suppress(Exception):
                runtime = self._build(fastest)
                known[fastest] = known[fastest]._replace(cosine=self._cosine(runtime))
                if known[fastest].cosine >= self._settings.min_cosine:
                    self.close, self.measured = {fastest: runtime}, known

    def _measure(self, candidates: Sequence[Candidate], record: Path) -> None:
        """Build and measure all candidates, and record the measurements."""
        built: dict[Candidate, Runtime] = {}
        cosines: dict[Candidate, float] = {}
        for candidate in candidates:
            try:
                built[candidate] = self._build(candidate)
                cosines[candidate] = self._cosine(built[candidate])
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
                seconds[candidate] = min(seconds[candidate], _seconds(built[candidate], self._texts))
        self.close = {c: built[c] for c in cosines if cosines[c] >= self._settings.min_cosine}
        self.measured = {candidate: Measured(seconds[candidate], cosines[candidate]) for candidate in cosines}
        if len(cosines) == len(candidates):
            with suppress(OSError):  # without a cache, the next start measures again
                record.parent.mkdir(parents=True, exist_ok=True)
                with durable.replacing(record, shared=True) as stream:
                    stream.write(json.dumps([[*c, *m] for c, m in self.measured.items()]).encode())

    def _build(self, candidate: Candidate) -> Runtime:
        if candidate == REFERENCE:
            return self._in_torch
        if candidate.runtime == "onnx":
            return OnnxRuntime(graphs(self._encoder, candidate.dtype == "int8"), threads(self._settings))
        tokenizer = self._encoder.tokenizer
        converted = copy.deepcopy(self._encoder, {id(tokenizer): tokenizer}).to(getattr(torch, candidate.dtype))
        return TorchRuntime(converted, self._settings.batch_tokens, self._settings.prefix_cache_mib * 2**20)

    def _cosine(self, runtime: Runtime) -> float:
        """Return the smallest cosine between each probe alone in the reference and all probes in one batch."""
        return float((self._vectors * runtime.embed(self._texts)).sum(axis=1).min())


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
    onnx.require_exportable(encoder, model)
    if importlib.util.find_spec("onnxruntime") is None:
        raise InputError("onnxruntime is not installed; pip install 'infembed-ray[onnx]', or set runtime=torch")


def _seconds(runtime: Runtime, texts: list[Tokens]) -> float:
    """Time a short text alone, and batches of 16 and of 64 tokens a text, as a busy replica has them."""
    start = time.perf_counter()
    for batch in [texts[1:2], *([text] * (BUSY_TOKENS // len(text)) for text in texts[2:6:3])]:
        runtime.embed(batch)
    return time.perf_counter() - start


def _record(encoder: InstructionEncoder, settings: ServeSettings) -> Path:
    """Return the file of measurements of this encoder on this kind of machine."""
    machine = json.dumps([cpu_capabilities(), threads(settings), VERSIONS], sort_keys=True)
    digest = hashlib.sha256(machine.encode()).hexdigest()[:16]
    return cache_directory() / "calibration" / f"{encoder.fingerprint()}-{digest}.json"


def _read(record: Path) -> dict[Candidate, Measured]:
    """Return recorded measurements; none if there are none or they are damaged."""
    with suppress(OSError, ValueError, TypeError):
        rows = json.loads(record.read_bytes())
        return {Candidate(runtime, dtype): Measured(seconds, cosine) for runtime, dtype, seconds, cosine in rows}
    return {}
