import json
import os
import signal
import subprocess
import sys
import time

import pytest

from infembed_ray.config import TrainSettings
from infembed_ray.errors import InputError
from infembed_ray.storage import Step, existing, fingerprint, resolve


def settings(**changes):
    return TrainSettings(records="r", model="m", **{"output": "o", **changes})


def step(tmp_path, content="x", **changes):
    source = tmp_path / "input.txt"
    source.write_text(content)
    return Step("train", settings(**changes), str(tmp_path / "out"), {"records": source})


def publish(a_step, text="result"):
    with a_step.publish() as staging:
        (staging.path / "file.txt").write_text(text)
        staging.counts["rows"] = 1
    return a_step.published()


def test_an_output_is_published_whole_with_its_manifest_and_found_through_latest(tmp_path):
    one = step(tmp_path)
    assert one.finished() is None
    published = publish(one)
    assert resolve(tmp_path / "out") == published.path == existing(str(tmp_path / "out"), "x")
    manifest = json.loads((published.path / "manifest.json").read_text())
    assert manifest["counts"] == {"rows": 1}
    assert manifest["inputs"]["records"]["fingerprint"] == fingerprint(tmp_path / "input.txt")
    assert not list((tmp_path / "out").glob("*.partial"))


def test_same_inputs_and_settings_find_the_finished_output(tmp_path):
    publish(step(tmp_path))
    again = step(tmp_path, checkpoint_every=7).finished()
    assert again is not None
    assert not again.fresh


def test_other_contents_or_settings_make_another_output_and_latest_follows_the_last_run(tmp_path):
    first = publish(step(tmp_path))
    second = publish(step(tmp_path, content="y"))
    third = publish(step(tmp_path, seed=7))
    assert len({first.path, second.path, third.path}) == 3
    assert resolve(tmp_path / "out") == third.path
    step(tmp_path).finished()
    assert resolve(tmp_path / "out") == first.path


def test_a_block_that_fails_publishes_nothing_and_the_next_run_finds_what_it_left(tmp_path):
    with pytest.raises(ZeroDivisionError), step(tmp_path).publish() as staging:
        (staging.path / "half").write_text("half")
        _ = 1 / 0
    assert step(tmp_path).finished() is None
    with step(tmp_path).publish() as staging:
        assert (staging.path / "half").read_text() == "half"
    assert step(tmp_path).finished() is not None


def test_a_killed_writer_leaves_nothing_that_reads_as_whole_and_no_lock(tmp_path):
    code = (
        "import sys, time; sys.path.insert(0, sys.argv[2]);"
        "from tests.test_storage import step; import pathlib;"
        "s = step(pathlib.Path(sys.argv[1]));"
        "c = s.publish(); g = c.__enter__(); (g.path / 'half').write_text('half'); print('in', flush=True); time.sleep(60)"
    )
    root = os.path.dirname(os.path.dirname(__file__))
    writer = subprocess.Popen([sys.executable, "-c", code, str(tmp_path), root], stdout=subprocess.PIPE)
    assert writer.stdout is not None
    assert writer.stdout.readline() == b"in\n"
    with pytest.raises(InputError, match="another run is writing this very output"), step(tmp_path).publish():
        pass
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    time.sleep(0.1)
    assert step(tmp_path).finished() is None
    publish(step(tmp_path))
    assert step(tmp_path).finished() is not None


def test_fingerprints_follow_contents_not_places(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "f").write_text("same")
    assert fingerprint(tmp_path / "a") == fingerprint(tmp_path / "b")
    (tmp_path / "b" / "f").rename(tmp_path / "b" / "g")
    assert fingerprint(tmp_path / "a") != fingerprint(tmp_path / "b")


@pytest.mark.parametrize(
    ("output", "message"),
    [("/dev/null/x", "cannot be written"), ("s3://bucket/x", "object stores are not supported yet")],
)
def test_an_unusable_output_is_refused_before_any_work(tmp_path, output, message):
    with pytest.raises(InputError, match=message):
        Step("train", settings(), output, {})
