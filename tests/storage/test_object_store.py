import os
import random
import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
from obstore.exceptions import BaseError

from infembed_ray.errors import InputError
from infembed_ray.storage import leases, object_store
from infembed_ray.storage.object_store import SCRATCH, Folder, Version, convert_errors, room
from infembed_ray.storage.places import open_binary, read_text
from tests.support.faulty_store import EXPIRED, FORWARD, LOST_REPLY, UNAVAILABLE, Fault


@pytest.fixture
def folder(faulty, bucket, tmp_path):
    """An empty folder whose requests go through the proxy `faulty`."""
    return Folder.open(f"{bucket}/{tmp_path.name}", "output")


def once(fault, method="PUT"):
    """Decide on a fault for the first request with a method."""
    left = [fault]
    return lambda request: left.pop() if left and request.method == method else FORWARD


def test_only_the_first_writer_creates_an_object(folder):
    made = folder.put("object", b"first")
    assert folder.put("object", b"second") is None
    assert folder.read_versioned("object") == (b"first", made)


def test_only_the_writer_that_knows_the_present_version_replaces_an_object(folder):
    first = folder.put("object", b"1")
    second = folder.put("object", b"2", first)
    assert folder.put("object", b"3", first) is None
    assert folder.read_versioned("object") == (b"2", second)
    assert folder.put("absent", b"3", first) is None
    assert folder.read_versioned("absent") is None


def test_the_time_of_a_version_is_that_of_the_store(folder):
    folder.put("object", b"1")
    _, version = folder.read_versioned("object")
    assert time.time() - 5 < version.written < time.time() + 5


def test_of_many_concurrent_writers_one_creates_and_each_increment_counts_once(folder):
    created = []

    def write(number):
        created.append(folder.put("owner", str(number).encode()) is not None)
        done = False
        while not done:
            data, version = folder.read_versioned("count")
            count = int(data.split()[0]) + 1
            done = folder.put("count", b"%d by %d" % (count, number), version) is not None

    folder.put("count", b"0")
    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert created.count(True) == 1
    assert folder.read_versioned("count")[0].startswith(b"8 by")


@pytest.mark.parametrize("fault", [LOST_REPLY, UNAVAILABLE, Fault(error=(409, "ConditionalRequestConflict"))])
def test_a_writer_succeeds_once_whatever_became_of_its_first_request(faulty, folder, fault):
    faulty.decide = once(fault)
    version = folder.put("object", b"mine")
    assert version is not None
    faulty.decide = once(fault)
    assert folder.put("object", b"mine again", version) is not None
    assert folder.read_versioned("object")[0] == b"mine again"


def test_a_lost_reply_does_not_hide_the_success_of_another_writer(faulty, folder):
    folder.put("object", b"theirs")
    faulty.decide = once(LOST_REPLY)
    assert folder.put("object", b"mine") is None
    assert folder.put("object", b"mine", Version('"of another version"', None)) is None


def test_a_request_that_takes_too_long_is_repeated(faulty, folder, monkeypatch):
    monkeypatch.setattr(object_store, "REQUEST_TIMEOUT", timedelta(seconds=0.5))
    object_store._control_client.cache_clear()
    faulty.decide = once(Fault(delay_s=1.5))
    assert folder.put("object", b"mine") is not None
    object_store._control_client.cache_clear()


def test_a_write_is_given_up_before_another_process_may_take_its_lease_over(faulty, folder, monkeypatch):
    monkeypatch.setattr(object_store, "REQUEST_TIMEOUT", timedelta(seconds=0.5))
    monkeypatch.setattr(object_store, "RETRY_TIMEOUT", timedelta(seconds=0.5))
    object_store._control_client.cache_clear()
    faulty.decide = lambda request: Fault(delay_s=5 if request.method == "PUT" else 0)
    with pytest.raises(BaseError):
        folder.put("object", b"mine")
    object_store._control_client.cache_clear()
    assert sum(request.method == "PUT" for request in faulty.requests) == 1


def test_a_lease_outlasts_the_longest_write():
    longest = 2 * object_store.RETRY_TIMEOUT + object_store.REQUEST_TIMEOUT
    assert longest < timedelta(seconds=leases.SECONDS)


@pytest.mark.parametrize(("fault", "cause"), [(EXPIRED, "ExpiredToken"), (Fault(error=(400, "NotThat")), "NotThat")])
def test_a_refused_write_is_an_error_of_one_line(faulty, folder, tmp_path, fault, cause):
    (tmp_path / "file").write_text("x")
    faulty.decide = lambda request: fault
    for write in (lambda: folder.put("object", b"x"), lambda: folder.upload(tmp_path / "file", "file")):
        message = f"output=.*the object store failed .*{cause}.*credentials"
        with pytest.raises(InputError, match=message) as caught, convert_errors(folder.base, "output"):
            write()
        assert "\n" not in str(caught.value)


def test_a_full_disk_is_not_a_failure_of_the_store(folder, tmp_path, monkeypatch):
    monkeypatch.setenv(SCRATCH, str(tmp_path))
    (tmp_path / "copy.partial").symlink_to("/dev/full")
    folder.write("object", "x" * 100_000)
    message = f"model=.*No space left on device.*{SCRATCH} is {tmp_path}: free space there"
    with pytest.raises(InputError, match=message) as caught, convert_errors(folder.base, "model"):
        folder.download("object", tmp_path / "copy")
    assert "credentials" not in str(caught.value)


def test_files_survive_a_store_that_is_slow_and_sometimes_unavailable(faulty, folder, tmp_path):
    chance = random.Random(7)
    faulty.decide = lambda request: chance.choices([FORWARD, UNAVAILABLE, Fault(delay_s=0.2)], [90, 5, 5])[0]
    for number in range(20):
        (tmp_path / "file").write_bytes(bytes([number]) * 100_000)
        folder.upload(tmp_path / "file", f"files/{number}")
        assert folder.put(f"marks/{number}", b"mark") is not None
    assert len(folder.entries()) == 40
    for number in range(20):
        folder.download(f"files/{number}", tmp_path / "copy")
        assert (tmp_path / "copy").read_bytes() == bytes([number]) * 100_000
    assert sum(request.method == "PUT" for request in faulty.requests) > 40  # some were repeated


def test_streams_read_at_any_position_and_appear_when_closed(folder):
    with folder.open_output("stream") as stream:
        stream.write(b"0123456789")
        assert "stream" not in folder.entries()
    with open_binary(folder / "stream") as stream:
        stream.seek(4)
        assert stream.read(3) == b"456"


def test_both_clients_name_objects_alike(folder):
    deep = Folder(f"{folder.base}/a%20b/%C3%BC")
    deep.put("by obstore", b"1")
    assert read_text(deep / "by obstore") == "1"
    deep.write("by pyarrow", "2")
    assert deep.read_versioned("by pyarrow")[0] == b"2"


def test_both_clients_read_the_options_of_a_uri(folder, monkeypatch):
    folder.put("object", b"1")
    endpoint = os.environ["AWS_ENDPOINT_URL"].removeprefix("http://")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    named = Folder(folder.base, f"endpoint_override={endpoint}&scheme=http&region=eu-west-1")
    assert named.read_versioned("object")[0] == b"1"
    assert read_text(named / "object") == "1"


def test_credentials_come_from_the_files_of_aws_too(faulty, folder, tmp_path, monkeypatch):
    pytest.importorskip("boto3")
    (tmp_path / "credentials").write_text("[team]\naws_access_key_id=OFTHETEAM\naws_secret_access_key=x\n")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_PROFILE", "team")
    folder.put("object", b"1")
    assert "OFTHETEAM" in faulty.requests[-1].headers["authorization"]
    monkeypatch.setattr(object_store.importlib, "import_module", lambda name: __import__("no_such_module"))
    monkeypatch.setenv("AWS_REGION", "eu-west-1")  # another environment, another client
    with pytest.raises(InputError, match=r"AWS_PROFILE: .*pip install boto3"):
        folder.put("object", b"1")


@pytest.mark.parametrize(
    ("base", "query", "client"),
    [
        ("gs://bucket/x", "", "GCSStore"),
        ("abfs://c@account.dfs.core.windows.net/x", "", "AzureStore"),
        (
            "abfs://account.dfs.core.windows.net/c/x",
            "blob_storage_authority=127.0.0.1:1&enable_tls=false",
            "AzureStore",
        ),
    ],
)
def test_the_other_clouds_get_a_client_of_their_own(base, query, client):
    """Tested without an account: obstore accepts the options."""
    made = object_store._control_client(base, query, "c", "", ())
    assert type(made).__name__ == client


HOLD = """
import os, sys
from infembed_ray.storage.object_store import room
with room("build") as directory:
    (directory / "file").touch()
    print(directory, flush=True)
    sys.stdin.read()
"""


def test_a_room_ends_with_its_block_and_that_of_a_killed_process_when_the_next_one_begins(tmp_path, monkeypatch):
    monkeypatch.setenv(SCRATCH, str(tmp_path))
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    held = tmp_path / os.path.basename(holder.stdout.readline().strip())
    with room("build") as one, room("build") as other:
        assert {held, one, other} == set(tmp_path.iterdir())
        assert (held / "file").exists()
        holder.kill()
        holder.communicate()
        with room("shard") as elsewhere:
            assert {held, one, other, elsewhere} == set(tmp_path.iterdir())
        with room("build") as third:
            assert {one, other, third} == set(tmp_path.iterdir())
    assert list(tmp_path.iterdir()) == []
