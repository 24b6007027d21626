"""Mistakes that are found together."""

import pickle

import pytest

from infembed_ray.errors import Fault, InputError, check_all


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
    assert check_all(lambda: 1, lambda: None, lambda: "x") == [1, None, "x"]


def test_other_errors_are_not_collected():
    with pytest.raises(ZeroDivisionError):
        check_all(fails("a=1: bad"), lambda: 1 / 0)


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (Fault("rate", 0, "must be above 0", "leave it out"), "rate=0: must be above 0; leave it out"),
        (Fault("seeds", None, "is missing"), "seeds: is missing"),
        (Fault("", None, "no stage"), "no stage"),
        ("no stage", "no stage"),
    ],
)
def test_a_fault_is_one_line(fault, text):
    assert str(fault) == text
    assert str(InputError(fault)) == text
    (kept,) = pickle.loads(pickle.dumps(InputError(fault))).faults
    assert kept == (fault if isinstance(fault, Fault) else Fault("", None, fault))


def test_a_section_and_another_name_of_a_setting():
    error = InputError(Fault("index.path", "/x", "no such file"), Fault("indexes", 2, "too many"), "no disk")
    assert str(error.within("serve.")) == "serve.index.path=/x: no such file; serve.indexes=2: too many; serve: no disk"
    renamed = "collections.news.path=/x: no such file; indexes=2: too many; collections.news: no disk"
    assert str(error.renamed("index", "collections.news")) == renamed
