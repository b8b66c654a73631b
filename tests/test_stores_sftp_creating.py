"""Small files of several threads on an SFTP server: together where nothing is in the way, and each by itself where something is."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ckptsync.errors import Exists, StoreError
from ckptsync.stores.contract import About
from ckptsync.stores.limits import Limits
from ckptsync.stores.sftp.creating import Small, Stage, create
from ckptsync.stores.sftp.store import SftpStore
from tests.paced import Counted
from tests.sftp_stores import AT_ONCE, SOON, files_of, over_ssh, served

FILES = {f"run/d{n % 3}/f{n}": bytes([n]) * (n * 777) for n in range(40)}


def smalls(names: Sequence[str]) -> list[Small]:
    return [Small(name, f"{name}.part", memoryview(name.encode())) for name in names]


def created(store: SftpStore) -> list[BaseException | None]:
    """What came of creating all of them at once."""
    with ThreadPoolExecutor(16) as pool:
        futures = [pool.submit(store.create, name, [data], About(len(data))) for name, data in FILES.items()]
    return [future.exception() for future in futures]


def contents(path: Path) -> dict[str, bytes]:
    return {p.relative_to(path).as_posix(): p.read_bytes() for p in path.rglob("*") if p.is_file() and p.name != "marker"}


@pytest.mark.parametrize("faults", [(), ("plain",), ("reorder",), ("unsynced",), ("replaces",), ("limits=1",)])
def test_many_are_there_whole_whatever_the_server_is_like(tmp_path: Path, faults: tuple[str, ...]) -> None:
    store = served(tmp_path, *faults)
    assert {*created(store)} == {None}
    assert contents(tmp_path) == FILES
    assert {type(e) for e in created(store)} == {Exists}
    assert contents(tmp_path) == FILES


def test_many_are_there_whole_over_ssh(tmp_path: Path) -> None:
    assert {*created(over_ssh(tmp_path))} == {None}
    assert contents(tmp_path) == FILES


@pytest.mark.parametrize("fault", ["", "replaces"])
def test_what_is_in_the_way_of_one_is_in_nobody_elses(tmp_path: Path, fault: str) -> None:
    (tmp_path / "b").write_bytes(b"old")
    (tmp_path / "c.part").mkdir()
    several = smalls(["a", "b", "c", "gone/d", "e"])
    create(files_of(tmp_path, fault), several)
    assert [s.stage for s in several] == [Stage.DONE, Stage.NOTHING, Stage.BEGUN, Stage.BEGUN, Stage.DONE]
    assert contents(tmp_path) == {"a": b"a", "b": b"old", "e": b"e"}


@pytest.mark.parametrize("fault", ["", "replaces"])
def test_of_two_with_one_name_one_is_told_that_it_is_taken(tmp_path: Path, fault: str) -> None:
    first, second = Small("a", "1.part", memoryview(b"1")), Small("a", "2.part", memoryview(b"2"))
    create(files_of(tmp_path, fault), [first, second])
    assert (first.stage, second.stage, (tmp_path / "a").read_bytes()) == (Stage.DONE, Stage.NOTHING, b"1")
    store = served(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(store.create, "b", [bytes([n])], About(1)) for n in range(8)]
    assert sorted(type(f.exception()).__name__ for f in futures) == ["Exists"] * 7 + ["NoneType"]
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".ckptsync")] == []


def test_a_name_that_is_taken_while_its_bytes_are_written_is_not_replaced(tmp_path: Path) -> None:
    several = [Small("a", "b", memoryview(b"1")), Small("b", "2.part", memoryview(b"2"))]  # what comes under "b" meanwhile
    create(files_of(tmp_path, "replaces"), several)
    assert [s.stage for s in several] == [Stage.DONE, Stage.BEGUN]
    assert contents(tmp_path) == {"a": b"1", "2.part": b"2"}


def test_what_another_writer_took_away_has_no_name(tmp_path: Path) -> None:
    several = [Small("a", "one", memoryview(b"1")), Small("b", "one", memoryview(b"1"))]
    create(files_of(tmp_path), several)
    assert [s.stage for s in several] == [Stage.DONE, Stage.ASKED]
    assert contents(tmp_path) == {"a": b"1"}


# the answer to the first of these is lost, with the connection: LSTAT, OPEN, WRITE, fsync, CLOSE, RENAME
@pytest.mark.parametrize("lost", [7, 3, 6, 200, 4, 18])
def test_a_connection_that_is_lost_at_any_step_costs_no_file(tmp_path: Path, lost: int) -> None:
    (tmp_path / "run").mkdir()
    several = smalls(["run/a", "run/b"])
    create(files_of(tmp_path, f"lose={lost}={tmp_path / 'marker'}", limits=AT_ONCE), several)
    assert Stage.DONE not in {s.stage for s in several}
    (tmp_path / "marker").unlink()
    for left in (tmp_path / "run").iterdir():
        left.unlink()
    store = served(tmp_path, f"lose={lost}={tmp_path / 'marker'}", limits=SOON)
    assert {*created(store)} == {None}
    assert (tmp_path / "marker").exists()
    assert {name: data for name, data in contents(tmp_path).items() if not name.endswith(".part")} == FILES


@pytest.mark.parametrize(("fault", "why"), [("full", "no space left on device"), ("denied", "permission denied")])
def test_a_refusal_is_told_with_its_reason_and_leaves_nothing(tmp_path: Path, fault: str, why: str) -> None:
    errors = created(served(tmp_path, fault))
    assert all(isinstance(e, StoreError) and why in str(e) for e, data in zip(errors, FILES.values(), strict=True) if data)
    assert {name for name, data in contents(tmp_path).items() if data} == set()


def test_bytes_of_small_files_are_paced(tmp_path: Path) -> None:
    pace = Counted()
    store = served(tmp_path, limits=Limits(pace=pace))
    store.create("a", [bytes(100_000)], About(100_000))
    assert (sum(pace.taken), max(pace.taken) <= 256 << 10) == (100_000, True)
