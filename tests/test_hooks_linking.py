from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from ckptsync.errors import Incomplete
from ckptsync.hooks import linking
from ckptsync.walk import walk
from tests.hooking import other_disk

__all__ = ["other_disk"]  # a fixture


def checkpoint(folder: Path) -> Path:
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / "a.bin").write_bytes(b"a" * 100_000)
    (folder / "deep" / "er" / "b.bin").write_bytes(b"")
    return folder


def pin(output_dir: Path) -> Path:
    return output_dir / "_ckptsync" / "pins" / ".new-hook-1-c"


def test_a_link_is_the_same_file_and_the_source_is_not_touched(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "c")
    before = [(p, p.stat().st_mtime_ns) for p in sorted(source.rglob("*"))]
    files = walk(source).files
    assert linking.link(source, files, pin(tmp_path)) == []
    assert (pin(tmp_path) / "files" / "a.bin").samefile(source / "a.bin")
    assert [(f.path, f.mtime) for f in walk(pin(tmp_path) / "files").files] == [(f.path, f.mtime) for f in files]
    assert [(p, p.stat().st_mtime_ns) for p in sorted(source.rglob("*"))] == before


def test_what_another_save_has_left_half_done_is_not_mixed_with_this_one(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "c")
    (pin(tmp_path) / "files").mkdir(parents=True)
    (pin(tmp_path) / "files" / "old.bin").touch()
    with pytest.raises(FileExistsError):
        linking.link(source, walk(source).files, pin(tmp_path))


def test_on_another_file_system_bytes_outlive_rotation_and_are_copied_with_their_times(tmp_path: Path, other_disk: Path) -> None:
    source = checkpoint(tmp_path / "c")
    files = walk(source).files
    copies = linking.link(source, files, pin(other_disk))
    assert [c.file.path for c in copies] == ["a.bin", "deep/er/b.bin"]
    for file in files:
        (source / file.path).unlink()
    linking.copy(copies)
    linking.close(copies)
    assert (pin(other_disk) / "files" / "a.bin").read_bytes() == b"a" * 100_000
    assert [(f.path, f.size, f.mtime) for f in walk(pin(other_disk) / "files").files] == [(f.path, f.size, f.mtime) for f in files]


def test_a_file_that_is_written_again_while_it_is_copied_is_not_taken(tmp_path: Path, other_disk: Path) -> None:
    source = checkpoint(tmp_path / "c")
    copies = linking.link(source, walk(source).files, pin(other_disk))
    (source / "a.bin").write_bytes(b"b" * 100_000)
    os.utime(source / "a.bin", ns=(1, 1))
    with pytest.raises(Incomplete, match="written again"):
        linking.copy(copies)
    linking.close(copies)


def test_a_file_that_has_shrunk_is_not_copied_for_ever(tmp_path: Path, other_disk: Path) -> None:
    source = checkpoint(tmp_path / "c")
    copies = linking.link(source, walk(source).files, pin(other_disk))
    os.truncate(source / "a.bin", 10)
    with pytest.raises(Incomplete):
        linking.copy(copies)
    linking.close(copies)


def test_no_descriptor_stays_open_when_a_file_has_vanished(tmp_path: Path, other_disk: Path) -> None:
    source = checkpoint(tmp_path / "c")
    files = walk(source).files
    (source / "deep" / "er" / "b.bin").unlink()
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises((FileNotFoundError, Incomplete)):
        linking.link(source, files, pin(other_disk))
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_only_the_thread_that_copies_steps_back() -> None:
    found: list[int] = []

    def work() -> None:
        linking.gently()
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [max(before, 10)]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before


def test_a_process_that_is_forked_meanwhile_keeps_nothing_open(tmp_path: Path, other_disk: Path) -> None:
    """Else what rotation takes would fill the disk for as long as a reader of data lives."""
    source = checkpoint(tmp_path / "c")
    copies = linking.link(source, walk(source).files, pin(other_disk))
    child = os.fork()
    if not child:
        os._exit(any(str(source) in str(d.resolve()) for d in Path("/proc/self/fd").iterdir()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    linking.copy(copies)
    linking.close(copies)
    assert (pin(other_disk) / "files" / "a.bin").read_bytes() == b"a" * 100_000
