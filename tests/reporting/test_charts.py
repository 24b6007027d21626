import re

from infembed_ray.reporting.charts import Scale, bar


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
