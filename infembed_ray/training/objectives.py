"""The marginal contrastive objectives of InF-Embed (paper, section 5.2 and appendix C, Eq. 6-21), and Eq. 1 beside them.

Pure functions of similarities and masks; encoding is somebody else's work.

A training tuple i is a matched (P_i, I_i, Q_i). With one variable exchanged at a time, its negatives are

    P   s(P_m, I_i, Q_i) = iq_ii . p_m      other passages
    I   s(P_i, I_j, Q_i) = p_i . iq_ji      the same query under other instructions
    IQ  s(P_i, I_k, Q_k) = p_i . iq_kk      other instruction-query pairs (Eq. 10-21)
     or s(P_i, I_i, Q_k) = p_i . iq_ik      other queries under the same instruction (Eq. 6-7)

`uni` sums one cross-entropy a variable (Eq. 6, 8-14); `multi` is one cross-entropy whose denominator holds the
negatives of all variables (Eq. 7, 15-21). The official code names the two the other way round; this module follows
the equations. `nce{PIQ}` exchanges all three at once, for comparison: the denominator of Eq. 1 over all
s(P_m, I_j, Q_k) = p_m . iq_jk, cubic in the batch, so small batches only.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast, get_args

import torch
from torch import Tensor

from infembed_ray.config import TrainSettings, Variable, nearest
from infembed_ray.errors import InputError

Kind = Literal["uni", "multi", "nce"]

MOST_JOINT_TEXTS = 1024
"""Of a step of `nce{PIQ}`: 16 records have 32 instructions and 32 queries, and 48 rows make 48 ** 3 scores each."""


@dataclass(frozen=True)
class Objective:
    """One of the fourteen, `kind` over a non-empty set of contrasted variables in the order P, I, IQ; or `nce{PIQ}`."""

    kind: Kind
    variables: tuple[Variable, ...]

    @classmethod
    def parse(cls, name: str) -> Objective:
        """Read `uni{P}`, `multi{P,I}`, ... or `nce{PIQ}`.

        Raises:
            InputError: no such objective; the nearest one is named.
        """
        match = re.fullmatch(r"(\w+)\{([A-Z, ]+)\}", name.strip())
        asked = [part.strip() for part in match[2].split(",")] if match else []
        ordered = tuple(v for v in get_args(Variable) if v in asked)
        known = (*ALL_OBJECTIVES, NCE)
        if match is None or len(asked) != len(ordered) or cls(cast(Kind, match[1]), ordered) not in known:
            raise InputError(f"objective={name!r}: no such objective: {nearest(name, map(str, known))}")
        return cls(cast(Kind, match[1]), ordered)

    @classmethod
    def of(cls, settings: TrainSettings) -> Objective:
        """The objective of a run.

        Raises:
            InputError: there is none of that name, or a setting asks for what it does not have.
        """
        objective = cls.parse(settings.objective)
        variables = objective.variables
        if "I" in variables and settings.instruction_negatives == 0:
            raise InputError(
                f"instruction_negatives=0: {objective} contrasts instructions; set at least 1, or drop I from it"
            )
        if settings.iq_negatives == "ik" and "IQ" not in variables:
            raise InputError(f"iq_negatives=ik: {objective} does not contrast IQ; leave it out, or add IQ to it")
        if settings.same_tower_negatives and "P" not in variables:
            raise InputError(
                f"same_tower_negatives=true: {objective} has no P term for them to join; leave it out, or add P to it"
            )
        for variable in settings.term_weights:
            if variable not in variables:
                raise InputError(
                    f"term_weights.{variable}: {objective} has no such term; give weights of {', '.join(variables)}"
                )
        if settings.teacher_margin and settings.teacher is None:
            raise InputError(
                f"teacher_margin={settings.teacher_margin}: there is no teacher; set teacher, or leave it out"
            )
        screened = {"P", "IQ"} if settings.iq_negatives == "kk" else {"P"}
        if settings.teacher is not None and not screened & set(variables):
            raise InputError(f"teacher={settings.teacher}: screens P and iq_kk, which {objective} lacks; leave it out")
        records = settings.records_per_step
        texts = (2 * records) ** 2
        if objective == NCE and settings.tokens_per_step is None and texts > MOST_JOINT_TEXTS:
            raise InputError(
                f"objective={objective}: {records} records a step have up to {texts} joint texts, every instruction "
                f"with every query; {MOST_JOINT_TEXTS} at most are affordable: lower records_per_step"
            )
        return objective

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
_KINDS: tuple[Kind, ...] = ("uni", "multi")
ALL_OBJECTIVES = tuple(Objective(kind, subset) for kind in _KINDS for subset in _SUBSETS)
NCE = Objective("nce", ("PIQ",))


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
    temperature: float | Tensor,
    count_positive_once: bool = True,
    weights: Mapping[Variable, float] | None = None,
    label_smoothing: float = 0.0,
) -> Tensor:
    """The objective of a batch (Eq. 6-21), averaged over its B tuples.

    Args:
        objective: which one.
        positive: (B,) similarities sim(p_i, iq_ii).
        negatives: the candidates of every variable of the objective.
        temperature: similarities are divided by it. A tensor of one element gets its gradient.
        count_positive_once: `multi` only. The paper's sums run over the whole batch, so each of the |y| sums of the
            denominator holds the positive once: literally |y| times. True counts it once, as the official code does.
        weights: positive weight w_v of a variable, 1 where none is given. `uni`: a factor on its cross-entropy.
            `multi`: a factor on its sum in the denominator, log w_v on its logits; the positive, where it is counted
            literally, is in every sum and so counts sum(w_v) times.
        label_smoothing: share e of the target that goes evenly to all candidates of a softmax: the positive and its
            negatives, each once, of one variable for `uni`, of all together for `multi`. Every cross-entropy
            log(denominator) - z_i becomes log(denominator) - (1 - e) z_i - e mean(z), z being the logits.

    Returns:
        Scalar loss in the dtype of `positive`.
    """
    weight = {variable: (weights or {}).get(variable, 1.0) for variable in objective.variables}
    logits = {v: negatives[v].similarities / temperature for v in objective.variables}
    own = positive / temperature
    if objective.kind == "uni":
        terms = [w * _cross_entropy(own, 1.0, logits[v], negatives[v].mask, label_smoothing) for v, w in weight.items()]
        return torch.stack(terms).sum(dim=0).mean()
    together = torch.cat([logits[v] + math.log(w) for v, w in weight.items()], dim=1)
    mask = torch.cat([negatives[v].mask for v in weight], dim=1)
    copies = 1.0 if count_positive_once else sum(weight.values())
    return _cross_entropy(own, copies, together, mask, label_smoothing).mean()


def _cross_entropy(own: Tensor, copies: float, logits: Tensor, mask: Tensor, smoothing: float) -> Tensor:
    """(B,) cross-entropies of the positive, counted `copies` times in the denominator, among (B, N) masked logits."""
    # The positive's own column keeps the maximum finite, and so the gradient, where a row has no negative at all.
    counted = torch.cat([(own + math.log(copies)).unsqueeze(1), logits.masked_fill(~mask, -torch.inf)], dim=1)
    denominator = torch.logsumexp(counted, dim=1)
    if not smoothing:
        return denominator - own
    mean = (own + logits.masked_fill(~mask, 0.0).sum(dim=1)) / (1 + mask.sum(dim=1))
    return denominator - (1 - smoothing) * own - smoothing * mean
