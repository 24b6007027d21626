"""Files of a directory and of its copy in an object store are read alike."""

import pytest

from infembed_ray.storage.object_store import Folder
from infembed_ray.storage.places import address, listing, open_binary, place_of, read_binary, read_text
from infembed_ray.storage.steps import fingerprint
from tests.support.object_store import upload


@pytest.fixture(params=["directory", "store"])
def place(request, tmp_path):
    """A place with two files."""
    (tmp_path / "files/below").mkdir(parents=True)
    (tmp_path / "files/a.txt").write_text("äöü")
    (tmp_path / "files/below/b.txt").write_text("b")
    if request.param == "directory":
        return tmp_path / "files"
    folder = Folder.open(f"{request.getfixturevalue('bucket')}/{tmp_path.name}", "x")
    upload(tmp_path / "files", folder)
    return folder


def test_files_are_listed_and_read(place):
    assert listing(place) == {"a.txt": 6, "below/b.txt": 1}
    assert listing(place / "a.txt") == {"": 6}
    assert read_text(place / "a.txt") == "äöü"
    assert read_text(place / "nothing") is None
    with pytest.raises(FileNotFoundError):
        read_binary(place / "nothing")
    with open_binary(place / "a.txt") as stream:
        stream.seek(2)
        assert stream.read(2) == "ö".encode()


def test_names_are_those_of_a_path(place):
    file = place / "below" / "b.txt"
    assert (file.name, file.suffix, file.parent.name) == ("b.txt", ".txt", "below")
    assert (file.is_file(), place.is_file(), place.exists(), (place / "c").exists()) == (True, False, True, False)


@pytest.mark.parametrize("name", ["part 1.jsonl", "a%41.jsonl", "b#c?d=e&f.jsonl", "year=2024/ä+ö.jsonl"])
def test_any_name_that_a_listing_returns_can_be_read(place, name):
    if isinstance(place, Folder):
        place.write(name, "x")
    else:
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_text("x")
    assert listing(place)[name] == 1
    assert read_text(place / name) == "x"
    assert (place / name).name == name.split("/")[-1]


def test_an_address_leads_back_to_its_place(place, tmp_path):
    for each in (place, Folder("s3://bucket/a", "scheme=http"), tmp_path / "what?"):
        assert place_of(address(each)) == each


def test_a_fingerprint_changes_with_a_file(place):
    before = fingerprint(place)
    assert fingerprint(place) == before
    if isinstance(place, Folder):
        place.write("a.txt", "longer than before")
    else:
        (place / "a.txt").write_text("longer than before")
    assert fingerprint(place) != before
