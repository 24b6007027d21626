from __future__ import annotations

import numpy as np
import pytest

from infembed_ray.retrieval.fusion import away, fuse
from tests.retrieval.vectors import unit_vectors


def test_scores_are_lowered_by_the_unwanted_part_up_to_a_factor_per_query() -> None:
    wanted, unwanted, passages = unit_vectors(3, 8, 1), unit_vectors(3, 8, 2), unit_vectors(20, 8, 3)
    moved = away(wanted, unwanted, 0.6)
    np.testing.assert_allclose(np.linalg.norm(moved, axis=1), 1, atol=1e-6)
    expected = wanted @ passages.T - 0.6 * unwanted @ passages.T
    ratio = (moved @ passages.T) / expected
    np.testing.assert_allclose(ratio, np.broadcast_to(ratio[:, :1], ratio.shape), rtol=1e-3)
    assert (ratio > 0).all()


def test_a_query_that_excludes_itself_stays() -> None:
    wanted = unit_vectors(1, 8)
    np.testing.assert_allclose(away(wanted, wanted, 1.0), wanted)


def test_fused_scores_are_weighted_means_with_relative_bm25() -> None:
    dense, lexical = np.array([0.8, 0.4, 0.6], np.float32), np.array([0.0, 12.0, 3.0], np.float32)
    assert fuse(dense, lexical, 0.25).tolist() == pytest.approx([0.6, 0.55, 0.5125])
    assert fuse(dense, lexical, 1.0).tolist() == pytest.approx([0, 1, 0.25])


def test_without_words_in_common_the_cosine_decides() -> None:
    dense = np.array([0.1, 0.3], np.float32)
    assert fuse(dense, np.zeros(2, np.float32), 0.5).argmax() == 1
    assert len(fuse(dense[:0], dense[:0], 0.5)) == 0
