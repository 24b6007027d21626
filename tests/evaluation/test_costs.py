"""What is measured of a model's work becomes its speed, latency and cost."""

from __future__ import annotations

import math

import pytest

from infembed_ray.evaluation.costs import LATENCY, PAIRS, PASSAGES, QUERIES, RANK, SEARCH, SPEED, USD, Cost


def test_an_encoder_takes_the_time_of_its_texts_and_of_the_search() -> None:
    cost = Cost()
    cost.add(PASSAGES, 90, 6.0, math.nan)
    cost.add(QUERIES, 10, 4.0, math.nan)
    cost.add(SEARCH, 20, 1.0)

    assert cost.figures == {SPEED: 10.0, LATENCY: pytest.approx(0.4 + 0.05)}


def test_a_reranker_takes_the_time_of_the_pairs_of_a_query() -> None:
    cost = Cost(pairs_per_query=100.0)
    cost.add(PAIRS, 50, 5.0, math.nan)

    assert cost.figures == {SPEED: 10.0, LATENCY: pytest.approx(10.0)}


def test_a_remote_embedder_costs_what_was_paid() -> None:
    cost = Cost()
    cost.add(PASSAGES, 4, 2.0, 0.25)
    cost.add(PASSAGES, 4, 2.0, 0.5)

    assert cost.figures == {SPEED: 2.0, USD: 0.75}


def test_nothing_is_claimed_of_what_was_stored() -> None:
    cost = Cost()
    cost.add(SEARCH, 20, 1.0)

    assert cost.figures == {}


def test_bm25_has_a_latency_only() -> None:
    cost = Cost()
    cost.add(RANK, 20, 1.0)

    assert cost.figures == {LATENCY: 0.05}
