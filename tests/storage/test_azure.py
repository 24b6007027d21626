"""Azure against its emulator (`npm install -g azurite`). S3 is tested in test_object_store."""

import os
import shutil
import socket
import subprocess
from urllib.parse import urlencode

import pytest
from pyarrow import fs

from infembed_ray.errors import InputError
from infembed_ray.storage.object_store import Folder, _control_client
from infembed_ray.storage.places import read_text
from infembed_ray.storage.steps import Step
from tests.storage.test_steps import settings
from tests.support.ports import free_port
from tests.support.waiting import wait_until

ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Azurite's published account and key."""


@pytest.fixture(scope="module")
def azurite(tmp_path_factory):
    """URI of an empty container, and the query that leads to the emulator."""
    program = shutil.which("azurite-blob") or os.environ.get("AZURITE_BLOB")
    if program is None:
        pytest.skip("no Azurite on this machine: npm install -g azurite")
    port = free_port()
    place = tmp_path_factory.mktemp("azurite")
    flags = ["--silent", "--disableTelemetry", "--skipApiVersionCheck", f"--location={place}", f"--blobPort={port}"]
    with subprocess.Popen([program, *flags], stdout=subprocess.DEVNULL) as server:
        try:
            wait_until(lambda: _listens(port))
            hosts = dict.fromkeys(("blob_storage_authority", "dfs_storage_authority"), f"127.0.0.1:{port}")
            schemes = dict.fromkeys(("blob_storage_scheme", "dfs_storage_scheme"), "http")
            fs.AzureFileSystem(ACCOUNT, account_key=KEY, **hosts, **schemes).create_dir("container")
            query = urlencode({"enable_tls": "false", **hosts})
            yield f"abfs://container@{ACCOUNT}.dfs.core.windows.net", query
        finally:
            server.terminate()


def _listens(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def folder(azurite, monkeypatch, tmp_path):
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", KEY)
    base, query = azurite
    return Folder.open(f"{base}/{tmp_path.name}?{query}", "output")


@pytest.mark.integration
def test_both_clients_use_the_key_of_an_azure_account(folder, tmp_path):
    first = folder.put("object", b"1")
    assert folder.put("object", b"2") is None
    second = folder.put("object", b"3", first)
    assert folder.put("object", b"4", first) is None
    assert folder.read_versioned("object") == (b"3", second)

    (tmp_path / "file").write_bytes(b"0123456789" * 1000)
    folder.upload(tmp_path / "file", "a b/file")
    folder.download("a b/file", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == (tmp_path / "file").read_bytes()
    assert {name: entry.size for name, entry in folder.entries().items()} == {"object": 1, "a b/file": 10_000}
    folder.clear()
    assert folder.entries() == {}


@pytest.mark.integration
def test_an_output_is_published_to_azure_once(folder, tmp_path):
    source = tmp_path / "input.txt"
    source.write_text("x")
    step = Step("train", settings(), folder.uri, {"records": source})
    with step.publish() as staging:
        (staging.path / "file.txt").write_text("result")
    assert step.finished() is not None
    assert folder.folders() == [step.identity]
    assert read_text(folder / "latest") is not None


@pytest.mark.integration
def test_a_wrong_key_or_container_is_one_line(azurite, monkeypatch):
    base, query = azurite
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", KEY)
    with pytest.raises(InputError, match="no bucket missing"):
        Folder.open(f"{base.replace('container@', 'missing@')}/x?{query}", "output")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", KEY[::-1].replace("=", "") + "==")
    _control_client.cache_clear()
    with pytest.raises(InputError, match=r"output=abfs://.*: the object store failed"):
        Folder.open(f"{base}/x?{query}", "output")
