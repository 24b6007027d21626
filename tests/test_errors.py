"""Mistakes that are found together."""

import pickle

import pytest

from infembed_ray.errors import InputError, check_all


def fails(*messages):
    def check():
        raise InputError(*messages)

    return check


def test_all_checks_run_and_each_message_is_kept_once():
    ran = []
    with pytest.raises(InputError) as error:
        check_all(fails("a=1: bad"), lambda: ran.append("middle"), fails("b=2: bad", "a=1: bad"))
    assert ran == ["middle"]
    assert error.value.args == ("a=1: bad", "b=2: bad")
    assert str(error.value) == "a=1: bad; b=2: bad"


def test_the_results_keep_their_order():
    assert check_all(lambda: 1, lambda: None, lambda: "x") == [1, None, "x"]


def test_other_errors_are_not_collected():
    with pytest.raises(ZeroDivisionError):
        check_all(fails("a=1: bad"), lambda: 1 / 0)


def test_several_mistakes_survive_a_pickle():
    assert pickle.loads(pickle.dumps(InputError("a", "b"))).args == ("a", "b")
