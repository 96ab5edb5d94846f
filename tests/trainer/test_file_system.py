"""Files that are replaced whole: what is on the disk when the new one takes the place of the old."""

import errno
import os

import pytest

from launch.processes.run_folder import locked, write_json
from trainer import file_system
from trainer.file_system import read_file, way_to_write, write_whole


@pytest.fixture
def flushed(tmp_path, monkeypatch) -> list[tuple[bytes, bytes]]:
    """(what is flushed, what the file's readers see then) of each flush; the file is the only one of the folder."""
    seen = list[tuple[bytes, bytes]]()

    def fsync(number: int) -> None:
        [fresh] = tmp_path.glob(".file.*")
        assert os.fstat(number).st_ino == fresh.stat().st_ino
        seen.append((fresh.read_bytes(), (tmp_path / "file").read_bytes()))

    monkeypatch.setattr(file_system.os, "fsync", fsync)
    return seen


def test_a_file_that_must_outlast_a_loss_of_power_is_on_the_disk_before_it_replaces_the_old_one(
    tmp_path, flushed
):
    (tmp_path / "file").write_bytes(b"old")
    write_whole(tmp_path / "file", b"new", flush=True)
    assert flushed == [(b"new", b"old")]
    assert [path.name for path in tmp_path.iterdir()] == ["file"] and (
        tmp_path / "file"
    ).read_bytes() == b"new"


def test_what_is_written_many_times_does_not_wait_for_the_disk(tmp_path, flushed):
    write_json(tmp_path / "file", {"since": 1.0})
    assert not flushed and read_file(tmp_path / "file", {"since": float}, []) == {"since": 1.0}


def test_a_lock_neither_empties_a_file_nor_follows_a_link(tmp_path):
    precious, link = tmp_path / "precious", tmp_path / "lock"
    precious.write_text("all that I have")
    link.symlink_to(precious)
    with pytest.raises(ValueError, match="lock is a link, and a lock must be a file; remove the link"):
        locked(link)
    with locked(precious), pytest.raises(BlockingIOError):
        locked(precious)
    assert precious.read_text() == "all that I have"
    link.unlink()
    link.symlink_to(tmp_path / "missing")
    with pytest.raises(ValueError, match="is a link"):
        locked(link)
    assert not (tmp_path / "missing").exists()


WAYS = {
    "ENOSPC": "free space",
    "EDQUOT": "free space",
    "EROFS": "make the folder writable",
    "EACCES": "make the folder writable",
    "EPERM": "make the folder writable",
    "EFBIG": "raise the limit of file sizes (`ulimit -f`)",
    **dict.fromkeys(("EIO", "EMFILE", "ESTALE", "ENOENT"), "look at its disk"),
}


@pytest.mark.parametrize(("name", "way"), WAYS.items())
def test_the_advice_about_a_failed_write_fits_its_reason(name, way):
    assert way_to_write(OSError(getattr(errno, name), "")) == way
