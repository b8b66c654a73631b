from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from watchdog.observers.polling import PollingObserverVFS

from ckptsync.mounts import chosen, is_blind
from ckptsync.service import watch as module
from ckptsync.service.watch import Watch, watch

ROOT = Path(__file__).parent.parent
MOUNTS = r"""22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 22 0:40 / /mnt/nfs rw,relatime - nfs4 server:/export rw,vers=4.2
31 22 0:41 / /mnt/with\040space rw - fuse.gcsfuse bucket rw
32 30 0:42 / /mnt/nfs/local rw master:2 propagate_from:1 - xfs /dev/vdb rw
33 22 0:43 / /over rw - nfs server:/a rw
34 33 0:44 / /over rw - tmpfs tmpfs rw
broken line
"""


class Ear:
    """Counts hints, and waits for them."""

    def __init__(self) -> None:
        self.count, self.path = 0, ""
        self._heard = threading.Condition()

    def __call__(self, path: str = "") -> None:
        with self._heard:
            self.count += 1
            self.path = path
            self._heard.notify_all()

    def hears(self, change: Callable[[], object], within: float = 60.0) -> bool:
        with self._heard:
            before = self.count
        change()
        with self._heard:
            return self._heard.wait_for(lambda: self.count > before, within)

    def settle(self) -> None:
        """Wait until hints of what was done before have come."""
        while self.hears(lambda: None, 1.0):
            pass


@pytest.fixture
def ear() -> Ear:
    return Ear()


@pytest.fixture
def watching(ear: Ear) -> Iterator[Callable[[Path], Watch]]:
    made: list[Watch] = []

    def start(path: Path) -> Watch:
        made.append(watch([str(path)], ear, poll_s=1))
        return made[-1]

    yield start
    for each in made:
        each.close()


@pytest.mark.parametrize(
    ("path", "fstype"),
    [
        ("/", "ext4"),
        ("/home/me", "ext4"),
        ("/mnt/nfs", "nfs4"),
        ("/mnt/nfs/a/b", "nfs4"),
        ("/mnt/nfsother", "ext4"),
        ("/mnt/nfs/local/run", "xfs"),
        ("/mnt/with space/x", "fuse.gcsfuse"),
        ("/over/x", "tmpfs"),
    ],
)
def test_a_path_is_on_the_innermost_and_latest_mount(path: str, fstype: str) -> None:
    assert chosen(MOUNTS.splitlines(), path).kind == fstype


def test_where_nothing_is_known_of_mounts_events_are_believed() -> None:
    assert chosen([], "/a").kind == ""
    assert not is_blind("")


@pytest.mark.parametrize(
    "fstype", ["nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "fuse", "lustre"]
)
def test_inotify_is_blind_where_other_machines_write(fstype: str) -> None:
    assert is_blind(fstype)


@pytest.mark.parametrize(
    "fstype", ["ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay", "fusectl", "f2fs"]
)
def test_inotify_sees_what_only_this_machine_writes(fstype: str) -> None:
    assert not is_blind(fstype)


def test_new_files_renames_and_finished_writes_at_any_depth_hint(
    tmp_path: Path, ear: Ear, watching: Callable[[Path], Watch]
) -> None:
    assert watching(tmp_path).modes() == {str(tmp_path): "events"}
    assert ear.hears((tmp_path / "checkpoint-1").mkdir)
    ear.settle()
    assert ear.hears(lambda: (tmp_path / "checkpoint-1/.tmpabcdef").write_bytes(b"x"))
    ear.settle()
    assert ear.hears(
        lambda: (tmp_path / "checkpoint-1/.tmpabcdef").rename(
            tmp_path / "checkpoint-1/model.safetensors"
        )
    )
    ear.settle()
    assert ear.hears(
        lambda: (tmp_path / "checkpoint-1/model.safetensors").write_bytes(b"overwritten in place")
    )


def test_a_hint_says_below_which_of_the_paths(tmp_path: Path, ear: Ear) -> None:
    paths = [tmp_path / name for name in "ab"]
    for path in paths:
        path.mkdir()
    found = watch([str(path) for path in paths], ear)
    for path in paths:
        assert ear.hears((path / "checkpoint-1").mkdir)
        ear.settle()
        assert ear.path == str(path)
    found.close()


def test_looking_does_not_hint_or_a_scan_would_cause_the_next(
    tmp_path: Path, ear: Ear, watching: Callable[[Path], Watch]
) -> None:
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "checkpoint-1/a").write_bytes(b"x")
    watching(tmp_path)

    def look() -> None:
        assert [p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()] == [b"x"]
        os.link(tmp_path / "checkpoint-1/a", tmp_path.parent / f"pin-{tmp_path.name}")

    assert not ear.hears(look, 0.5)


def test_a_long_write_does_not_hint_at_every_piece(
    tmp_path: Path, ear: Ear, watching: Callable[[Path], Watch]
) -> None:
    watching(tmp_path)
    with (tmp_path / "big").open("wb", buffering=0) as file:
        ear.settle()
        before = ear.count
        for _ in range(50):
            file.write(b"x" * 1000)
        ear.settle()
        assert ear.count == before
    assert ear.hears(lambda: None) or ear.count > before


def test_a_path_that_comes_later_is_watched_from_the_next_refresh(
    tmp_path: Path, ear: Ear, watching: Callable[[Path], Watch]
) -> None:
    path = tmp_path / "runs" / "out"
    found = watching(path)
    assert found.modes() == {str(path): "waiting"}
    assert ear.hears(path.parent.mkdir)
    found.refresh()
    assert ear.hears(path.mkdir)
    found.refresh()
    assert found.modes() == {str(path): "events"}
    ear.settle()
    assert ear.hears(lambda: (path / "a").write_bytes(b"x"))


def test_a_path_deleted_and_made_again_is_watched_again(
    tmp_path: Path, ear: Ear, watching: Callable[[Path], Watch]
) -> None:
    path = tmp_path / "out"
    path.mkdir()
    found = watching(path)
    path.rmdir()
    (tmp_path / "takes the inode").mkdir()
    path.mkdir()
    found.refresh()
    ear.settle()
    assert ear.hears(lambda: (path / "a").write_bytes(b"x"))
    path.joinpath("a").unlink()
    path.rmdir()
    found.refresh()
    assert found.modes() == {str(path): "waiting"}


def test_a_path_through_a_link_is_watched_where_it_leads(
    tmp_path: Path, ear: Ear, watching: Callable[[Path], Watch]
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    watching(tmp_path / "link")
    assert ear.hears(lambda: (tmp_path / "real/a").write_bytes(b"x"))


def test_where_inotify_is_blind_a_poll_hints(
    tmp_path: Path, ear: Ear, watching: Callable[[Path], Watch], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "table").write_text(f"1 0 0:1 / {tmp_path} rw - nfs4 server:/ rw\n")
    monkeypatch.setattr("ckptsync.mounts.TABLE", str(tmp_path / "table"))
    (tmp_path / "loop").symlink_to("/")
    assert watching(tmp_path).modes() == {str(tmp_path): "polling"}
    assert ear.hears(lambda: (tmp_path / "a").write_bytes(b"x"))
    assert ear.hears(lambda: (tmp_path / "a").write_bytes(b"overwritten"))


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENOSPC])
def test_at_inotifys_limits_a_poll_hints(
    tmp_path: Path,
    ear: Ear,
    watching: Callable[[Path], Watch],
    monkeypatch: pytest.MonkeyPatch,
    code: int,
) -> None:
    class AtLimit(PollingObserverVFS):
        def __init__(self) -> None:
            raise OSError(code, "inotify limit reached")

    monkeypatch.setattr(module, "Observer", AtLimit)
    assert watching(tmp_path).modes() == {str(tmp_path): "polling"}
    assert ear.hears(lambda: (tmp_path / "a").write_bytes(b"x"))


def test_a_hint_that_raises_does_not_end_the_hints(tmp_path: Path) -> None:
    calls: list[int] = []

    def raises(_: str) -> None:
        calls.append(1)
        raise ValueError("a bug in the caller")

    found = watch([str(tmp_path)], raises)
    for n in range(3):
        before = len(calls)
        (tmp_path / f"{n}").write_bytes(b"x")
        deadline = time.monotonic() + 60
        while len(calls) == before and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(calls) > before
    found.close()


def test_nothing_is_heard_after_closing_and_closing_twice_is_fine(
    tmp_path: Path, ear: Ear, watching: Callable[[Path], Watch]
) -> None:
    found = watching(tmp_path)
    threads = threading.active_count()
    found.close()
    found.close()
    assert threading.active_count() < threads
    assert found.modes() == {str(tmp_path): "none"}
    assert not ear.hears(lambda: (tmp_path / "a").write_bytes(b"x"), 0.5)


def test_a_path_that_cannot_be_looked_at_is_not_watched_and_raises_nothing(
    tmp_path: Path, ear: Ear, watching: Callable[[Path], Watch]
) -> None:
    (tmp_path / "circle").symlink_to("circle")
    found = watching(tmp_path / "circle")
    found.refresh()
    assert found.modes()[str(tmp_path / "circle")] in ("none", "waiting")


def inside(program: str, limit: str) -> str:
    """What a program prints where inotify has a limit, in a namespace of its own: nobody else's
    limit changes.
    """
    alone = [
        "unshare",
        "--user",
        "--map-root-user",
        "sh",
        "-e",
        "-c",
        f'echo {limit}; exec "$0" -c "$1"',
    ]
    done = subprocess.run(
        [*alone, sys.executable, program],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        timeout=60,
    )
    if "unshare" in done.stderr or "/proc/sys/user" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_limit_that_is_reached_under_way_turns_events_into_polling_and_is_told(
    tmp_path: Path,
) -> None:
    program = (
        "import sys, threading\n"
        "from pathlib import Path\n"
        "from ckptsync.service.watch import watch\n"
        f"out = Path({str(tmp_path)!r}) / 'out'; out.mkdir(); heard = threading.Event()\n"
        "found = watch([str(out)], lambda _: heard.set(), poll_s=1); "
        "print(found.modes()[str(out)], len(found.notes()))\n"
        "for n in range(20): (out / f'checkpoint-{n}').mkdir()\n"
        "for n in range(1200):\n"
        " found.refresh()\n"
        " if found.modes()[str(out)] != 'events': break\n"
        " threading.Event().wait(0.05)\n"
        "print(found.modes()[str(out)], any('inotify limit' in note for note in "
        "found.notes()))\n"
        "heard.clear(); (out / 'checkpoint-19' / 'a').touch(); print(heard.wait(60)); "
        "found.close()\n"
    )
    assert (
        inside(program, "10 > /proc/sys/user/max_inotify_watches")
        == "events 0\npolling True\nTrue\n"
    )


def test_events_that_the_kernel_dropped_are_a_hint_and_are_told(tmp_path: Path) -> None:
    program = (
        "import sys, threading\n"
        "from ckptsync.service.watch import watch\n"
        "heard = threading.Event(); found = watch([sys.argv[1]], lambda _: heard.set())\n"
        "print(*found.notes(), flush=True); sys.stdin.readline(); heard.wait(60)\n"
        "for n in range(1200):\n"
        " if found.notes(): break\n"
        " threading.Event().wait(0.05)\n"
        "print(*found.notes()); found.close()\n"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", program, tmp_path], stdin=pipe, stdout=pipe, text=True, cwd=ROOT
    ) as child:
        assert child.stdin
        assert child.stdout
        assert child.stdout.readline() == "\n"
        child.send_signal(signal.SIGSTOP)  # as a process is that gets no CPU
        os.waitpid(child.pid, os.WUNTRACED)  # until then its threads may still read events
        for n in range(int(Path("/proc/sys/fs/inotify/max_queued_events").read_text()) // 2 + 100):
            (tmp_path / f"{n}").touch()  # created, closed
        child.send_signal(signal.SIGCONT)
        child.stdin.write("\n")
        child.stdin.flush()
        assert "file system events were lost " in child.stdout.readline()
