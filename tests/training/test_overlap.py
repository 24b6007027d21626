"""Overlap dropout: which words of an instruction are dropped or replaced, by what, and when."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from infembed_ray.config.training import TrainSettings
from infembed_ray.errors import InputError
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.training.collate import drawn
from infembed_ray.training.overlap import OverlapDropout, check, similar_words, whole_words
from infembed_ray.training.preparation import Preparer
from tests.training.test_collate import example, record

RIVERS = replace(
    record(0),
    instruction_positive="Explain rivers to a farmer; no TIDES, no maps.",
    instruction_negative="Tides farming",  # all of it is in the passages
    document_positive="A river flows past the farmers' land. It is no map.",
    hard_negative_document_1="The tide turns twice a day.",
    hard_negative_document_2="To explore a tidal basin",
)


def test_overlap_dropout_drops_the_words_that_instructions_share_with_passages():
    got = drawn(RIVERS, None, "0", OverlapDropout(1.0))
    # "farmer" and "farmers" begin alike; "no" and "to" are short; "Explain" and "explore" differ; "map" is not "maps".
    assert got.instruction_positive == "Explain to a ; no , no maps."
    assert got.instruction_negative == "farming"
    assert replace(got, **{n: getattr(RIVERS, n) for n in ("instruction_positive", "instruction_negative")}) == RIVERS
    assert drawn(RIVERS, None, "0") == drawn(RIVERS, None, "0", OverlapDropout(0.0)) == RIVERS
    everything = replace(RIVERS, instruction_negative="Tides, river")
    assert drawn(everything, None, "0", OverlapDropout(1.0)).instruction_negative == ","
    emptied = replace(RIVERS, instruction_negative="tides")
    assert drawn(emptied, None, "0", OverlapDropout(1.0)).instruction_negative == "tides"


def test_overlap_dropout_of_an_example_compares_both_instructions_with_all_its_passages():
    fields = {"instruction": "without wrong words", "negative_instruction": "only answers"}
    got = drawn(example(0, **fields), None, "0", OverlapDropout(1.0))
    assert (got.instruction, got.negative_instruction) == ("without words", "only")
    assert drawn(example(0), 0, "0", OverlapDropout(1.0)).instruction is None


def test_a_similar_word_that_no_passage_has_replaces_a_common_word():
    similar = {"rivers": ("farms", "stream", "creek"), "farmer": ("tidal",)}
    got = drawn(RIVERS, None, "0", OverlapDropout(1.0, 1.0, similar))
    # "farms" and "tidal" are words of the passages; TIDES has no similar word.
    assert got.instruction_positive in ("Explain stream to a ; no , no maps.", "Explain creek to a ; no , no maps.")
    assert got.instruction_negative == "farming"


def test_replacements_are_drawn_anew_at_each_step_with_their_probability():
    similar = {"rivers": ("brook", "creek", "gully", "canal", "ditch", "delta")}
    dropout = OverlapDropout(1.0, 0.7, similar)
    words = Counter(drawn(RIVERS, None, f"7/{n}", dropout).instruction_positive.split()[1] for n in range(1000))
    assert set(words) == {"brook", "creek", "gully", "canal", "ditch", "to"}  # the five nearest, or none
    assert 257 < words["to"] < 343  # 300 expected, three standard deviations of 14.5
    assert all(100 < words[word] < 180 for word in ("brook", "ditch"))  # 140 expected


def test_similar_words_are_the_nearest_of_the_vocabulary_with_other_letters():
    at = {"rivers": 0, "river": 2, "stream": 10, "creek": -20, "riverside": 5, "tides": 90, "canal": 50, "marsh": 70}
    asked = []

    def encode_queries(words):
        asked.append(words)
        angles = np.radians([at.get(word, 180) for word in words])
        return np.stack([np.cos(angles), np.sin(angles)], axis=1)

    vocabulary = ["river", "riverside", "stream", "creek", "canal", "marsh", "sea", "##ness", "Paris", "2019", "[SEP]"]
    encoder = SimpleNamespace(tokenizer=word_pieces(vocabulary), encode_queries=encode_queries)
    got = similar_words(encoder, [RIVERS, example(0)])
    assert got["rivers"] == ("stream", "creek", "canal")  # cos 70 is below 0.4; "sea" is too short
    assert set(got) == {"rivers", "farmer", "tides"}  # the words that the passages have, too
    assert asked == [["canal", "creek", "marsh", "river", "riverside", "stream"], ["farmer", "rivers", "tides"]]


def word_pieces(tokens):
    vocabulary = {token: n for n, token in enumerate(["[UNK]", *tokens])}
    backend = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@pytest.mark.parametrize(("mark", "decoder"), [("Ġ", decoders.ByteLevel()), ("▁", decoders.Metaspace())])
def test_whole_words_begin_a_word(mark, decoder):
    # In bytes, é is "Ã©": only a byte-level tokenizer reads it so.
    tokens = [
        f"{mark}river",
        "rivers",
        f"{mark}cafÃ©s" if mark == "Ġ" else f"{mark}cafés",
        f"{mark}sea",
        f"{mark}Paris",
    ]
    backend = Tokenizer(models.WordLevel({token: n for n, token in enumerate(tokens)}, unk_token="sea"))
    backend.decoder = decoder
    assert whole_words(PreTrainedTokenizerFast(tokenizer_object=backend)) == ["cafés", "river"]


def test_a_batch_has_the_replacements(minilm):
    encoder = InstructionEncoder.from_pretrained(minilm)
    given = {"records": "-", "model": "-", "output": "-", "workers": 1, "objective": "uni{P,I}"}
    settings = TrainSettings(**given, overlap_dropout=1.0, overlap_synonyms=1.0, instruction_negatives=1)
    batch = Preparer(settings, [RIVERS], 0, encoder, {"rivers": ("stream",)}).prepare((0, [[0]])).batch
    texts = {encoder.tokenizer.decode(q.ids, skip_special_tokens=True) for q in batch.queries}
    assert "explain stream to a ; no, no maps. query 0" in texts


def test_replacements_without_dropout_are_an_error():
    given = {"records": "-", "model": "-", "output": "-"}
    with pytest.raises(
        InputError, match=r"^overlap_synonyms=0.7: replaces words that overlap_dropout drops, .* set over"
    ):
        check(TrainSettings(**given, overlap_synonyms=0.7))
    check(TrainSettings(**given, overlap_synonyms=0.7, overlap_dropout=0.5))
