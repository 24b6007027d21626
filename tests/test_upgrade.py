"""Outputs of version 0.1 under this version: what is read, and what is refused with its remedy.

The files in tests/files/0.1 were written by the code of this repository's history: `records`, `model`, `index-1` and `journal`
by commit e59cc4c, the first with all stages; `index-2` by 1a32d06, the last before format 3.
"""

import shutil
from pathlib import Path

import numpy as np
import pytest

from infembed_ray import Index, InputError, InstructionEncoder, load_records
from infembed_ray.cli.runs import print_runs
from infembed_ray.llm.chat import Request
from infembed_ray.llm.journal import Journal

FILES = Path(__file__).parent / "files" / "0.1"
REQUEST = Request(
    "gpt-4o-mini",
    ({"role": "user", "content": "Write an instruction."},),
    "instruction_generation=1",
    "instruction_positive",
    "0",
    {"max_tokens": 1000},
)


@pytest.fixture
def made(tmp_path):
    return Path(shutil.copytree(FILES, tmp_path / "made"))


def test_records_are_read(made):
    records = load_records(made / "records")
    assert [record.id for record in records] == ["0", "1", "2", "3"]
    assert records[3].document_positive == "aspirin twice a day 3"
    assert {record.source for record in records} == {"msmarco"}


def test_a_checkpoint_gives_the_same_embeddings(made):
    encoder = InstructionEncoder.from_pretrained(str(made / "model"))
    found = encoder.encode_queries(["how much aspirin"], ["only doses for nurses"])
    np.testing.assert_allclose(found, np.load(made / "vectors.npy"), atol=1e-6)


def test_a_journal_answers_the_same_request_without_a_call(made):
    completion = Journal(made / "journal").get(REQUEST.key)
    assert completion is not None
    assert (completion.text, completion.replayed) == ("Only doses, für Pflegende.", True)
    assert (completion.prompt_tokens, completion.completion_tokens, completion.cached_tokens) == (12, 5, 0)


def test_an_index_of_format_2_is_read_and_one_of_format_1_is_refused_with_the_remedy(made):
    encoder = InstructionEncoder.from_pretrained(str(made / "model"))
    index = Index.open(made / "index-2", encoder.fingerprint())
    assert index.facts.format == 2
    passage = encoder.encode_passages(["bread is baked"])
    assert index.search(passage, k=1)[0][0].text == "bread is baked"
    with pytest.raises(InputError, match=r"an index of format 1, .* build it again with `infembed index`, or use the"):
        Index.open(made / "index-1")


def test_manifests_are_listed(made, capsys):
    print_runs(str(made))
    said = capsys.readouterr().out
    for stage in ("synthesize", "train", "index"):
        assert stage in said
