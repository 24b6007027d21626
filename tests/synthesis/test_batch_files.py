import json
from pathlib import Path

import pytest

from infembed_ray.llm.chat import RunFailure
from infembed_ray.synthesis.batch_files import NoAnswer, RequestBatch, pending, read_answers
from tests.support.chat import request


def test_a_batch_is_read_as_it_was_prepared_and_is_pending_until_it_is_collected(tmp_path: Path) -> None:
    requests = [request(text, row=text) for text in "ab"]
    batch = RequestBatch.prepare(tmp_path, "http://here/v1", requests, 0.5)
    file = batch.path("json")
    assert RequestBatch.load(file) == batch
    assert list(batch.read()) == requests
    for stage, is_pending in (("prepared", False), ("submitting", True), ("submitted", True)):
        batch.save(stage=stage)
        assert RequestBatch.load(file).stage == stage
        assert pending(tmp_path) == ([file] if is_pending else [])
    batch.discard()
    assert list(tmp_path.iterdir()) == []


def test_an_unreadable_line_leaves_only_its_own_request_unanswered(tmp_path: Path) -> None:
    message = {"content": "half \ud83d"}
    body = {"choices": [{"message": message}], "usage": {"prompt_tokens": float("inf")}}
    lines = [
        json.dumps({"custom_id": "good", "response": {"status_code": "200", "body": body}}),
        " ",
        '{"custom_id": "deep", "response": %s}' % ("[" * 10_000 + "]" * 10_000),
        json.dumps({"custom_id": "odd", "response": {"status_code": 400, "body": "no \ud83d"}, "error": "no"}),
        json.dumps({"custom_id": "bare", "response": {"status_code": 200}}),
    ]
    file = tmp_path / "output"
    file.write_text("\n".join(lines) + "\n")
    answers, faults = read_answers([file])
    assert set(answers) == {"good"}
    good = answers["good"]
    assert (good.text, good.prompt_tokens, good.batched) == ("half ?", 0, True)
    assert faults == {
        "odd": NoAnswer("HTTP 400: no", refused=True, body=b'{"error": "no"}'),
        "bare": NoAnswer("the response is no chat completion (a page, a stream, or cut short)"),
    }


def test_a_damaged_file_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "output").write_text('{"custom_id": "a", "resp')
    with pytest.raises(RunFailure, match="file is damaged"):
        read_answers([tmp_path / "output"])
