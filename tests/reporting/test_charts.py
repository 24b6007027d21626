import math
import re
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from infembed_ray.reporting.charts import (
    MAX_POINTS,
    Scale,
    Series,
    bar,
    line_chart,
    moving_average,
    number,
    tick_labels,
    ticks,
)
from tests.support.pages import Page

VALUES = st.floats(-1e8, 1e8) | st.floats(-1e-4, 1e-4).filter(lambda value: value == 0 or abs(value) > 1e-12)


@given(VALUES, VALUES)
@example(0.31, 1.92)
@example(1e-12, 5e-5)
@example(2.0, 2.0)
@example(0.0, 0.0)
@example(-3.0, 8e4)
@example(0.0, 5e-324)
def test_ticks_are_few_round_distinct_evenly_spaced_and_just_enclose_the_values(one, other):
    low, high = min(one, other), max(one, other)
    values = ticks(low, high)
    low, high = (0.0 if abs(end) < 1e-290 else end for end in (low, high))
    spacing = values[1] - values[0]
    assert 3 <= len(values) <= 7
    assert {round((b - a) / spacing, 4) for a, b in pairwise(values)} == {1.0}
    digits = round(spacing / 10 ** math.floor(math.log10(spacing * 1.0001)), 4)
    assert digits in (1, 2, 5)
    assert all(abs(value / spacing - round(value / spacing)) < 1e-3 for value in values)
    assert values[0] <= low + 1e-6 * spacing
    assert values[-1] >= high - 1e-6 * spacing
    if high - low > 1e-9 * max(abs(low), abs(high)):  # otherwise the axis has a width of its own
        assert values[0] > low - 1.001 * spacing
        assert values[-1] < high + 1.001 * spacing


def test_close_ticks_have_the_decimals_they_need():
    assert tick_labels(ticks(0.99985, 1.0001)) == ["0.9998", "0.9999", "1.0000", "1.0001"]
    assert tick_labels(ticks(0, 5e-5)) == ["0", "2e-5", "4e-5", "6e-5"]
    assert tick_labels(ticks(12_345, 12_347)) == ["12,345.0", "12,345.5", "12,346.0", "12,346.5", "12,347.0"]


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (0, "0"),
        (1.23456, "1.235"),
        (0.05, "0.05"),
        (5e-5, "5e-5"),
        (1.25e-7, "1.25e-7"),
        (24772.4, "24,772"),
        (-2.5, "-2.5"),
    ],
)
def test_numbers_have_four_significant_digits(value, written):
    assert number(value) == written


def test_a_scale_maps_to_percent_and_clips():
    scale = Scale.enclosing([-1.0, 0.5, 3.0])
    assert [scale(v) for v in (-1.0, 0.0, 3.0, 9.0)] == [0, 25, 100, 100]
    assert Scale.enclosing([2.0, 2.0]) == Scale(2.0, 3.0)


def test_bars_start_at_zero_and_point_in_the_direction_of_their_sign():
    scale = Scale(-50, 150)
    shapes = [re.search(r'x="([-.\d]*)" y="1" width="(.*?)"', bar(value, scale, "")).groups() for value in (100, -50)]
    assert shapes == [("25.0", "50.0"), ("0.0", "25.0")]
    whisker = re.findall(r'class="whisker" x1="(.*?)" x2="(.*?)"', bar(1, scale, "", interval=(0, 50)))
    assert whisker[0] == ("25.0", "50.0")


def test_a_line_chart_has_its_points_axes_events_and_first_and_last_values():
    series = [Series("a <b>", [(1, 2.0), (3, 4.0)]), Series("c", [(1, 1.0)])]
    html = line_chart("Loss", series, (1, 3), [(2, "stop")], x_title="epochs")
    page = Page(html)
    assert page.text.split() == [
        "1",
        "2",
        "3",
        "4",
        "1",
        "2",
        "3",
        "epochs",
        *("a", "<b>", "from", "2", "to", "4"),
        *("c", "from", "1", "to", "1"),
    ]
    assert 'class="curve s0" d="M0.0 66.67L100.0 0.0"' in html
    assert 'class="curve s1" d="M0.0 100.0h0"' in html  # a single point is a dot
    assert '<line class="event stop" x1="50.0" x2="50.0" y1="0" y2="100"/>' in html
    assert page.attributes("svg")[0]["aria-label"] == "Loss: a <b> from 2 to 4; c from 1 to 1"


def test_a_long_series_is_drawn_as_means_before_the_band_of_its_values():
    html = line_chart("Loss", [Series("a", [(n, float(n % 2)) for n in range(10 * MAX_POINTS)])], (0, 10 * MAX_POINTS))
    points = re.search(r'class="curve s0" d="M(.*?)"', html)[1].split("L")
    assert len(points) == MAX_POINTS
    assert len({point.split(" ")[1] for point in points}) == 1
    band = re.search(r'class="band s0" d="M(.*?)Z"', html)[1].split("L")
    assert {point.split(" ")[1] for point in band} == {"0.0", "100.0"}


@given(st.lists(st.floats(-1e300, 1e300), min_size=1, max_size=60), st.integers(0, 12))
@example([1.0] * 10 + [1e17] + [1.0] * 40, 3)  # with sums over the whole series, all later means are 0
def test_a_moving_average_lies_between_the_smallest_and_the_largest_value_of_its_window(values, half):
    for at, mean in enumerate(moving_average(values, 2 * half + 1)):
        window = values[max(0, at - half) : at + half + 1]
        rounding = 1e-15 * max(map(abs, window))
        assert min(window) - rounding <= mean <= max(window) + rounding
