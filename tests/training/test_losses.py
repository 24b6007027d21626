"""Objectives against a float64 reference in loops from the equations, and against other implementations."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sentence_transformers.losses import MultipleNegativesRankingLoss

from infembed_ray.config.training import TrainSettings
from infembed_ray.errors import InputError
from infembed_ray.training.losses import ALL_OBJECTIVES, Negatives, Objective, marginal_loss


def reference(objective, positive, candidates, temperature, once=True, weights=None):
    """Compute Eq. 8-21 row by row; `candidates[v][i]` lists the similarities of the negatives of row i."""
    weights = {v: (weights or {}).get(v, 1.0) for v in objective.variables}
    total = 0.0
    for i, own in enumerate(positive):
        e = math.exp(own / temperature)
        sums = {v: sum(math.exp(s / temperature) for s in candidates[v][i]) for v in objective.variables}
        if objective.kind == "uni":
            softmaxes = [(weights[v], e + sums[v]) for v in objective.variables]
        elif once:
            softmaxes = [(1.0, e + sum(weights[v] * sums[v] for v in sums))]
        else:
            softmaxes = [(1.0, sum(weights[v] * (e + sums[v]) for v in sums))]
        total -= sum(factor * math.log(e / denominator) for factor, denominator in softmaxes)
    return total / len(positive)


def random_case(seed, rows, width, keep=0.7):
    generator = torch.Generator().manual_seed(seed)
    positive = torch.rand(rows, generator=generator, dtype=torch.float64) * 2 - 1
    negatives = {}
    for variable, extra in (("P", 0), ("I", 1), ("IQ", 2)):
        similarities = torch.rand(rows, width + extra, generator=generator, dtype=torch.float64) * 2 - 1
        mask = torch.rand(rows, width + extra, generator=generator) < keep
        negatives[variable] = Negatives(similarities, mask)
    lists = {v: [n.similarities[i][n.mask[i]].tolist() for i in range(rows)] for v, n in negatives.items()}
    return positive, negatives, lists


def from_pairs(similarity, candidates=None):
    """Make scores from a matrix iq_ii . p_m, and optionally (B, N) I-candidates whose first column is the positive."""
    other = ~torch.eye(len(similarity), dtype=torch.bool)
    negatives = {"P": Negatives(similarity, other), "IQ": Negatives(similarity.T, other)}
    if candidates is not None:
        mask = torch.ones(candidates.shape, dtype=torch.bool)
        mask[:, 0] = False
        negatives["I"] = Negatives(candidates, mask)
    return similarity.diagonal(), negatives


def unit(*shape):
    return torch.nn.functional.normalize(torch.randn(*shape), dim=-1)


@given(
    st.sampled_from(ALL_OBJECTIVES),
    st.integers(0, 10_000),
    st.integers(1, 6),
    st.integers(0, 6),
    st.floats(0.0, 1.0),
    st.sampled_from([0.02, 0.05, 1.0]),
    st.booleans(),
    st.dictionaries(st.sampled_from(["P", "I", "IQ"]), st.floats(0.1, 10)),
)
def test_masks_and_weights_match_the_equations(objective, seed, rows, width, keep, temperature, once, weights):
    positive, negatives, lists = random_case(seed, rows, width, keep)
    loss = marginal_loss(objective, positive, negatives, temperature, once, weights)
    expected = reference(objective, positive.tolist(), lists, temperature, once, weights)
    assert loss.item() == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_losses_of_random_vectors_match_the_official_code():
    """The figures come from the official code, with `torch.manual_seed(0)`, 12 rows of 16 dimensions and 5 I-negatives.

    Its `map_add` is one cross-entropy per variable: `uni`, Eq. 8-14. Its `map` is one softmax over all candidates:
    `multi`. The README of the official code swaps the two names. `multi` literally is Eq. 18-21; `multi_once` counts the
    positive once, as the code does, which masks the positive in all but the first matrix.
    """
    torch.manual_seed(0)
    queries, passages, instructed = unit(12, 16), unit(12, 16), unit(12, 6, 16)
    instructed[:, 0] = queries  # the row's own pair is first
    positive, negatives = from_pairs(queries @ passages.T, torch.einsum("bd,bnd->bn", passages, instructed))
    temperature = 0.05 + 1e-4
    figures = {
        "P,IQ": (15.7349, 8.9741, 8.9564),
        "P,I": (14.7819, 9.0127, 8.9770),
        "I,IQ": (14.7549, 8.9282, 8.9109),
        "P,I,IQ": (22.6359, 9.5903, 9.5681),
    }
    for variables, (uni, multi, multi_once) in figures.items():

        def loss(kind, once=True, variables=variables):
            objective = Objective.parse(f"{kind}{{{variables}}}")
            return marginal_loss(objective, positive, negatives, temperature, once).item()

        assert loss("uni") == pytest.approx(uni, abs=1e-4)
        assert loss("multi", once=False) == pytest.approx(multi, abs=1e-4)
        assert loss("multi") == pytest.approx(multi_once, abs=1e-4)


@pytest.mark.parametrize("variables", ["P,IQ", "P,I", "I,IQ", "P,I,IQ"])
def test_uni_matches_official_map_add_and_multi_once_official_map(variables):
    """`map_add` adds cross-entropies of whole matrices; `map` concatenates them with the positive masked in all but one."""
    torch.manual_seed(1)
    queries, passages, instructed = unit(12, 32), unit(12, 32), unit(12, 6, 32)
    instructed[:, 0] = queries
    positive, negatives = from_pairs(queries @ passages.T, torch.einsum("bd,bnd->bn", passages, instructed))
    rows, first = torch.arange(12), torch.zeros(12, dtype=torch.long)
    chosen = [
        (negatives[v].similarities / 0.05, first if v == "I" else rows)
        for v in ("P", "IQ", "I")
        if v in variables.split(",")
    ]
    added = sum(torch.nn.functional.cross_entropy(matrix, label) for matrix, label in chosen)
    uni = marginal_loss(Objective.parse(f"uni{{{variables}}}"), positive, negatives, 0.05)
    torch.testing.assert_close(uni, added)
    (head, label), *others = chosen
    masked = [matrix.scatter(1, where.unsqueeze(1), -torch.inf) for matrix, where in others]
    joint = torch.nn.functional.cross_entropy(torch.cat([head, *masked], dim=1), label)
    multi = marginal_loss(Objective.parse(f"multi{{{variables}}}"), positive, negatives, 0.05)
    torch.testing.assert_close(multi, joint)


@pytest.mark.parametrize(
    ("objective", "partition", "factor"), [("multi{P,IQ}", "joint", 1), ("uni{P,IQ}", "per_direction", 2)]
)
def test_p_and_iq_match_sentence_transformers_in_value_and_gradient(objective, partition, factor):
    torch.manual_seed(2)
    theirs = MultipleNegativesRankingLoss(
        torch.nn.Identity(), scale=20.0, directions=("query_to_doc", "doc_to_query"), partition_mode=partition
    )
    queries, passages = (torch.randn(9, 16, dtype=torch.float64, requires_grad=True) for _ in range(2))
    expected = factor * theirs.compute_loss_from_embeddings([queries, passages], None)
    cosines = torch.nn.functional.normalize(queries, dim=1) @ torch.nn.functional.normalize(passages, dim=1).T
    loss = marginal_loss(Objective.parse(objective), *from_pairs(cosines), 0.05, count_positive_once=False)
    torch.testing.assert_close(loss, expected)
    for ours, other in zip(
        torch.autograd.grad(loss, [queries, passages]), torch.autograd.grad(expected, [queries, passages]), strict=True
    ):
        torch.testing.assert_close(ours, other)


def test_row_without_negatives_has_zero_loss_and_finite_gradient():
    positive = torch.tensor([0.3, 0.9], requires_grad=True)
    similarities = torch.zeros(2, 3, requires_grad=True)
    nothing = Negatives(similarities, torch.zeros(2, 3, dtype=torch.bool))
    for objective in (Objective.parse("uni{P}"), Objective.parse("multi{P}")):
        loss = marginal_loss(objective, positive, {"P": nothing}, 0.05)
        loss.backward()
        assert loss.item() == pytest.approx(0.0, abs=1e-6)
        assert torch.isfinite(positive.grad).all()
        assert torch.isfinite(similarities.grad).all()


def test_uni_and_multi_are_equal_for_one_variable():
    positive, negatives, _ = random_case(seed=5, rows=4, width=5)
    for variable in ("P", "I", "IQ"):
        uni, multi = (
            marginal_loss(Objective(kind, (variable,)), positive, negatives, 0.05) for kind in ("uni", "multi")
        )
        torch.testing.assert_close(uni, multi)


@pytest.mark.parametrize("name", ["multy{P,I}", "multi{P,Q}", "uni{}", "multi", "uni{P,P}", "nce{P}", "uni{PIQ}"])
def test_unknown_objective_error_names_the_nearest(name):
    with pytest.raises(InputError, match=r"no such objective: (did you mean|valid)"):
        Objective.parse(name)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"objective": "multi{P,I}", "instruction_negatives": 0}, "instruction_negatives=0: .* set at least 1"),
        ({"objective": "multi{P,I}", "iq_negatives": "ik"}, "iq_negatives=ik: .* does not contrast IQ"),
        (
            {"objective": "uni{P}", "term_weights": {"I": 2.0}},
            "term_weights.I: uni{P} has no such term; set weights of P",
        ),
        (
            {"objective": "nce{PIQ}", "records_per_step": 32},
            "records_per_step=32: up to 4096 joint texts",
        ),
    ],
)
def test_settings_that_do_not_fit_the_objective_are_rejected(changes, message):
    with pytest.raises(InputError, match=message.replace("{", r"\{").replace("}", r"\}")) as error:
        Objective.from_settings(TrainSettings(records="r", model="m", output="o", **changes))
    assert "\n" not in str(error.value)
