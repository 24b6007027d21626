import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from infembed_ray.config.training import TrainSettings
from infembed_ray.errors import InputError
from infembed_ray.storage import leases
from infembed_ray.storage.object_store import Folder, scratch
from infembed_ray.storage.places import read_text
from infembed_ray.storage.steps import Step, find_input, fingerprint, resolve, resolve_input
from tests.support.faulty_store import EXPIRED, FORWARD, TRUNCATED, first_replies_lost


def settings(**changes):
    return TrainSettings(**{"records": "r", "model": "m", "output": "o", **changes})


def step(tmp_path, content="x", output=None, **changes):
    source = tmp_path / "input.txt"
    source.write_text(content)
    return Step("train", settings(**changes), output or str(tmp_path / "out"), {"records": source})


def publish(a_step, text="result"):
    with a_step.publish() as staging:
        (staging.path / "file.txt").write_text(text)
        staging.counts["rows"] = 1
    return a_step.published()


def test_an_output_is_published_with_its_manifest_and_found_through_latest(tmp_path):
    one = step(tmp_path)
    assert one.finished() is None
    published = publish(one)
    assert resolve(tmp_path / "out") == published.path == resolve_input(str(tmp_path / "out"), "x")
    manifest = json.loads((published.path / "manifest.json").read_text())
    assert manifest["counts"] == {"rows": 1}
    assert manifest["inputs"]["records"]["fingerprint"] == fingerprint(tmp_path / "input.txt")
    assert not list((tmp_path / "out").glob("*.partial"))


@pytest.fixture(params=["here", "in a store"])
def output(request, tmp_path):
    return str(tmp_path / "out") if request.param == "here" else request.getfixturevalue("place")


def test_equal_runs_find_one_output_others_make_another_and_latest_follows_the_last_run(output, tmp_path):
    first = publish(step(tmp_path, output=output))
    second = publish(step(tmp_path, "y", output))
    third = publish(step(tmp_path, output=output, seed=7))
    assert len({first.address, second.address, third.address}) == 3
    assert resolve_input(output, "x") == resolve_input(third.address, "x")
    again = step(tmp_path, output=output, checkpoint_every=7).finished()
    assert (again.address, again.fresh) == (first.address, False)
    assert resolve_input(output, "x") == resolve_input(first.address, "x")


def test_a_failed_block_publishes_nothing_and_the_next_run_finds_its_files(tmp_path, capsys):
    with pytest.raises(ZeroDivisionError), step(tmp_path).publish() as staging:
        (staging.path / "half").write_text("half")
        _ = 1 / 0
    assert step(tmp_path).finished() is None
    with step(tmp_path, seed=7).publish():
        assert f"the unfinished run {step(tmp_path).identity} has other settings or inputs" in capsys.readouterr().out
    with step(tmp_path).publish() as staging:
        assert (staging.path / "half").read_text() == "half"
    assert step(tmp_path).finished() is not None
    assert "starts from the beginning" not in capsys.readouterr().out


@pytest.mark.integration
def test_a_killed_writer_leaves_no_finished_output_and_no_lock(tmp_path):
    code = (
        "import sys, time; sys.path.insert(0, sys.argv[2]);"
        "from tests.storage.test_steps import step; import pathlib;"
        "s = step(pathlib.Path(sys.argv[1]));"
        "c = s.publish(); g = c.__enter__(); (g.path / 'half').write_text('half'); print('in', flush=True); time.sleep(60)"
    )
    root = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    writer = subprocess.Popen([sys.executable, "-c", code, str(tmp_path), root], stdout=subprocess.PIPE)
    assert writer.stdout is not None
    assert writer.stdout.readline() == b"in\n"
    with pytest.raises(InputError, match=f"process {writer.pid} on .* has been writing"), step(tmp_path).publish():
        pass
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    time.sleep(0.1)
    assert step(tmp_path).finished() is None
    publish(step(tmp_path))
    assert step(tmp_path).finished() is not None


def test_fingerprints_depend_on_names_and_contents_not_on_the_path(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "f").write_text("same")
    assert fingerprint(tmp_path / "a") == fingerprint(tmp_path / "b")
    (tmp_path / "b" / "f").rename(tmp_path / "b" / "g")
    assert fingerprint(tmp_path / "a") != fingerprint(tmp_path / "b")


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("/dev/null/x", "cannot be written"),
        ("ftp://x/y", "s3, gs"),
        *(
            (f"/tmp/ray/session_1/runtime_resources/{rest}", "working directory, a copy that Ray deletes; give an abs")
            for rest in ("working_dir_files/_ray_pkg_1/runs", "working_dir_files/_ray_pkg_1", "py_modules_files/x/y")
        ),
    ],
)
def test_an_unusable_output_is_rejected_before_any_work(tmp_path, output, message):
    with pytest.raises(InputError, match=message):
        Step("train", settings(), output, {})


@pytest.mark.parametrize("name", ["data/a.jsonl", "a.jsonl", "./a", "b/", "runs/x.parquet"])
def test_an_input_that_the_upload_of_a_job_left_out_is_explained(tmp_path, monkeypatch, name):
    folder = tmp_path / "runtime_resources" / "working_dir_files" / "_ray_pkg_1"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    with pytest.raises(InputError, match=r"^records=.*no such file or directory; .*leaves out what \.gitignore names"):
        find_input(name, "records")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"no such file or directory$"):
        find_input(name, "records")


# ------------------------------------------------------------------------------------------------------ object stores


@pytest.fixture
def place(bucket, tmp_path, monkeypatch):
    """URI of an empty folder; local copies go below tmp_path."""
    monkeypatch.setenv("INFEMBED_SCRATCH", str(tmp_path / "scratch"))
    return f"{bucket}/{tmp_path.name}"


def remote_step(place, tmp_path):
    return step(tmp_path, output=place)


def names(place):
    return set(Folder.open(place, "x").entries())


def test_an_output_in_an_object_store_is_found_from_any_machine(place, tmp_path):
    one = remote_step(place, tmp_path)
    assert one.finished() is None
    published = publish(one)
    assert published.uri == f"{place}/{one.identity}"
    assert published.summary == published.uri
    assert names(place) == {"latest", f"{one.identity}/file.txt", f"{one.identity}/manifest.json"}
    shutil.rmtree(scratch())
    again = remote_step(place, tmp_path).finished()
    assert again is not None
    assert not again.fresh
    assert again.manifest["counts"] == {"rows": 1}
    assert again.summary.endswith(str(published.uri))
    for uri in (place, published.uri):
        assert (resolve_input(uri, "model") / "file.txt").read_text() == "result"


def test_the_address_of_an_output_can_be_opened_from_another_environment(place, tmp_path):
    published = publish(remote_step(f"{place}?region=us-east-1", tmp_path))
    assert re.fullmatch(rf"{place}/\w+\?region=us-east-1", published.address)
    assert (resolve_input(published.address, "model") / "file.txt").read_text() == "result"


def test_a_failed_block_uploads_nothing_and_a_partial_upload_is_not_finished(place, tmp_path):
    with pytest.raises(ZeroDivisionError), remote_step(place, tmp_path).publish() as staging:
        (staging.path / "half").write_text("half")
        _ = 1 / 0
    half = remote_step(place, tmp_path)
    assert names(place) == {f".{half.identity}.state.json"}
    (Folder.open(place, "x") / half.identity).write("of an attempt before", "x")
    assert half.finished() is None
    with half.publish() as staging:
        assert (staging.path / "half").read_text() == "half"
    assert names(place) == {"latest", f"{half.identity}/half", f"{half.identity}/manifest.json"}


def test_files_that_workers_wrote_in_the_store_stay(place, tmp_path):
    one = remote_step(place, tmp_path)
    (Folder.open(place, "x") / one.identity).write("shards/0", "of an interrupted attempt")
    (Folder.open(place, "x") / one.identity).write("old/0", "of an interrupted attempt")
    with one.publish() as staging:
        (staging.path / "here").write_text("x")
        staging.remote.write("by a worker", "x")
        staging.resumed.add("shards")
    below = {"here", "by a worker", "shards/0", "manifest.json"}
    assert names(place) == {"latest", *(f"{one.identity}/{name}" for name in below)}


def test_a_manifest_names_its_inputs_where_they_were_copied_from(place, tmp_path):
    first = publish(remote_step(place, tmp_path))
    records = f"{first.uri}/file.txt"
    copies = {"records": resolve_input(records, "records"), "model": resolve_input(place, "model")}
    inputs = Step("train", settings(records=records, model=place), str(tmp_path / "out"), copies)
    named = publish(inputs).manifest["inputs"]
    assert (named["records"]["path"], named["model"]["path"]) == (records, first.uri)


WRITER = """
import sys, time
from pathlib import Path
from infembed_ray.storage import leases
from infembed_ray.errors import InputError
from tests.storage.test_steps import remote_step
leases.SECONDS = 1.5
one = remote_step(sys.argv[1], Path(sys.argv[2]))
print("ready", flush=True)
input()
try:
    with one.publish() as staging:
        (staging.path / "file.txt").write_text(sys.argv[3])
        time.sleep(2)
    print("published")
except InputError as error:
    print(error)
"""


def test_of_two_writers_on_two_machines_one_publishes_and_the_other_names_it(faulty, place, tmp_path):
    """Two processes with scratch directories of their own; they share the store alone."""
    writers = []
    for name in "ab":
        (tmp_path / name).mkdir()
        environment = os.environ | {"INFEMBED_SCRATCH": str(tmp_path / name), "PYTHONPATH": os.getcwd()}
        command = [sys.executable, "-c", WRITER, place, str(tmp_path / name), name]
        writers.append(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True)
        )
    assert [writer.stdout.readline() for writer in writers] == ["ready\n", "ready\n"]
    for writer in writers:
        writer.stdin.write("go\n")
        writer.stdin.flush()
    said = [writer.communicate(timeout=60)[0] for writer in writers]
    winner = next(number for number, text in enumerate(said) if text == "published\n")
    assert f"process {writers[winner].pid} on {socket.gethostname()} has been writing this output" in said[1 - winner]
    assert "published" not in said[1 - winner]
    assert (resolve_input(place, "x") / "file.txt").read_text() == "ab"[winner]


def test_a_writer_whose_lease_was_taken_over_publishes_nothing(place, tmp_path):
    one, folder = remote_step(place, tmp_path), Folder.open(place, "x")
    message = "nothing is published"
    with pytest.raises(InputError, match=message), one.publish() as staging:
        (staging.path / "file.txt").write_text("late")
        folder.write(f".{one.identity}.lease", '{"id": "of another", "seconds": 60}')
        folder.write(f"{one.identity}/file.txt", "of another")
    assert remote_step(place, tmp_path).found() is None
    assert read_text(folder / f"{one.identity}/file.txt") == "of another"


def test_the_second_of_two_manifests_is_refused(place, tmp_path):
    one = remote_step(place, tmp_path)
    message = "another run has published this output; that of this run stays in"
    with pytest.raises(InputError, match=message), one.publish() as staging:
        (staging.path / "file.txt").write_text("mine")
        staging.remote.write("manifest.json", '{"created": "by another"}')
    assert one.found().manifest == {"created": "by another"}
    assert (one.partial / "file.txt").read_text() == "mine"


def test_an_output_is_published_once_though_every_first_reply_is_lost(faulty, place, tmp_path):
    faulty.decide = first_replies_lost()
    one = remote_step(place, tmp_path)
    publish(one)
    assert names(place) == {"latest", f"{one.identity}/file.txt", f"{one.identity}/manifest.json"}


@pytest.mark.parametrize("part", ["file.txt", "manifest.json", ".lease"])
def test_credentials_that_expire_publish_nothing_and_the_next_run_publishes(faulty, place, tmp_path, monkeypatch, part):
    monkeypatch.setattr(leases, "SECONDS", 1.0)
    one, written, expired = remote_step(place, tmp_path), threading.Event(), threading.Event()

    def expire(request):
        if request.method in ("PUT", "POST") and part in request.path and written.is_set():
            expired.set()
        return EXPIRED if expired.is_set() else FORWARD

    faulty.decide = expire
    message = "output=.*the object store failed .*ExpiredToken.*credentials"
    with pytest.raises(InputError, match=message), one.publish() as staging:
        (staging.path / "file.txt").write_text("x")
        written.set()
    faulty.decide = lambda request: FORWARD
    assert f"{one.identity}/manifest.json" not in names(place)
    assert "latest" not in names(place)
    publish(remote_step(place, tmp_path))
    assert names(place) == {"latest", f"{one.identity}/file.txt", f"{one.identity}/manifest.json"}


@pytest.mark.parametrize("replaces", [False, True])
def test_a_store_that_ignores_conditions_is_refused(place, tmp_path, monkeypatch, replaces):
    put = Folder.put

    def ignoring(folder, name, data, expected=None):
        if (expected is not None) != replaces:
            return put(folder, name, data, expected)
        return folder.write(name, data.decode()) or "version"

    monkeypatch.setattr(Folder, "put", ignoring)
    with pytest.raises(InputError, match="this store ignores conditional writes"):
        remote_step(place, tmp_path).finished()


def test_an_input_that_breaks_off_is_an_error_and_is_downloaded_again(faulty, place, tmp_path):
    Folder.open(place, "x").write("rows.jsonl", "1" * 200_000)
    faulty.decide = lambda request: TRUNCATED if request.method == "GET" and "rows" in request.path else FORWARD
    with pytest.raises(InputError, match=r"records=.*the object store failed .*partial file"):
        resolve_input(f"{place}/rows.jsonl", "records")
    faulty.decide = lambda request: FORWARD
    assert resolve_input(f"{place}/rows.jsonl", "records").stat().st_size == 200_000


def test_an_input_is_downloaded_once_and_again_when_it_changes(place, tmp_path):
    folder = Folder.open(place, "x")
    folder.write("data/rows.jsonl", "1")
    file = resolve_input(f"{place}/data/rows.jsonl", "records")
    assert (file.name, file.read_text()) == ("rows.jsonl", "1")
    file.write_text("2")  # same size, so it is not downloaded again
    assert resolve_input(f"{place}/data/rows.jsonl", "records").read_text() == "2"
    file.unlink()
    assert resolve_input(f"{place}/data/rows.jsonl", "records").read_text() == "1"
    folder.write("data/rows.jsonl", "longer")
    assert resolve_input(f"{place}/data/rows.jsonl", "records").read_text() == "longer"
    whole = resolve_input(f"{place}/data", "records")
    assert fingerprint(whole / "rows.jsonl") == fingerprint(resolve_input(f"{place}/data/rows.jsonl", "records"))


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("s3://no-such-bucket/x", "records=s3://no-such-bucket/x: no bucket no-such-bucket"),
        ("s3://bucket/nothing/here", "records=s3://bucket/nothing/here: no object has this name or begins with it"),
        ("s3://key:secret@bucket/x", r"records=s3://\*\*\*@bucket/x: must not hold credentials, .* AWS_ACCESS_KEY_ID"),
        ("abfs://c:key@account.dfs.core.windows.net/x", r"records=abfs://\*\*\*@account.*/x: must not hold .* AZURE_"),
        (
            "abfs://c@account.dfs.core.windows.net/x?sv=2024&sig=abc",
            r"records=.*/x\?sv=2024&sig=\*\*\*: must not hold credentials, .* AZURE_",
        ),
        ("s3://bucket/x?endpoint_override=127.0.0.1:9&scheme=http", "records=s3://bucket/x: the object store failed"),
    ],
)
def test_an_object_that_cannot_be_read_is_an_error_of_one_line(place, uri, message):
    with pytest.raises(InputError, match=message) as caught:
        resolve_input(uri, "records")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("uri", ["abfs://c@account.dfs.core.windows.net/x", "abfs://account.dfs.core.windows.net/c/x"])
def test_an_azure_uri_names_container_and_path_in_either_form(monkeypatch, uri):
    """Tested without an account, by the requests that the client receives."""
    opened, asked = Folder.file_system, []

    def refuse(name):
        asked.append(name)
        raise OSError("no account here")

    def spied(folder):
        system, path = opened(folder)
        assert system.type_name == "abfs"
        asked.append(path)
        return SimpleNamespace(get_file_info=refuse), path

    monkeypatch.setattr(Folder, "file_system", spied)
    with pytest.raises(InputError, match="no account here"):
        Folder.open(uri, "records")
    assert asked == ["c/x", "c"]


def test_the_query_of_a_uri_names_the_store_without_the_environment(place, monkeypatch):
    endpoint = os.environ["AWS_ENDPOINT_URL"].removeprefix("http://")
    Folder.open(place, "x").write("file", "x")
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    assert resolve_input(f"{place}/file?endpoint_override={endpoint}&scheme=http", "x").read_text() == "x"


def test_the_scratch_directory_of_another_user_is_rejected(monkeypatch):
    monkeypatch.delenv("INFEMBED_SCRATCH", raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    with pytest.raises(InputError, match="set INFEMBED_SCRATCH to a directory of your own"):
        scratch()
    (Path(tempfile.gettempdir()) / "infembed-4711").rmdir()
