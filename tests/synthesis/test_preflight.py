from pathlib import Path
from typing import Any

import pytest

from infembed_ray.config.synthesis import SynthesizeSettings
from infembed_ray.errors import InputError
from infembed_ray.llm.journal import Journal
from infembed_ray.quickstart import sample
from infembed_ray.synthesis.preflight import check, prepare, require_all_journaled, resolve
from tests.support.chat import unreadable
from tests.synthesis.runs import settings

BOUNDED = {"generator": {"model": "gpt-4o-mini", "max_tokens": 150}, "judge": {"model": "o4-mini", "max_tokens": 50}}


def one_line(given: SynthesizeSettings) -> str:
    with pytest.raises(InputError) as error:
        check(resolve(given, *prepare(given)[:2]))
    message = str(error.value)
    assert "\n" not in message
    return message


def test_without_a_key_the_error_counts_seeds_and_names_models(no_key: None, seeds: Path, tmp_path: Path) -> None:
    message = one_line(settings(seeds, tmp_path / "out"))
    assert "endpoint.api_key_env=OPENAI_API_KEY: not set" in message
    assert "64 of 64 seeds need requests to gpt-4o-mini" in message
    assert "export OPENAI_API_KEY" in message
    assert "for a local server, set endpoint.base_url to its URL and endpoint.api_key_env=null" in message
    local = one_line(settings(seeds, tmp_path / "out", endpoint={"base_url": "http://localhost:8000/v1"}))
    assert "if http://localhost:8000/v1 needs no key, set endpoint.api_key_env=null" in local


def test_without_a_key_seeds_answered_by_the_journal_are_not_counted(no_key: None, tmp_path: Path) -> None:
    lines = sample.JOURNAL.read_bytes().splitlines(keepends=True)
    partly = tmp_path / "partly.jsonl"
    partly.write_bytes(b"".join(line for line in lines if b'"row": "sleep-01"' not in line))
    given = settings(
        sample.SEEDS,
        tmp_path / "out",
        replay=[str(partly)],
        generator={"model": "bundled-sample"},
        judge={"model": "bundled-sample"},
    )
    assert "1 of 144 seeds need requests to bundled-sample" in one_line(given)


def test_an_unreadable_journal_is_named_in_one_line(tmp_path: Path) -> None:
    replayed = tmp_path / "replayed.jsonl"
    replayed.write_bytes(sample.JOURNAL.read_bytes())
    journal = Journal(tmp_path / "journal", [replayed])
    unreadable(replayed)
    models = {"generator": {"model": "bundled-sample"}, "judge": {"model": "bundled-sample"}}
    given = settings(sample.SEEDS, tmp_path / "out", **models)
    job = resolve(given, *prepare(given)[:2])
    with pytest.raises(InputError, match=r"^journal=.*cannot be read \(Is a directory\)$"):
        require_all_journaled(job, journal)


def test_bad_settings_are_refused_in_one_line(seeds: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    keyless = {"api_key_env": None}
    assert "seeds=" in one_line(settings(tmp_path / "nowhere.jsonl", out))
    assert "replay=" in one_line(settings(seeds, out, replay=[str(tmp_path / "nowhere")]))
    assert "distractors=64" in one_line(settings(seeds, out, distractors=64))
    assert "no column question" in one_line(settings(seeds, out, columns={"query": "question"}))
    steps = {"judge_positiv": {"model": "o3"}}
    assert "steps.judge_positiv: no such step: did you mean judge_positive?" in one_line(
        settings(seeds, out, endpoint=keyless, steps=steps)
    )
    blocked = tmp_path / "file"
    blocked.touch()
    assert "journal=" in one_line(settings(seeds, out, journal=str(blocked / "journal"), endpoint=keyless))


@pytest.mark.parametrize("url", ["localhost", "http://host:port/v1", "https://", "http://host/v1 ", "ftp://host/v1"])
def test_an_endpoint_needs_a_url(tmp_path: Path, url: str) -> None:
    with pytest.raises(InputError) as error:
        settings(tmp_path, tmp_path, endpoint={"base_url": url})
    assert [fault.setting for fault in error.value.faults] == ["endpoint.base_url"]


def test_batches_need_a_journal_on_a_disk(bucket: str, seeds: Path, tmp_path: Path) -> None:
    stored = {"journal": f"{bucket}/journal", "endpoint": {"api_key_env": None}}
    given = settings(seeds, tmp_path / "out", **stored, batches={})
    assert f"batches: the state of batches needs a directory, and journal={bucket}/journal is in" in one_line(given)
    given = settings(seeds, tmp_path / "out", **stored)
    check(resolve(given, *prepare(given)[:2]))
    assert "journal=s3://nowhere" in one_line(settings(seeds, tmp_path / "out", journal="s3://nowhere/journal"))


def test_limits_that_cannot_be_kept_are_refused(monkeypatch: pytest.MonkeyPatch, seeds: Path, tmp_path: Path) -> None:
    def refused(**values: Any) -> str:
        return one_line(settings(seeds, tmp_path / "out", endpoint={"api_key_env": None}, **values))

    budget = {"limits": {"budget_usd": 5}}
    assert "judge.max_tokens=null puts no bound" in refused(**{**BOUNDED, "judge": {"model": "o4-mini"}}, **budget)
    unknown = {**BOUNDED, "judge": {"model": "my-own", "max_tokens": 9}}
    assert "no price is known of judge.model=my-own" in refused(**unknown, **budget)
    assert "cheap_judge.max_tokens=null puts no bound" in refused(**BOUNDED, **budget, cheap_judge={"model": "o3"})
    assert "tokens_per_minute=9000: generator.max_tokens=null" in refused(limits={"tokens_per_minute": 9000})
    assert "prices=" in refused(prices=str(tmp_path / "nowhere.yaml"))
    (tmp_path / "prices.yaml").write_text("gpt-4o-mini: 3\n")
    assert "no price table" in refused(prices=str(tmp_path / "prices.yaml"))
