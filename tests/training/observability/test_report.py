"""The report has the numbers of the log, for finished, interrupted and stopped runs."""

import json

from infembed_ray.config.training import Lora, TrainSettings, ValidationSettings
from infembed_ray.training.observability.logs import Event, append_event, append_metrics
from infembed_ray.training.observability.report import REPORT, changed, render, write
from infembed_ray.training.validation import EXPORTED
from tests.support.pages import Page

SETTINGS = TrainSettings(
    records="the <records>", model="some/model", output="o", workers=4, validation=ValidationSettings(records="dev")
)


def line(step, **changes):
    figures = {"step": step, "time": 1000 + 10 * step, "loss": 2 / step, "loss_P": 1 / step, "grad_norm": 1.5}
    figures |= {"tokens": 300, "tokens_per_second": 150.0, "padding": 0.25, "seconds": 2.0, "data_seconds": 0.5}
    return figures | {"mfu": None, "memory_gib": 1.0 + step / 100, "learning_rate": 5e-5} | changes


def text(html):
    return Page(html).text


def page(metrics, events=(), steps=4, **options):
    return text(render(SETTINGS, metrics, events, 99, steps, **options))


def test_the_summary_adds_up_the_log():
    metrics = [
        line(1),
        line(2, tokens=100, padding=0.0, data_seconds=0.3),
        line(3, seconds=4.0),
        line(4),
    ]
    said = page(
        metrics, [Event(2, "resumed", "note", "step 2: resumed from here")], exported={"step": 4, "score": 0.25}
    )
    for part in (
        "multi{P,I}",
        "99 records of the <records>",
        "Steps 4 of 4",
        "Exported step 4 score 0.25",
        "Time in steps 10.0 s 32.0 s elapsed",
        "Tokens 1,000 without padding",
        "Tokens per second 100 4 workers",
        f"Padding {100 * (1 - 1000 / (400 + 100 + 400 + 400)):.1f} %",
        "Data wait 18.0 %",
        "Peak memory 1.04 GiB",
        "Resumed 1 time",
        "passages from 1 to 0.25",
    ):
        assert part in said


def test_settings_that_differ_from_their_defaults_are_listed_with_their_full_names():
    assert dict(changed(SETTINGS)) == {
        "records": "the <records>",
        "model": "some/model",
        "output": "o",
        "workers": "4",
        "validation.records": "dev",
    }
    with_lora = SETTINGS.model_copy(update={"lora": Lora()})  # all of it at its defaults, but there
    assert dict(changed(with_lora)) == dict(changed(SETTINGS)) | {"lora": "{}"}


def test_interrupted_and_stopped_runs_say_so():
    assert "The run ended before its first step." in page([])
    assert "Not finished: 2 of 4 steps are done." in page([line(1), line(2)])
    stop = Event(3, "nonfinite", "stop", "step 3: the loss is nan")
    said = page([line(1), line(2)], [stop])
    assert said.count("step 3: the loss is nan") == 2  # above all, and among the events
    assert "Not finished" not in said


def test_the_report_lies_beside_the_log_it_is_of(tmp_path):
    for step in (1, 2):
        append_metrics(tmp_path, line(step))
    append_event(tmp_path, Event(2, "state", "warn", "step 2: up"))
    write(tmp_path, SETTINGS, 99, 2)
    assert "Not finished" in text((tmp_path / REPORT).read_text())
    (tmp_path / EXPORTED).write_text(json.dumps({"step": 2, "score": None}))
    write(tmp_path, SETTINGS, 99, 2)
    said = text((tmp_path / REPORT).read_text())
    assert "Exported step 2 the last" in said
    assert "step 2: up" in said
