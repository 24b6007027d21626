"""Contrastive losses of InF-Embed over instruction, query and passage (paper, section 5.2 and appendix C, Eq. 6-21; Eq. 1).

All are pure functions of similarities and masks.

A training tuple i is a matched (P_i, I_i, Q_i). Its negatives exchange one variable at a time:

    P   s(P_m, I_i, Q_i) = iq_ii . p_m      other passages
    I   s(P_i, I_j, Q_i) = p_i . iq_ji      the same query under other instructions
    IQ  s(P_i, I_k, Q_k) = p_i . iq_kk      other instruction-query pairs (Eq. 10-21)
     or s(P_i, I_i, Q_k) = p_i . iq_ik      other queries under the same instruction (Eq. 6-7)

`uni` sums one cross-entropy per variable (Eq. 6, 8-14); `multi` is a single cross-entropy whose denominator holds the
negatives of all variables (Eq. 7, 15-21). The official code swaps the two names; this module follows the equations.
`nce{PIQ}` exchanges all three at once, for comparison: the denominator of Eq. 1 over all s(P_m, I_j, Q_k) =
p_m . iq_jk. It is cubic in the batch size, so batches must be small.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Literal, cast, get_args

import torch
from torch import Tensor

from infembed_ray.config.base import nearest
from infembed_ray.config.training import TrainSettings, Variable
from infembed_ray.errors import InputError

Kind = Literal["uni", "multi", "nce"]

MOST_JOINT_TEXTS = 1024
"""Limit of a step of `nce{PIQ}`: 16 records have 32 x 32 joint texts, and 48 rows with 48 ** 3 scores each."""


@dataclass(frozen=True)
class Objective:
    """One of the fourteen objectives, `kind` over a non-empty set of variables in the order P, I, IQ; or `nce{PIQ}`."""

    kind: Kind
    variables: tuple[Variable, ...]

    @classmethod
    def parse(cls, name: str) -> Objective:
        """Parse `uni{P}`, `multi{P,I}`, ... or `nce{PIQ}`.

        Raises:
            InputError: there is no such objective; the message names the nearest one.
        """
        match = re.fullmatch(r"(\w+)\{([A-Z, ]+)\}", name.strip())
        asked = [part.strip() for part in match[2].split(",")] if match else []
        ordered = tuple(v for v in get_args(Variable) if v in asked)
        objectives = (*ALL_OBJECTIVES, NCE)
        if match is None or len(asked) != len(ordered) or cls(cast(Kind, match[1]), ordered) not in objectives:
            raise InputError(f"objective={name!r}: no such objective: {nearest(name, map(str, objectives))}")
        return cls(cast(Kind, match[1]), ordered)

    @classmethod
    def from_settings(cls, settings: TrainSettings) -> Objective:
        """Return the objective of a run.

        Raises:
            InputError: there is no such objective, or another setting does not fit it.
        """
        objective = cls.parse(settings.objective)
        variables = objective.variables
        if "I" in variables and settings.instruction_negatives == 0:
            fault = f"instruction_negatives=0: {objective} contrasts instructions; set at least 1, or drop I from it"
            raise InputError(fault)
        if settings.iq_negatives == "ik" and "IQ" not in variables:
            raise InputError(f"iq_negatives=ik: {objective} does not contrast IQ; leave it out, or add IQ to it")
        for variable in settings.term_weights:
            if variable not in variables:
                fault = f"term_weights.{variable}: {objective} has no such term; set weights of {', '.join(variables)}"
                raise InputError(fault)
        texts = (2 * settings.records_per_step) ** 2
        if objective == NCE and texts > MOST_JOINT_TEXTS:
            most = f"up to {texts} joint texts of {objective} (every instruction with every query)"
            fault = f"{most}, more than the limit of {MOST_JOINT_TEXTS}"
            raise InputError.of("records_per_step", settings.records_per_step, fault, "lower records_per_step")
        return objective

    def __str__(self) -> str:
        return f"{self.kind}{{{','.join(self.variables)}}}"


_VARIABLES: tuple[Variable, ...] = ("P", "I", "IQ")
_KINDS: tuple[Kind, ...] = ("uni", "multi")
_SUBSETS = [subset for size in (1, 2, 3) for subset in combinations(_VARIABLES, size)]
ALL_OBJECTIVES = tuple(Objective(kind, subset) for kind in _KINDS for subset in _SUBSETS)
NCE = Objective("nce", ("PIQ",))


@dataclass(frozen=True)
class Negatives:
    """(B, N) similarities of one variable's candidates; the mask is True for a negative, not the positive's duplicates."""

    similarities: Tensor
    mask: Tensor


def marginal_loss(
    objective: Objective,
    positive: Tensor,
    negatives: Mapping[Variable, Negatives],
    temperature: float,
    count_positive_once: bool = True,
    weights: Mapping[Variable, float] | None = None,
) -> Tensor:
    """Compute the objective of a batch (Eq. 6-21), averaged over its B tuples.

    Args:
        objective: Objective to compute.
        positive: (B,) similarities sim(p_i, iq_ii).
        negatives: Candidates of every variable of the objective.
        temperature: Divisor of the similarities.
        count_positive_once: `multi` only. In the paper each of the |y| sums of the denominator runs over the whole batch
            and includes the positive, so that it counts |y| times. True counts it once, as the official code does.
        weights: Positive weight w_v of a variable, 1 by default. `uni`: a factor on its cross-entropy. `multi`: a factor
            on its sum in the denominator, log w_v on its logits; a positive counted as in the paper counts sum(w_v)
            times.

    Returns:
        Scalar loss in the dtype of `positive`.
    """
    weight = {variable: (weights or {}).get(variable, 1.0) for variable in objective.variables}
    logits = {v: negatives[v].similarities / temperature for v in objective.variables}
    own = positive / temperature
    if objective.kind == "uni":
        terms = [w * _cross_entropy(own, 1.0, logits[v], negatives[v].mask) for v, w in weight.items()]
        return torch.stack(terms).sum(dim=0).mean()
    together = torch.cat([logits[v] + math.log(w) for v, w in weight.items()], dim=1)
    mask = torch.cat([negatives[v].mask for v in weight], dim=1)
    copies = 1.0 if count_positive_once else sum(weight.values())
    return _cross_entropy(own, copies, together, mask).mean()


def _cross_entropy(own: Tensor, copies: float, logits: Tensor, mask: Tensor) -> Tensor:
    """Return (B,) cross-entropies of the positive, counted `copies` times in the denominator, among (B, N) masked logits."""
    # The column of the positive keeps maximum and gradient finite in a row without negatives.
    counted = torch.cat([(own + math.log(copies)).unsqueeze(1), logits.masked_fill(~mask, -torch.inf)], dim=1)
    return torch.logsumexp(counted, dim=1) - own
