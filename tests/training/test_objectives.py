"""The objectives against a float64 reference written as loops from Eq. 8-21."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infembed_ray.errors import InputError
from infembed_ray.training.objectives import ALL_OBJECTIVES, Negatives, Objective, marginal_loss


def reference(objective, positive, candidates, temperature, once):
    """Eq. 8-21 row by row. `candidates[v][i]` lists the negatives' similarities of row i."""
    total = 0.0
    for i, own in enumerate(positive):
        e = math.exp(own / temperature)
        sums = [sum(math.exp(s / temperature) for s in candidates[v][i]) for v in objective.variables]
        if objective.kind == "uni":
            total += sum(-math.log(e / (e + s)) for s in sums)
        else:
            copies = 1 if once else len(sums)
            total += -math.log(e / (copies * e + sum(sums)))
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


@pytest.mark.parametrize("objective", ALL_OBJECTIVES, ids=str)
@pytest.mark.parametrize("once", [True, False])
def test_every_objective_equals_the_equations(objective, once):
    positive, negatives, lists = random_case(seed=1, rows=7, width=9)
    loss = marginal_loss(objective, positive, negatives, 0.05, once)
    assert loss.item() == pytest.approx(reference(objective, positive.tolist(), lists, 0.05, once), rel=1e-9)


@settings(max_examples=50, deadline=None)
@given(
    st.sampled_from(ALL_OBJECTIVES),
    st.integers(0, 10_000),
    st.integers(1, 6),
    st.integers(0, 6),
    st.floats(0.0, 1.0),
    st.sampled_from([0.02, 0.05, 1.0]),
    st.booleans(),
)
def test_any_masking_equals_the_equations(objective, seed, rows, width, keep, temperature, once):
    positive, negatives, lists = random_case(seed, rows, width, keep)
    loss = marginal_loss(objective, positive, negatives, temperature, once)
    assert loss.item() == pytest.approx(reference(objective, positive.tolist(), lists, temperature, once), abs=1e-9)


@pytest.mark.parametrize("objective", ALL_OBJECTIVES, ids=str)
def test_gradients_equal_finite_differences(objective):
    positive, negatives, _ = random_case(seed=3, rows=3, width=4)

    def loss(p, *similarities):
        given_ = {v: Negatives(s, negatives[v].mask) for v, s in zip(objective.variables, similarities, strict=True)}
        return marginal_loss(objective, p, given_, 0.5)

    inputs = [positive.requires_grad_()]
    inputs += [negatives[v].similarities.clone().requires_grad_() for v in objective.variables]
    assert torch.autograd.gradcheck(loss, inputs)


def test_a_row_without_negatives_costs_nothing_and_has_a_finite_gradient():
    positive = torch.tensor([0.3, 0.9], requires_grad=True)
    similarities = torch.zeros(2, 3, requires_grad=True)
    nothing = Negatives(similarities, torch.zeros(2, 3, dtype=torch.bool))
    for objective in (Objective.parse("uni{P}"), Objective.parse("multi{P}")):
        loss = marginal_loss(objective, positive, {"P": nothing}, 0.05)
        loss.backward()
        assert loss.item() == pytest.approx(0.0, abs=1e-6)
        assert torch.isfinite(positive.grad).all()
        assert torch.isfinite(similarities.grad).all()


def test_uni_and_multi_are_the_same_over_one_variable():
    positive, negatives, _ = random_case(seed=5, rows=4, width=5)
    for variable in ("P", "I", "IQ"):
        uni, multi = (
            marginal_loss(Objective(kind, (variable,)), positive, negatives, 0.05) for kind in ("uni", "multi")
        )
        torch.testing.assert_close(uni, multi)


@pytest.mark.parametrize("name", [str(o) for o in ALL_OBJECTIVES])
def test_names_round_trip(name):
    assert str(Objective.parse(name)) == name


def test_variables_may_come_in_any_order_and_with_spaces():
    assert str(Objective.parse("multi{IQ, P}")) == "multi{P,IQ}"


@pytest.mark.parametrize("name", ["multy{P,I}", "multi{P,Q}", "uni{}", "multi", "uni{P,P}"])
def test_an_unknown_objective_is_refused_with_the_nearest_name(name):
    with pytest.raises(InputError, match=r"no such objective: (did you mean|valid)"):
        Objective.parse(name)
