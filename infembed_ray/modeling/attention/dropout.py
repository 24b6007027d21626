"""Dropout of attention weights, which families of backbones name differently in their configuration."""

from __future__ import annotations

from typing import Any

from infembed_ray.errors import InputError

_NAMES = ("attention_probs_dropout_prob", "attention_dropout")


def attention_dropout(config: Any) -> float:
    """Return the attention dropout of a backbone's configuration; 0 if it has none."""
    return next((float(getattr(config, name)) for name in _NAMES if hasattr(config, name)), 0.0)


def set_attention_dropout(config: Any, dropout: float, model: str) -> None:
    """Replace the attention dropout in the configuration of a model that is not built yet; InputError if it has none."""
    name = next((name for name in _NAMES if hasattr(config, name)), None)
    if name is None:
        raise InputError(f"attention_dropout={dropout}: the configuration of {model} has none; leave it out")
    setattr(config, name, dropout)
