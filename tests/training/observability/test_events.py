import json
from dataclasses import asdict

from infembed_ray.training.observability.events import EVENTS, Event, EventLog, append_event, read_events


def event(step, kind="spike", action="warn"):
    return Event(step, kind, action, f"step {step}: it went „up“")


def test_events_round_trip(tmp_path):
    log = EventLog(tmp_path, 0)
    written = [event(2), event(3, "nonfinite", "skip")]
    for one in written:
        log.write(one)
    append_event(tmp_path, event(3, "state"))
    assert read_events(tmp_path) == [*written, event(3, "state")]


def test_resumed_run_removes_events_of_repeated_steps(tmp_path):
    log = EventLog(tmp_path, 0)
    for step in (2, 4, 6):
        log.write(event(step))
    log.write(event(6, "state"))
    EventLog(tmp_path, 4)
    EventLog(tmp_path, 2)  # the checkpoint of step 4 was damaged
    kinds = [(e.step, e.kind) for e in read_events(tmp_path)]
    assert kinds == [(2, "spike"), (6, "state"), (4, "resumed"), (2, "resumed")]


def test_only_one_worker_writes_events(tmp_path):
    EventLog(tmp_path, 0, writes=False).write(event(1))
    assert not (tmp_path / EVENTS).exists()
    assert read_events(tmp_path) == []


def test_incomplete_line_is_not_read(tmp_path):
    EventLog(tmp_path, 0).write(event(1))
    with (tmp_path / EVENTS).open("a") as stream:
        stream.write('{"step": 2, "ki')
    assert read_events(tmp_path) == [event(1)]


def test_unicode_line_separators_do_not_end_a_line(tmp_path):
    odd = Event(1, "spike", "warn", "record \u2028 and \u2029 and \x85")
    EventLog(tmp_path, 0).write(odd)
    with (tmp_path / EVENTS).open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(asdict(odd), ensure_ascii=False) + "\n")
    assert read_events(tmp_path) == [odd, odd]
