"""Where a checkpoint lands: no link is followed, nothing that was there is written to, and two pulls are never at work on one."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptsync.errors import ConfigError, StoreError
from ckptsync.pull.landing import Landing, is_whole
from ckptsync.pull.wanted import Order
from ckptsync.stores.arrival import Wanted
from ckptsync.stores.contract import read_all
from tests.pulling import ALL, lying, order, pull, store_of_two


def landing(destination: Path, **more: object) -> Landing:
    return Landing(destination, dataclasses.replace(order(store_of_two()), **more))  # type: ignore[arg-type]


def filled(here: Landing) -> None:
    store = store_of_two()
    with here.begun() as target:
        for file in here.order.files:
            target.write(file.under, [read_all(store, file.name)])


@pytest.mark.parametrize("what", ["link", "file", "dangling"])
def test_what_is_no_directory_of_its_own_is_not_touched(tmp_path: Path, what: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    there = tmp_path / "checkpoint-4"
    there.write_text("mine") if what == "file" else there.symlink_to(tmp_path / ("elsewhere" if what == "link" else "nowhere"))
    with pytest.raises(ConfigError, match="no directory"):
        pull(store_of_two(), tmp_path)
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize("inside", ["", "fsdp"])
def test_no_link_is_followed_where_files_are_brought_to(tmp_path: Path, inside: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    here = landing(tmp_path)
    if inside:
        here.work.mkdir()
    (here.work / inside).symlink_to(tmp_path / "elsewhere")
    with pytest.raises((ConfigError, StoreError)):
        pull(store_of_two(), tmp_path)
    assert not list((tmp_path / "elsewhere").iterdir())
    assert not here.final.exists()


def test_nothing_lands_elsewhere_where_another_directory_takes_the_name_meanwhile(tmp_path: Path) -> None:
    (tmp_path / "elsewhere/fsdp").mkdir(parents=True)
    (tmp_path / "elsewhere/.ckptsync-a.0.part").touch()
    os.utime(tmp_path / "elsewhere/fsdp", ns=(1, 1))
    here, store = landing(tmp_path / "out"), store_of_two()
    with here.begun() as target:
        here.work.rename(tmp_path / "out" / "aside")  # as whoever owns the output directory may
        here.work.symlink_to(tmp_path / "elsewhere")
        for file in here.order.files:
            target.write(file.under, [read_all(store, file.name)])
        here.check_room()
        here.become()
    assert sorted(path.name for path in (tmp_path / "elsewhere").rglob("*")) == [".ckptsync-a.0.part", "fsdp"]
    assert (tmp_path / "elsewhere/fsdp").stat().st_mtime_ns == 1
    assert lying(tmp_path / "out" / "aside") == ALL


def test_an_output_directory_may_be_a_link_and_an_empty_checkpoint_is_none(tmp_path: Path) -> None:
    (tmp_path / "disk/checkpoint-4").mkdir(parents=True)
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    pull(store_of_two(), tmp_path / "out")
    assert lying(tmp_path / "disk/checkpoint-4") == ALL


def test_a_part_that_no_pull_has_brought_is_named_and_left_alone(tmp_path: Path) -> None:
    there = tmp_path / "checkpoint-4"
    there.mkdir()
    (there / "rng_state_0.pth").write_bytes(b"half a save")
    (there / "rng_state_1.pth").write_bytes(b"r1")
    with pytest.raises(
        ConfigError, match=r"there already, but 6 of 7 files are not as wanted: \S+ is missing, and 5 more"
    ) as caught:
        pull(store_of_two(), tmp_path)
    assert "move it away" in caught.value.hint
    assert sorted(lying(tmp_path)) == ["checkpoint-4/rng_state_0.pth", "checkpoint-4/rng_state_1.pth"]


def test_a_name_is_durable_before_a_pointer_says_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that a pull has given which was killed then: a power cut must not leave `latest` without what it names."""
    pull(store_of_two(), tmp_path)
    done: list[str] = []

    def noted(fd: int, real: Callable[[int], None] = os.fsync) -> None:
        done.append(str(Path(f"/proc/self/fd/{fd}").readlink()))
        real(fd)

    monkeypatch.setattr(os, "fsync", noted)
    landing(tmp_path, pointers={"latest": b"checkpoint-4"}).point()
    assert done[0] == str(tmp_path)


def test_one_pull_at_a_time_is_at_work_on_one(tmp_path: Path) -> None:
    here = landing(tmp_path)
    with here.begun(), pytest.raises(ConfigError, match="another pull is at work"), landing(tmp_path).begun():
        pass
    with here.begun():
        pass


def test_what_a_killed_write_left_goes_and_what_nobody_brought_is_refused(tmp_path: Path) -> None:
    here = landing(tmp_path)
    filled(here)
    (here.work / "fsdp/.ckptsync-0123456789abcdef.part").write_bytes(b"half")
    (here.work / "evil.bin").write_bytes(b"?")
    with pytest.raises(ConfigError, match=r"evil\.bin: was not brought here"):
        here.become()
    (here.work / "evil.bin").unlink()
    here.become()
    assert lying(here.final) == ALL


def test_directories_have_the_time_of_their_newest_file_as_rotation_goes_by_it(tmp_path: Path) -> None:
    times = {path: 10**18 - n * 10**9 for n, path in enumerate(sorted(ALL))}
    here = landing(tmp_path, times=times)
    filled(here)
    here.become()
    assert here.final.stat().st_mtime_ns == max(times.values())
    assert (here.final / "fsdp").stat().st_mtime_ns == max(t for p, t in times.items() if p.startswith("fsdp/"))
    assert {p: (here.final / p).stat().st_mtime_ns for p in times} == times


def test_room_is_looked_for_first_and_what_is_there_takes_none(tmp_path: Path) -> None:
    disk = os.statvfs(tmp_path)
    huge = Wanted("a", "a", disk.f_bavail * disk.f_frsize * 2, None)
    here = Landing(tmp_path, Order("checkpoint-4", (huge,)))
    with here.begun(), pytest.raises(StoreError, match=r"are free, .* wanted"):
        here.check_room()


def test_a_pointer_is_written_where_it_says_something_else(tmp_path: Path) -> None:
    here = landing(tmp_path, pointers={"latest": b"global_step4"})
    (tmp_path / "latest").write_text("global_step2")
    assert here.point() == ("latest",)
    assert (tmp_path / "latest").read_text() == "global_step4"
    assert here.point() == ()


def test_other_tries_are_named(tmp_path: Path) -> None:
    here = landing(tmp_path)
    for name in (here.work.name, ".checkpoint-4.pull-0000000000000000", ".checkpoint-40.pull-1"):
        (tmp_path / name).mkdir()
    assert here.others() == (str(tmp_path / ".checkpoint-4.pull-0000000000000000"),)


def test_other_tries_of_a_name_with_a_patterns_signs_are_its_own(tmp_path: Path) -> None:
    here = landing(tmp_path, name="check[1]*")
    for name in (".check[1]*.pull-0000000000000000", ".check1x.pull-0000000000000000"):
        (tmp_path / name).mkdir()
    assert here.others() == (str(tmp_path / ".check[1]*.pull-0000000000000000"),)


def test_a_mount_point_is_refused_before_anything_is_brought(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-4").mkdir()
    program = "from pathlib import Path; import sys; from tests.pulling import pull, store_of_two; pull(store_of_two(), Path(sys.argv[1]))"
    alone = ["unshare", "--map-root-user", "--mount", "sh", "-e", "-c"]
    mount = 'mount -t tmpfs tmpfs "$1/checkpoint-4"'
    if (
        not shutil.which("unshare")
        or subprocess.run([*alone, mount, "sh", str(tmp_path)], capture_output=True, check=False).returncode
    ):
        pytest.skip("mounting is not allowed here, not even in a namespace of its own")
    run = [*alone, f'{mount}; exec "$2" -c "$3" "$1"', "sh", str(tmp_path), sys.executable, program]
    done = subprocess.run(run, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[1])
    assert "ConfigError" in done.stderr
    assert "a mount point" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-4"]


def test_where_new_directories_get_another_owner_ours_is_known_as_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)  # as root's on an export with root_squash
    pull(store_of_two(), tmp_path)
    assert lying(tmp_path / "checkpoint-4") == ALL
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-4"]


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a directory to another user")
def test_another_users_directory_is_refused(tmp_path: Path) -> None:
    here = landing(tmp_path)
    here.work.mkdir()
    os.chown(here.work, 12345, -1)
    with pytest.raises(ConfigError, match="another user's directory"), here.begun():
        pass
    assert [path.name for path in tmp_path.iterdir()] == [here.work.name]


@pytest.mark.parametrize("content", [b"r0", b"r", b"r00", b"r1", None])
def test_a_file_is_whole_with_its_own_bytes_and_no_others(tmp_path: Path, content: bytes | None) -> None:
    (wanted,) = [f for f in order(store_of_two()).files if f.under == "rng_state_0.pth"]
    if content is not None:
        (tmp_path / "rng_state_0.pth").write_bytes(content)
    assert is_whole(tmp_path, wanted) == (content == b"r0")
