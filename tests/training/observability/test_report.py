"""The report has the numbers of the log, for finished, interrupted and stopped runs."""

import json
import re

from infembed_ray.config.training import Anomalies, Lora, TrainSettings
from infembed_ray.reporting.charts import MAX_POINTS
from infembed_ray.training.observability.events import Event, EventLog
from infembed_ray.training.observability.metrics import StepLog
from infembed_ray.training.observability.report import MAX_EVENTS, REPORT, changed, render, window_of, write
from infembed_ray.training.validation import EXPORTED
from tests.support.pages import Page

SETTINGS = TrainSettings(
    records="the <records>", model="some/model", output="o", workers=4, anomalies=Anomalies(spike_factor=3)
)


def line(step, **changes):
    figures = {"step": step, "time": 1000 + 10 * step, "loss": 2 / step, "loss_P": 1 / step, "grad_norm": 1.5}
    figures |= {"tokens": 300, "tokens_per_second": 150.0, "padding": 0.25, "seconds": 2.0, "data_seconds": 0.5}
    return figures | {"mfu": None, "memory_gib": 1.0 + step / 100, "learning_rate": 5e-5} | changes


def text(html):
    return Page(html).text


def page(metrics, events=(), steps=4, **options):
    return text(render(SETTINGS, metrics, events, 99, steps, **options))


def test_equal_logs_give_equal_pages():
    html = render(SETTINGS, [line(s) for s in (1, 2)], [], 99, 4)
    assert html == render(SETTINGS, [line(s) for s in (1, 2)], [], 99, 4)


def test_the_summary_adds_up_the_log():
    metrics = [
        line(1),
        line(2, tokens=100, padding=0.0, data_seconds=0.3),
        line(3, grad_norm=None, seconds=4.0),
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
        "MFU none no GPU",
        f"Padding {100 * (1 - 1000 / (400 + 100 + 400 + 400)):.1f} %",
        "Data wait 18.0 %",
        "Peak memory 1.04 GiB",
        "Resumed 1 time",
        "Skipped 1 step without update",
        "passages from 1 to 0.25",
    ):
        assert part in said


def test_mfu_is_weighted_by_time():
    assert "MFU 40.0 %" in page([line(1, mfu=0.5, seconds=2.0), line(2, mfu=0.3, seconds=2.0)])


def test_settings_that_differ_from_their_defaults_are_listed_with_their_full_names():
    assert dict(changed(SETTINGS)) == {
        "records": "the <records>",
        "model": "some/model",
        "output": "o",
        "workers": "4",
        "anomalies.spike_factor": "3.0",
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


def test_a_step_without_loss_leaves_a_gap_and_no_fault():
    nothing = [line(s, loss=None, loss_P=None, grad_norm=None) for s in (1, 2)]
    assert "Loss" not in page(nothing).split("Metrics")[0].split("Curves")[1].split("Learning rate")[0]
    assert "Steps 1 of 4" in page([line(1)])


def test_more_events_than_fit_are_counted():
    events = [Event(s, "spike", "warn", f"spike {s}") for s in range(1, MAX_EVENTS + 8)]
    said = page([line(s) for s in range(1, 70)], events, steps=69)
    assert "and 7 more in events.jsonl" in said
    assert f"spike {MAX_EVENTS} " in said + " "
    assert f"spike {MAX_EVENTS + 1}" not in said


def test_a_curve_of_a_long_run_is_of_means_within_the_span_of_their_values():
    metrics = [line(s, loss=float(s % 2)) for s in range(1, 10 * MAX_POINTS + 1)]
    html = render(SETTINGS, metrics, [], 99, len(metrics))
    curve = re.search(r'class="curve s0" d="M([^"]*)"', html)
    heights = [float(point.split(" ")[1]) for point in curve[1].split("L")]
    assert len(heights) == MAX_POINTS
    assert max(heights) - min(heights) < 3  # the mean of as many 0 as 1
    assert "faint: range of single steps" in html
    span = re.search(r'class="band s0" d="M([^"]*)Z"', html)
    assert len({point.split(" ")[1] for point in span[1].split("L")}) == 2


def test_noisy_curves_are_smoothed_and_the_caption_names_the_method_and_the_window():
    assert [window_of(steps) for steps in (9, 10, 46, 2000)] == [1, 5, 7, 45]
    html = render(SETTINGS, [line(s, loss=float(s % 2)) for s in range(1, 47)], [], 99, 46)
    assert "Loss centred mean of 7 steps; faint: single steps" in text(html)
    assert "Learning rate centred" not in text(html)
    assert 'class="raw s0"' in html
    assert "faint" not in page([line(s) for s in range(1, 5)])


def test_legends_are_words_and_shares_are_percentages():
    said = page([line(s, accuracy_P=0.5, accuracy_IQ=0.25, without_negatives=s / 4) for s in (1, 2)])
    assert "Positive ranked first (% of rows)" in said
    assert "passages from 50 to 50" in said
    assert "instruction and query from 25 to 25" in said
    assert "Rows without negatives (%)" in said
    assert "loss_P" not in said.split("Curves")[1].split("Metrics")[0]


def test_the_report_lies_beside_the_log_it_is_of(tmp_path):
    log = StepLog(tmp_path, 0)
    for step in (1, 2):
        log.write(**line(step))
    EventLog(tmp_path, 0).write(Event(2, "spike", "warn", "step 2: up"))
    write(tmp_path, SETTINGS, 99, 2)
    assert "Not finished" in text((tmp_path / REPORT).read_text())
    (tmp_path / EXPORTED).write_text(json.dumps({"step": 2, "score": None}))
    write(tmp_path, SETTINGS, 99, 2)
    said = text((tmp_path / REPORT).read_text())
    assert "Exported step 2 the last" in said
    assert "step 2: up" in said
