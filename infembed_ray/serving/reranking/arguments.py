"""Checks of the re-ranking settings before anything starts; they become the arguments of the reranker's application."""

from __future__ import annotations

import json
from pathlib import Path

from infembed_ray.config.serving import RerankSettings, ServeSettings
from infembed_ray.errors import InputError
from infembed_ray.modeling import checkpoint
from infembed_ray.serving.release import RerankerArguments

BATCH_TOKENS = 4096
"""Largest number of tokens in a batch, with padding."""


def resolve(settings: ServeSettings, served: str) -> RerankerArguments | None:
    """Check the settings of the re-ranking stage; None: there is none. No weights are loaded.

    Args:
        settings: of the API.
        served: directory, URI or hub name of the served encoder.

    Raises:
        InputError: there is no such model, or it is not of the kind that the settings name.
    """
    rerank = settings.rerank
    if rerank is None:
        return None
    if rerank.kind == "late_interaction":
        return _late_interaction(settings, rerank, served)
    return _cross_encoder(settings, rerank)


def _late_interaction(settings: ServeSettings, rerank: RerankSettings, served: str) -> RerankerArguments:
    if isinstance(rerank.model, dict):
        raise InputError(
            "rerank.model: a mapping of settings is for rerank.kind=cross_encoder; give an encoder's directory, or null"
        )
    from infembed_ray.modeling.encoder import InstructionEncoder

    path = checkpoint.locate(rerank.model or served, "rerank.model").path
    encoder = InstructionEncoder.from_pretrained(checkpoint.local(path), device="meta")
    if encoder.interaction is not None:
        raise InputError(
            f"rerank.kind=late_interaction: {path} encodes instruction and query separately "
            "(interaction=cross_attention); give another checkpoint as rerank.model"
        )
    return RerankerArguments(model=path, fingerprint=encoder.fingerprint(), settings=settings)


def _cross_encoder(settings: ServeSettings, rerank: RerankSettings) -> RerankerArguments:
    from infembed_ray.evaluation.retrievers import baselines
    from infembed_ray.modeling.rerankers import KINDS

    if rerank.model is None:
        raise InputError(
            "rerank.model: missing; rerank.kind=cross_encoder needs a model: a directory, a hub name, a baseline, or a "
            "mapping of settings with `kind`"
        )
    given = rerank.model
    if isinstance(given, str) and given not in baselines.entries():
        path = checkpoint.locate(given, "rerank.model").path
        given = {"kind": "classifier", "model": path, "instructed_query": "{instruction} {query}"}
        given |= {"plain_query": "{query}"}
    reranker = baselines.resolve("rerank", given, where="rerank.model")
    if reranker.kind not in KINDS:
        raise InputError(
            f"rerank.model: is of kind {reranker.kind}, which does not read query and passage together; give a model of "
            f"kind classifier, causal or seq2seq, or set rerank.kind=late_interaction for an encoder"
        )
    path = checkpoint.locate(reranker.model, "rerank.model", reranker.revision).path
    if Path(path).is_absolute():
        KINDS[reranker.kind](reranker, "meta", BATCH_TOKENS, "")  # raises if model and kind do not fit
    own = reranker.model_dump(mode="json", exclude_defaults=True, exclude={"baseline"})
    fingerprint = checkpoint.fingerprint(path, json.dumps(reranker.identity(), sort_keys=True))
    return RerankerArguments(model=path, fingerprint=fingerprint, reranker=own, settings=settings)
