from infembed_ray.quickstart.rankings import Ranking, side_by_side


def ranking(*ids):
    hits = [{"id": i, "score": 0.9 - n / 10, "text": f"text of {i}"} for n, i in enumerate(ids)]
    return Ranking("q", f"instruction for {ids[0]}", ids[0], hits)


def test_the_two_rankings_stand_side_by_side_and_the_wanted_passage_is_marked():
    text = side_by_side([ranking("a", "b"), ranking("b", "a", "c")])
    first = next(line for line in text.splitlines() if "0.900" in line)
    assert first.index("a  <- what was asked for") < first.index("b  <- what was asked for")
    assert text.count("<- what was asked for") == 2
    assert "text of c" in text


def test_obeyed_means_the_wanted_passage_is_first():
    assert ranking("a", "b").obeyed
    assert not Ranking("q", "i", "b", ranking("a", "b").hits).obeyed
    assert not Ranking("q", "i", "b", []).obeyed
