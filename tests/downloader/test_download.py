"""A download appears whole or not at all: killed at any moment, the next one completes it.

Nothing that was there is overwritten.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptsync.downloader.download import Download
from ckptsync.downloader.download_plan import PullPlan
from ckptsync.errors import ConfigError, Corrupt, NotFound, StoreError
from ckptsync.stores.contract import About, Chunk, Store, read_all
from ckptsync.stores.memory import MemoryStore
from ckptsync.stores.parallel_download import StoredFile
from tests.downloader.two_nodes import ALL, SHARD, files_below, plan, pull, store_of_two
from tests.support.exhaustive import EVERY_OTHER
from tests.support.filled_stores import flip

FEW = ("fsdp/__1_0.distcp", "rng_state_0.pth")
CHANGES = ("open", "os.rename", "os.utime", "os.mkdir", "os.truncate", "os.remove")


def download(destination: Path, **more: object) -> Download:
    return Download(destination, dataclasses.replace(plan(store_of_two()), **more))  # type: ignore[arg-type]


def hidden(destination: Path) -> Path:
    """Where the files of the whole checkpoint arrive."""
    return destination / f".checkpoint-4.pull-{plan(store_of_two()).key}"


class Interrupted(MemoryStore):
    """Calls a function before it is read for the first time."""

    def __init__(self, interrupt: Callable[[], object]) -> None:
        super().__init__()
        self._interrupt, self._lock, self._is_done = interrupt, threading.Lock(), False
        for entry in (whole := store_of_two()).names(""):
            self.write(entry.name, [read_all(whole, entry.name)])

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        with self._lock:
            if not self._is_done:
                self._is_done = True
                self._interrupt()
        super().read_into(name, start, out)


def test_a_checkpoint_appears_whole_with_its_times(tmp_path: Path) -> None:
    steps: list[tuple[int, int]] = []
    store = store_of_two()
    done = Download(tmp_path / "out", plan(store)).run(
        store, lambda done, total: steps.append((done, total))
    )
    assert files_below(tmp_path / "out") == {
        f"checkpoint-4/{path}": data for path, data in ALL.items()
    }
    assert {p.stat().st_mtime_ns for p in (tmp_path / "out/checkpoint-4").rglob("*")} == {1000}
    assert (tmp_path / "out/checkpoint-4").stat().st_mtime_ns == 1000
    assert (done.files, done.there, done.failed) == (7, 0, {})
    assert done.directory == tmp_path / "out/checkpoint-4"
    assert steps[-1] == (done.size, done.size) == (sum(map(len, ALL.values())),) * 2


def test_files_that_are_there_are_verified_and_not_downloaded_again(tmp_path: Path) -> None:
    store = store_of_two()
    pull(store, tmp_path)
    store.delete(SHARD)  # a download would fail
    again = download(tmp_path)
    assert again.run(store).there == again.preview().there == 7


@pytest.mark.parametrize("spoil", ["flip", "delete"])
def test_damage_is_never_published_and_the_next_try_downloads_only_that_file(
    tmp_path: Path, spoil: str
) -> None:
    store, good = store_of_two(), store_of_two()
    flip(store, SHARD, 1000) if spoil == "flip" else store.delete(SHARD)
    failed = download(tmp_path).run(store).failed
    assert {path: type(e) for path, e in failed.items()} == {
        "fsdp/__1_0.distcp": Corrupt if spoil == "flip" else NotFound
    }
    assert not (tmp_path / "checkpoint-4").exists()
    assert download(tmp_path).preview().there == 6
    for name in [e.name for e in good.names("run/checkpoint-4/") if e.name != SHARD]:
        good.delete(name)
    assert download(tmp_path).run(good).there == 6
    assert files_below(tmp_path / "checkpoint-4") == ALL


def test_a_file_that_was_damaged_here_since_the_last_try_is_downloaded_again(
    tmp_path: Path,
) -> None:
    store = store_of_two()
    data = read_all(store, SHARD)
    store.delete(SHARD)
    download(tmp_path).run(store)
    (hidden(tmp_path) / "rng_state_0.pth").write_bytes(b"r?")
    store.write(SHARD, [data])
    assert download(tmp_path).run(store).there == 5
    assert files_below(tmp_path / "checkpoint-4") == ALL


def test_files_nearby_are_linked_by_size_and_time_and_verified(tmp_path: Path) -> None:
    near, cut = tmp_path / "near", "trainer_state.json"
    pull(store_of_two(), near)
    near /= "checkpoint-4"
    os.utime(near / "rng_state_0.pth", ns=(7, 7))
    for path, data in ((SHARD.removeprefix("run/checkpoint-4/"), b"x" * 500_000), (cut, b"{")):
        (near / path).write_bytes(data)
        os.utime(near / path, ns=(1000, 1000))
    Download(tmp_path / "out", plan(store_of_two()), near).run(store_of_two())
    out = tmp_path / "out/checkpoint-4"
    assert files_below(out) == ALL
    linked = {path for path in ALL if (out / path).samefile(near / path)}
    assert linked == {"fsdp/meta.json", "fsdp/__0_0.distcp", "rng_state_1.pth", "empty"}
    assert (near / "rng_state_0.pth").stat().st_mtime_ns == 7


def test_other_bytes_under_the_checkpoints_name_are_left_alone(tmp_path: Path) -> None:
    pull(store_of_two(), tmp_path)
    path = tmp_path / "checkpoint-4/rng_state_0.pth"
    path.write_bytes(b"x0")
    with pytest.raises(ConfigError, match=r"rng_state_0\.pth has other bytes"):
        pull(store_of_two(), tmp_path)
    assert path.read_bytes() == b"x0"


class Deadly(MemoryStore):
    """Kills its process at the nth thing that happens: a read of it, or a change to a directory."""

    def __init__(self, other: Store, lives: int) -> None:
        super().__init__()
        for entry in other.names(""):
            self.write(entry.name, [read_all(other, entry.name)])
        self._lives, self._lock = lives, threading.Lock()
        sys.addaudithook(lambda event, _: self.happen() if event in CHANGES else None)

    def happen(self) -> None:
        with self._lock:
            self._lives -= 1
            if self._lives == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        self.happen()
        super().read_into(name, start, out)

    def write(self, name: str, chunks: object, about: About | None = None) -> None:
        data: list[Chunk] = list(chunks)  # type: ignore[call-overload]
        super().write(name, data)


def few(destination: Path) -> Download:
    kept = tuple(f for f in plan(store_of_two()).files if f.under in FEW)
    return download(
        destination, files=kept, times=dict.fromkeys(FEW, 1000), pointers={"latest": b"4"}
    )


def dies(store: Store, destination: Path, lives: int) -> bool:
    child = os.fork()
    if child == 0:
        try:
            few(destination).run(Deadly(store, lives))
        except BaseException:  # noqa: BLE001
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL), status
    return status == signal.SIGKILL


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_killed_at_every_moment_the_checkpoint_is_absent_or_whole_and_the_next_run_completes_it(
    tmp_path: Path,
) -> None:
    store, lives = store_of_two(), 1
    while dies(store, tmp_path / str(lives), lives):
        destination = tmp_path / str(lives)
        if (destination / "checkpoint-4").exists():
            assert files_below(destination / "checkpoint-4") == {path: ALL[path] for path in FEW}
        few(destination).run(store)
        assert files_below(destination) == {f"checkpoint-4/{path}": ALL[path] for path in FEW} | {
            "latest": b"4"
        }
        assert (destination / "checkpoint-4").stat().st_mtime_ns == 1000
        lives += EVERY_OTHER
    assert lives > 25


@pytest.mark.parametrize("what", ["link", "file", "dangling"])
def test_a_link_or_a_file_with_the_checkpoints_name_is_not_touched(
    tmp_path: Path, what: str
) -> None:
    (tmp_path / "elsewhere").mkdir()
    there = tmp_path / "checkpoint-4"
    (
        there.write_text("mine")
        if what == "file"
        else there.symlink_to(tmp_path / ("elsewhere" if what == "link" else "nowhere"))
    )
    with pytest.raises(ConfigError, match="not a directory"):
        pull(store_of_two(), tmp_path)
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize("inside", ["", "fsdp"])
def test_no_link_is_followed_where_files_arrive(tmp_path: Path, inside: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    if inside:
        hidden(tmp_path).mkdir()
    (hidden(tmp_path) / inside).symlink_to(tmp_path / "elsewhere")
    with pytest.raises((ConfigError, StoreError)):
        pull(store_of_two(), tmp_path)
    assert not list((tmp_path / "elsewhere").iterdir())
    assert not (tmp_path / "checkpoint-4").exists()


def test_nothing_is_written_elsewhere_where_a_link_takes_the_hidden_directorys_name(
    tmp_path: Path,
) -> None:
    (tmp_path / "elsewhere/fsdp").mkdir(parents=True)
    (tmp_path / "elsewhere/.ckptsync-a.0.part").touch()
    os.utime(tmp_path / "elsewhere/fsdp", ns=(1, 1))
    out = tmp_path / "out"

    def swap() -> None:
        hidden(out).rename(out / "aside")  # as whoever owns the output directory may
        hidden(out).symlink_to(tmp_path / "elsewhere")

    download(out).run(Interrupted(swap))
    assert sorted(path.name for path in (tmp_path / "elsewhere").rglob("*")) == [
        ".ckptsync-a.0.part",
        "fsdp",
    ]
    assert (tmp_path / "elsewhere/fsdp").stat().st_mtime_ns == 1
    assert files_below(out / "aside") == ALL


def test_an_output_directory_may_be_a_link_and_an_empty_directory_is_filled(tmp_path: Path) -> None:
    (tmp_path / "disk/checkpoint-4").mkdir(parents=True)
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    pull(store_of_two(), tmp_path / "out")
    assert files_below(tmp_path / "disk/checkpoint-4") == ALL


def test_a_part_of_a_checkpoint_that_no_pull_wrote_is_named_and_left_alone(tmp_path: Path) -> None:
    there = tmp_path / "checkpoint-4"
    there.mkdir()
    (there / "rng_state_0.pth").write_bytes(b"half a save")
    (there / "rng_state_1.pth").write_bytes(b"r1")
    with pytest.raises(
        ConfigError, match=r"exists, but 6 of 7 files differ .*: \S+ is missing, and 5 more"
    ) as caught:
        pull(store_of_two(), tmp_path)
    assert "move it away" in caught.value.hint
    assert sorted(files_below(tmp_path)) == [
        "checkpoint-4/rng_state_0.pth",
        "checkpoint-4/rng_state_1.pth",
    ]


def test_the_rename_is_durable_before_a_pointer_file_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the rename of a pull that was killed then: a power cut must not leave `latest` without
    the checkpoint that it names.
    """
    pull(store_of_two(), tmp_path)
    synced: list[str] = []

    def noted(fd: int, real: Callable[[int], None] = os.fsync) -> None:
        synced.append(str(Path(f"/proc/self/fd/{fd}").readlink()))
        real(fd)

    monkeypatch.setattr(os, "fsync", noted)
    assert download(tmp_path, pointers={"latest": b"checkpoint-4"}).run(
        store_of_two()
    ).pointers == ("latest",)
    assert synced[0] == str(tmp_path)


def test_a_second_pull_of_the_same_files_is_refused_while_the_first_runs(tmp_path: Path) -> None:
    def second() -> None:
        with pytest.raises(ConfigError, match="another pull is downloading"):
            pull(store_of_two(), tmp_path)

    assert not download(tmp_path).run(Interrupted(second)).failed
    assert files_below(tmp_path / "checkpoint-4") == ALL


def test_a_killed_writes_leftovers_go_and_a_file_that_no_pull_wrote_is_refused(
    tmp_path: Path,
) -> None:
    (hidden(tmp_path) / "fsdp").mkdir(parents=True)
    (hidden(tmp_path) / "fsdp/.ckptsync-0123456789abcdef.part").write_bytes(b"half")
    (hidden(tmp_path) / "evil.bin").write_bytes(b"?")
    with pytest.raises(ConfigError, match=r"evil\.bin: not downloaded by a pull"):
        pull(store_of_two(), tmp_path)
    (hidden(tmp_path) / "evil.bin").unlink()
    pull(store_of_two(), tmp_path)
    assert files_below(tmp_path / "checkpoint-4") == ALL


def test_directories_get_the_time_of_their_newest_file_since_trainers_rotate_by_it(
    tmp_path: Path,
) -> None:
    times = {path: 10**18 - n * 10**9 for n, path in enumerate(sorted(ALL))}
    download(tmp_path, times=times).run(store_of_two())
    final = tmp_path / "checkpoint-4"
    assert final.stat().st_mtime_ns == max(times.values())
    assert (final / "fsdp").stat().st_mtime_ns == max(
        t for p, t in times.items() if p.startswith("fsdp/")
    )
    assert {p: (final / p).stat().st_mtime_ns for p in times} == times


def test_an_interrupted_download_needs_room_for_the_rest_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_of_two()
    data = read_all(store, SHARD)
    store.delete(SHARD)
    assert download(tmp_path).run(store).failed
    store.write(SHARD, [data])
    with (hidden(tmp_path) / ".ckptsync-0.part").open("wb") as draft:
        draft.truncate(1 << 30)  # a hole takes no room
    disk, free = os.statvfs(tmp_path), [0]
    monkeypatch.setattr(
        os, "statvfs", lambda _: os.statvfs_result((1, 1, *disk[2:4], *free, *disk[5:]))
    )
    with pytest.raises(StoreError, match="0 B are free"):
        download(tmp_path).run(store)
    free = [len(data) + (32 << 10)]  # and what the small files may take in blocks
    assert free[0] < download(tmp_path).plan.size
    assert not download(tmp_path).run(store).failed


def test_a_pointer_file_is_written_if_it_names_something_else(tmp_path: Path) -> None:
    (tmp_path / "latest").write_text("global_step2")
    assert download(tmp_path, pointers={"latest": b"global_step4"}).run(
        store_of_two()
    ).pointers == ("latest",)
    assert (tmp_path / "latest").read_text() == "global_step4"
    assert (
        download(tmp_path, pointers={"latest": b"global_step4"}).run(store_of_two()).pointers == ()
    )


@pytest.mark.parametrize("name", ["checkpoint-4", "check[1]*"])
def test_unfinished_downloads_of_other_files_are_listed(tmp_path: Path, name: str) -> None:
    for other in (
        hidden(tmp_path).name,
        f".{name}.pull-0000000000000000",
        ".checkpoint-40.pull-1",
        ".check1x.pull-1",
    ):
        (tmp_path / other).mkdir()
    assert download(tmp_path, name=name).leftovers() == (
        str(tmp_path / f".{name}.pull-0000000000000000"),
    )


def test_a_mount_point_is_refused_before_anything_is_downloaded(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-4").mkdir()
    program = (
        "from pathlib import Path; import sys;"
        " from tests.downloader.two_nodes import pull, store_of_two;"
        " pull(store_of_two(), Path(sys.argv[1]))"
    )
    alone = ["unshare", "--map-root-user", "--mount", "sh", "-e", "-c"]
    mount = 'mount -t tmpfs tmpfs "$1/checkpoint-4"'
    if (
        not shutil.which("unshare")
        or subprocess.run(
            [*alone, mount, "sh", str(tmp_path)], capture_output=True, check=False
        ).returncode
    ):
        pytest.skip("mounting is not allowed here, not even in a namespace of its own")
    run = [*alone, f'{mount}; exec "$2" -c "$3" "$1"', "sh", str(tmp_path), sys.executable, program]
    done = subprocess.run(
        run, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2]
    )
    assert "ConfigError" in done.stderr
    assert "a mount point" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-4"]


def test_our_directory_is_known_as_ours_where_the_server_changes_its_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # as root's on an export with root_squash
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    pull(store_of_two(), tmp_path)
    assert files_below(tmp_path / "checkpoint-4") == ALL
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-4"]


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a directory to another user")
def test_another_users_directory_is_refused(tmp_path: Path) -> None:
    hidden(tmp_path).mkdir()
    os.chown(hidden(tmp_path), 12345, -1)
    with pytest.raises(ConfigError, match="belongs to another user"):
        pull(store_of_two(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [hidden(tmp_path).name]


def test_names_that_the_destination_takes_for_one_file_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = tuple(StoredFile(name, name, 0, None) for name in ("notes", "Notes"))
    found = Download(tmp_path, PullPlan("checkpoint-4", files))
    found._check_alike()
    assert list(tmp_path.iterdir()) == []
    touch = Path.touch

    def touch_folded(path: Path, *, exist_ok: bool) -> None:
        touch(path.with_name(path.name.lower()), exist_ok=exist_ok)

    monkeypatch.setattr(Path, "touch", touch_folded)
    with pytest.raises(ConfigError, match="takes notes and Notes for one file"):
        found.run(MemoryStore())
