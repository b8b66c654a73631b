"""Folders that others use: what the system refuses has one of our names, and nothing half made is
seen.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ckptsync.errors import CkptsyncError, ConfigError, Incomplete, StoreError
from ckptsync.resume.drain import TrainingMark
from ckptsync.service.process_control import Locks
from ckptsync.spool import markers, safe_files
from ckptsync.spool.pins import list_pins
from ckptsync.spool.safe_files import list_paths, remove, translate_errors, try_rename, write_json
from ckptsync.stores.memory import MemoryStore
from ckptsync.walk import UnsafeSpool
from ckptsync.worker.options import RunDir, WorkerOptions
from ckptsync.worker.worker import Worker
from tests.support.worker_in_process import ONE, lay, settle, tick, worker

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root makes directories of other users")
NOBODY = 65534


@pytest.mark.parametrize(
    ("number", "ours"),
    [
        (errno.EACCES, ConfigError),
        (errno.EPERM, ConfigError),
        (errno.ENOENT, Incomplete),
        (errno.ENOTDIR, Incomplete),
        (errno.ENOSPC, StoreError),
        (errno.EDQUOT, StoreError),
        (errno.EROFS, StoreError),
        (errno.ENAMETOOLONG, StoreError),
    ],
)
def test_each_refusal_is_one_of_our_errors(number: int, ours: type[CkptsyncError]) -> None:
    with pytest.raises(ours, match="/out: ") as told, translate_errors(Path("/out")):
        raise OSError(number, "refused")
    assert type(told.value) is ours


def test_a_file_is_written_whole_and_never_into_a_folder_that_is_gone(spool: Path) -> None:
    write_json(spool, "a.json", {"node": "n0"})
    assert [(p.name, p.read_text()) for p in spool.iterdir()] == [("a.json", '{"node": "n0"}\n')]
    with pytest.raises(FileNotFoundError):
        write_json(spool / "gone", "a.json", {})
    assert not (spool / "gone").exists()


@pytest.mark.parametrize(
    ("mode", "copied"), [(0o600, 0o600), (0o400, 0o600), (0o644, 0o644), (0o4755, 0o755)]
)
def test_nobody_may_read_a_copy_who_may_not_read_the_original(
    tmp_path: Path, spool: Path, mode: int, copied: int
) -> None:
    source, copy = tmp_path / "source", spool / "copy"
    source.touch()
    source.chmod(mode)
    copy.touch(0o666)  # a killed try left it
    with (
        source.open("rb") as like,
        safe_files.open_folder(spool) as to,
        safe_files.create_copy(like.fileno(), spool, to, "copy") as out,
    ):
        out.write(b"x")
    assert (stat.S_IMODE(copy.stat().st_mode), copy.read_bytes()) == (copied, b"x")
    assert list(spool.iterdir()) == [copy]


def test_a_name_that_somebody_has_is_not_taken_from_him(spool: Path) -> None:
    for name in ("a", "b"):
        (spool / name).mkdir()
        (spool / name / "x").write_text(name)
    assert not try_rename(spool / "a", spool / "b")
    assert not try_rename(spool / "gone", spool / "c")
    assert try_rename(spool / "a", spool / "c")
    assert [(p.name, (p / "x").read_text()) for p in list_paths(spool)] == [("b", "b"), ("c", "a")]


@pytest.fixture
def thesis(tmp_path: Path) -> Path:
    """What a user of the worker's has elsewhere."""
    for name in ("thesis", "thesis/chapter-1.0", "thesis/chapter-1.0/files", "thesis/files"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "text").write_text("ten years of work")
    return tmp_path / "thesis"


def whole(folder: Path) -> dict[str, str]:
    return {
        str(p.relative_to(folder)): p.read_text() for p in sorted(folder.rglob("*")) if p.is_file()
    }


@pytest.mark.parametrize(
    "link",
    [
        "manifests",
        "pins",
        "saves",
        "trains",
        "added",
        "pins/checkpoint-4.0",
        "pins/checkpoint-4.0/files",
    ],
)
def test_no_link_in_the_spool_is_followed(
    tmp_path: Path, spool: Path, thesis: Path, link: str
) -> None:
    """`manifests -> ~/thesis` was removed at the first tick, and a linked pin was written
    through.
    """
    before, store = whole(thesis), MemoryStore()
    out = tmp_path
    lay(out, ONE)
    (spool / link).parent.mkdir(parents=True, exist_ok=True)
    if link.endswith("files"):
        write_json((spool / link).parent, "owner.json", {"node": "n0"})
    (spool / link).symlink_to(thesis)
    try:
        errors = settle(worker(out, store)).errors
    except (
        UnsafeSpool
    ) as e:  # nothing can be served here: the daemon leaves the directory out, and says so
        errors = (str(e),)
    assert whole(thesis) == before
    if link in ("manifests", "pins", "pins/checkpoint-4.0", "pins/checkpoint-4.0/files"):
        assert any("expected a directory, found a symlink or a file" in error for error in errors)


def test_a_link_for_the_marks_of_ranks_is_a_failure_of_its_directory(
    tmp_path: Path, spool: Path, thesis: Path
) -> None:
    lay(tmp_path, ONE)
    TrainingMark(tmp_path, "before", os.getpid(), time.time()).begin()
    (spool / "saves").symlink_to(thesis)
    failures = worker(tmp_path, MemoryStore()).scan(0.0).failures
    assert [failure.error for failure in failures] == ["UnsafeSpool"]


@pytest.mark.parametrize(
    "name",
    ["owner.json", "notes.json", "stored", ".fresh-owner.json", ".copy", ".clone", ".owner-n0"],
)
def test_nothing_is_written_through_a_link_in_a_pin(tmp_path: Path, name: str) -> None:
    """`pins/…/.fresh-… -> ~/.ssh/authorized_keys` was written."""
    lay(tmp_path, ONE)
    store = MemoryStore()
    settle(worker(tmp_path, store))
    (pin,) = list_pins(tmp_path)
    (tmp_path / "authorized_keys").write_text("mine")
    (pin.path / name).unlink(missing_ok=True)
    (pin.path / name).symlink_to(tmp_path / "authorized_keys")
    for path in pin.path.iterdir():
        if path.name in ("notes.json", "stored") and path.name != name:
            path.unlink()
    settle(worker(tmp_path, store), 1000.0)
    assert (tmp_path / "authorized_keys").read_text() == "mine"
    assert not stat.S_IMODE((tmp_path / "authorized_keys").stat().st_mode) & 0o022


@as_root
def test_a_file_of_another_user_in_the_spool_counts_as_none(spool: Path) -> None:
    safe_files.write(spool / "mark", b"forged")
    os.chown(spool / "mark", NOBODY, NOBODY)
    assert safe_files.read(spool / "mark", 10) is None
    with pytest.raises(FileNotFoundError):
        safe_files.append(spool / "mark")


@as_root
@pytest.mark.parametrize("what", ["_ckptsync", "_ckptsync/pins", "_ckptsync/manifests"])
def test_a_directory_of_somebody_else_in_the_spool_is_refused_with_the_reason(
    tmp_path: Path, spool: Path, what: str
) -> None:
    lay(tmp_path, ONE)
    safe_files.make_folders(spool / "pins")
    safe_files.make_folders(spool / "manifests" / "checkpoint-1.0")
    os.chown(tmp_path / what, NOBODY, NOBODY)
    with pytest.raises(UnsafeSpool, match=f"{what}: belongs to uid {NOBODY}, and this is uid 0"):
        safe_files.list_names(tmp_path / what)
    if what == "_ckptsync":
        with pytest.raises(UnsafeSpool), contextlib.closing(Locks("n0")) as locks:
            locks.hold(spool)
    try:
        said = settle(worker(tmp_path, MemoryStore())).errors
    except UnsafeSpool as e:
        said = (str(e),)
    assert any("belongs to uid" in error for error in said)
    assert (spool / "manifests" / "checkpoint-1.0").is_dir()


def test_folders_are_this_users_alone_whatever_the_umask(tmp_path: Path) -> None:
    lay(tmp_path, ONE)
    before = os.umask(0o002)
    try:
        settle(worker(tmp_path, MemoryStore()))
    finally:
        os.umask(before)
    modes = {
        stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "_ckptsync").rglob("*") if p.is_dir()
    }
    assert modes | {stat.S_IMODE((tmp_path / "_ckptsync").stat().st_mode)} == {0o700}


def test_a_folder_that_is_used_is_no_more_writable_by_the_group(
    tmp_path: Path, spool: Path
) -> None:
    lay(tmp_path, ONE)
    (spool / "pins").mkdir()
    w = worker(tmp_path, MemoryStore())
    settle(w)
    every = [spool, spool / "pins"]
    for path in every:
        path.chmod(0o2775)
    assert settle(w, 1000.0).errors == ()
    assert {stat.S_IMODE(path.stat().st_mode) for path in every} == {0o755}


def test_a_spool_elsewhere_is_the_operators_link_and_nobody_elses(tmp_path: Path) -> None:
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    out.mkdir()
    elsewhere.mkdir()
    (out / "_ckptsync").symlink_to("../elsewhere")
    lay(out, ONE)
    assert settle(worker(out, MemoryStore())).errors == ()
    assert (elsewhere / "pins" / "checkpoint-4.0").is_dir()
    # into a sticky one, too, others can move a link that this user made elsewhere
    for mode in (0o777, 0o775, 0o1777, 0o1775):
        out.chmod(mode)
        with pytest.raises(UnsafeSpool, match="a link that somebody else may have made"):
            safe_files.list_names(out / "_ckptsync")


@pytest.mark.parametrize("process", ["../../thesis/text", "/etc/passwd", ".."])
def test_a_name_in_the_spool_leads_nowhere_else(spool: Path, thesis: Path, process: str) -> None:
    before = whole(thesis)
    safe_files.make_folders(spool / "trains")
    for act in (safe_files.unlink, safe_files.remove):
        with pytest.raises(UnsafeSpool):
            act(spool / "trains" / process / "text")
    with pytest.raises(UnsafeSpool):
        remove(spool / "trains" / "..")
    assert whole(thesis) == before


def test_a_link_that_is_removed_goes_alone(spool: Path, thesis: Path) -> None:
    before = whole(thesis)
    (spool / "pins").mkdir()
    (spool / "pins" / "inner").mkdir()
    (spool / "pins" / "inner" / "link").symlink_to(thesis)
    remove(spool / "pins")
    assert list(spool.iterdir()) == []
    os.link(thesis / "text", spool / "hook.log")
    with pytest.raises(FileNotFoundError, match="no regular file of this user's alone"):
        markers.write_log(spool, "saved")
    assert whole(thesis) == before


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_worker_that_runs_uses_a_spool_that_is_made_again(tmp_path: Path) -> None:
    lay(tmp_path, ONE)
    store, spool = MemoryStore(), tmp_path / "_ckptsync"
    w = worker(tmp_path, store)
    settle(w)
    before = open_descriptors()
    for n in range(1, 4):
        shutil.rmtree(spool)
        safe_files.make_folders(spool / "pins")  # another process is quicker, and makes it
        assert settle(w, 1000.0 * n).errors == ()
        assert [pin.checkpoint for pin in list_pins(tmp_path)] == ["checkpoint-4"]
    assert open_descriptors() <= before


REPLACED = ("pins/checkpoint-4.0/owner.json", "pins/checkpoint-4.0/notes.json", "hook.log")


@pytest.mark.parametrize(
    "pipe",
    [
        "trains",
        "trains/p.json",
        "saves",
        "saves/checkpoint-4@s",
        "saves/checkpoint-4@s/rank-0.json",
        "pins",
        "pins/checkpoint-4.0",
        *(f"pins/checkpoint-4.0/{name}" for name in ("owner.json", "notes.json", "commit.json")),
        *(f"pins/checkpoint-4.0/{name}" for name in ("files", "files/model.safetensors", "added")),
        "manifests",
        "store",
        "hook.log",
    ],
)
def test_a_pipe_in_the_spool_holds_up_nobody(tmp_path: Path, spool: Path, pipe: str) -> None:
    lay(tmp_path, ONE)
    safe_files.make_folders((spool / pipe).parent)
    if pipe != "trains" and not pipe.startswith("trains/"):  # else no marks are read
        begun = markers.TrainingProcess("t", 0, 1, 1, "h", 1, "", "", 1.0)
        markers.write_mark(markers.process_path(spool, "p"), begun)
    os.mkfifo(spool / pipe)
    with contextlib.suppress(CkptsyncError):
        settle(worker(tmp_path, MemoryStore()))
    markers.read_log(spool)
    assert stat.S_ISFIFO((spool / pipe).lstat().st_mode) or pipe in REPLACED


SWAP = """
import os, sys
from pathlib import Path
os.setgroups([]); os.setgid(65534); os.setuid(65534)
out, thesis = map(Path, sys.argv[1:])
while True:
    try:
        os.rename(out / "_ckptsync", out / "aside")
        os.symlink(thesis, out / "_ckptsync")
        os.unlink(out / "_ckptsync")
        os.rename(out / "aside", out / "_ckptsync")
    except OSError:
        pass
"""


@as_root
def test_who_may_write_there_cannot_lead_the_worker_elsewhere(tmp_path: Path, thesis: Path) -> None:
    out = tmp_path / "out"
    lay(out, ONE)
    for above in (out, *out.parents):
        if above != Path("/tmp") and above.is_relative_to("/tmp"):
            above.chmod(above.stat().st_mode | 0o055)
    out.chmod(0o777)
    for name in ("manifests/checkpoint-9", "pins/.gone-n0-x", "pins/.new-n0-x"):
        (thesis / name).mkdir(parents=True)
        (thesis / name / "text").write_text("ten years of work")
    before = whole(thesis)
    swapping = subprocess.Popen([sys.executable, "-c", SWAP, out, thesis])
    try:
        for n in range(100):
            with contextlib.suppress(CkptsyncError):
                tick(Worker(WorkerOptions("n0", RunDir("run", out)), MemoryStore()), float(n))
    finally:
        swapping.kill()
        swapping.wait()
    assert whole(thesis) == before
