"""The marginal contrastive objectives of InF-Embed (paper, section 5.2 and appendix C, Eq. 8-21).

Pure functions of similarities and masks; encoding is somebody else's work.

A training tuple i is a matched (P_i, I_i, Q_i). With one variable exchanged at a time, its negatives are

    P   s(P_m, I_i, Q_i) = iq_ii . p_m      other passages
    I   s(P_i, I_j, Q_i) = p_i . iq_ji      the same query under other instructions
    IQ  s(P_i, I_k, Q_k) = p_i . iq_kk      other instruction-query pairs (Eq. 10-21; Eq. 6-7 print iq_ik)

`uni` sums one cross-entropy a variable (Eq. 6, 8-14); `multi` is one cross-entropy whose denominator holds the
negatives of all variables (Eq. 7, 15-21). The official code names the two the other way round; this module follows
the equations.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast, get_args

import torch
from torch import Tensor

from infembed_ray.config import nearest
from infembed_ray.errors import InputError

Variable = Literal["P", "I", "IQ"]
Kind = Literal["uni", "multi"]
VARIABLES: tuple[Variable, ...] = get_args(Variable)


@dataclass(frozen=True)
class Objective:
    """One of the fourteen: `kind` over a non-empty set of contrasted variables, in the order P, I, IQ."""

    kind: Kind
    variables: tuple[Variable, ...]

    @classmethod
    def parse(cls, name: str) -> Objective:
        """Read `uni{P}`, `multi{P,I}`, ...

        Raises:
            InputError: no such objective; the nearest one is named.
        """
        match = re.fullmatch(r"(uni|multi)\{([A-Z, ]+)\}", name.strip())
        asked = [part.strip() for part in match[2].split(",")] if match else []
        if match is None or not set(asked) <= set(VARIABLES) or len(set(asked)) != len(asked):
            raise InputError(
                f"objective={name!r}: no such objective: {nearest(name, (str(o) for o in ALL_OBJECTIVES))}"
            )
        return cls(cast(Kind, match[1]), tuple(v for v in VARIABLES if v in asked))

    def __str__(self) -> str:
        return f"{self.kind}{{{','.join(self.variables)}}}"


_SUBSETS: tuple[tuple[Variable, ...], ...] = (
    ("P",),
    ("I",),
    ("IQ",),
    ("P", "I"),
    ("P", "IQ"),
    ("I", "IQ"),
    ("P", "I", "IQ"),
)
ALL_OBJECTIVES = tuple(Objective(kind, subset) for kind in get_args(Kind) for subset in _SUBSETS)


@dataclass(frozen=True)
class Negatives:
    """Similarities of one variable's candidates, and which of them are negatives.

    Attributes:
        similarities: (B, N) cosine similarities.
        mask: (B, N) bool, True where the candidate is a negative. The positive itself and its duplicates are False.
    """

    similarities: Tensor
    mask: Tensor


def marginal_loss(
    objective: Objective,
    positive: Tensor,
    negatives: Mapping[Variable, Negatives],
    temperature: float,
    count_positive_once: bool = True,
) -> Tensor:
    """The objective of a batch (Eq. 8-21), averaged over its B tuples.

    Args:
        objective: which one.
        positive: (B,) similarities sim(p_i, iq_ii).
        negatives: the candidates of every variable of the objective.
        temperature: similarities are divided by it.
        count_positive_once: `multi` only. The paper's sums run over the whole batch, so each of the |y| sums of the
            denominator holds the positive once: literally |y| times. True counts it once, as the official code does.

    Returns:
        Scalar loss in the dtype of `positive`.
    """
    scaled = positive / temperature
    sums = [_negative_logsumexp(negatives[variable], temperature) for variable in objective.variables]
    if objective.kind == "uni":
        return sum((torch.logaddexp(scaled, s) - scaled for s in sums), torch.zeros_like(scaled)).mean()
    copies = 1 if count_positive_once else len(sums)
    own = scaled + torch.log(torch.tensor(float(copies), dtype=scaled.dtype, device=scaled.device))
    return (torch.logsumexp(torch.stack([own, *sums]), dim=0) - scaled).mean()


def _negative_logsumexp(negatives: Negatives, temperature: float) -> Tensor:
    """(B,) log-sum-exp over the negatives of each row; the lowest finite number where a row has none.

    A finite floor, because the gradient of logsumexp over an all -inf row is NaN.
    """
    scaled = negatives.similarities / temperature
    floor = torch.finfo(scaled.dtype).min / 4
    if scaled.shape[1] == 0:
        return scaled.new_full((scaled.shape[0],), floor)
    return torch.logsumexp(scaled.masked_fill(~negatives.mask, floor), dim=1)
