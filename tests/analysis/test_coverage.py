import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.decomposition import PCA

from infembed_ray.analysis.coverage import GRID, coverage, principal_plane


def cloud(seed, n=40, d=5):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, d)) * np.arange(d, 0, -1) + rng.normal(size=d)


@given(st.integers(0, 2**32))
def test_the_plane_is_that_of_the_principal_components(seed):
    vectors = cloud(seed)
    points, explained = principal_plane(vectors)
    oracle = PCA(2, svd_solver="full").fit(vectors)
    assert np.abs(points) == pytest.approx(np.abs(oracle.transform(vectors)), abs=1e-8)
    assert explained == pytest.approx(oracle.explained_variance_ratio_)


def test_the_plane_does_not_depend_on_the_order_of_the_texts():
    vectors = cloud(1)
    order = np.random.default_rng(2).permutation(len(vectors))
    assert principal_plane(vectors[order])[0] == pytest.approx(principal_plane(vectors)[0][order])


def test_sets_share_one_square_and_their_cells_are_counted():
    sets = {"wide": cloud(3), "narrow": cloud(3)[:20] * 0.05}
    found = coverage("query", sets)
    points = {each.label: each.points for each in found.sets}
    both = np.array(points["wide"] + points["narrow"])
    assert (both.min(), both.max()) == (0.0, 1.0)
    assert {label: len(of_set) for label, of_set in points.items()} == {"wide": 40, "narrow": 20}
    cells = {
        label: {tuple(np.minimum(np.array(p) * GRID, GRID - 1).astype(int)) for p in ps} for label, ps in points.items()
    }
    assert {each.label: each.cells for each in found.sets} == {label: len(of_set) for label, of_set in cells.items()}
    assert found.cells == len(cells["wide"] | cells["narrow"])
    assert found.sets[0].cells > found.sets[1].cells


def test_equal_texts_fill_one_cell():
    found = coverage("query", {"one": np.ones((4, 3))})
    assert (found.cells, found.sets[0].cells) == (1, 1)
    assert np.isfinite(found.explained).all()
