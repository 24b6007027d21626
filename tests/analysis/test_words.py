import pytest
from hypothesis import given
from hypothesis import strategies as st

from infembed_ray.analysis.words import hashes, normalised

words = st.lists(st.sampled_from("abcdef"), max_size=12)


@given(words, words, st.integers(1, 5))
def test_hashes_are_equal_exactly_where_the_words_are(one, other, length):
    def runs(given_words):
        size = min(length, len(given_words))
        return [tuple(given_words[at : at + size]) for at in range(len(given_words) - size + 1)] if size else []

    known = dict(zip(hashes(one, length).tolist(), runs(one), strict=True))
    for number, run in zip(hashes(other, length).tolist(), runs(other), strict=True):
        assert known.get(number, run) == run
        assert (number in known) == (run in runs(one))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Caf\u00c9, cafe\u0301: snake_case", "caf\u00e9 caf\u00e9 snake case"),
        (
            "\u0939\u093f\u0928\u094d\u0926\u0940 \u0915\u0940",
            "\u0939\u093f\u0928\u094d\u0926\u0940 \u0915\u0940",
        ),  # vowel signs stay
        ("\u6211\u559c\u6b22\u3002GPT-4", "\u6211 \u559c \u6b22 gpt 4"),  # Chinese has no spaces
    ],
)
def test_words_of_other_scripts(text, expected):
    assert normalised(text) == expected


@given(st.text())
def test_normalising_twice_changes_nothing(text):
    plain = normalised(text)
    assert normalised(plain) == plain
    assert "  " not in plain
