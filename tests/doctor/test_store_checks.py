"""The store of a configuration: what it refuses is named, and nothing is left there.

And the output directories that a configuration names.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from ckptsync.config.loading import read
from ckptsync.doctor.diagnosis import check_runs
from ckptsync.doctor.directory_checks import check_output_dirs, expected_size
from ckptsync.doctor.store_checks import (
    Checked,
    StoreTarget,
    _check_operations,
    check_store,
    measure_clock,
)
from ckptsync.errors import StoreError, Transient
from ckptsync.stores.contract import UNKNOWN, About, Chunk, Entry, Store
from ckptsync.stores.limits import Limits
from ckptsync.stores.memory import MemoryStore
from ckptsync.stores.posix.store import PosixStore
from tests.doctor.real import doctor, needs_namespaces
from tests.doctor.real import kinds as kinds_found
from tests.support.sftp_stores import over_ssh


def denying(*denied: str) -> MemoryStore:
    """A store whose server refuses some of the methods to this user."""

    def refuse(*_: object) -> NoReturn:
        raise StoreError("access denied", hint="ask for s3:Something")

    store = MemoryStore()
    for method in denied:
        setattr(store, method, refuse)
    return store


def kinds(store: Store, *, deletes: bool = False) -> list[str]:
    return [finding.kind for finding in _check_operations(store, "n0", deletes=deletes)]


@pytest.mark.parametrize(
    ("denied", "kind"),
    [("names", "list"), ("create", "create"), ("read_into", "read"), ("write", "write")],
)
def test_each_right_that_is_refused_is_named_and_nothing_is_left(denied: str, kind: str) -> None:
    store = denying(denied)
    (one,) = _check_operations(store, "n0", deletes=False)
    assert (one.level, one.kind, one.exit_code) == ("fail", f"store-{kind}", 4)
    assert (one.hint, "access denied" in one.what) == ("ask for s3:Something", True)
    assert list(MemoryStore.names(store, "")) == []


def test_deleting_is_wanted_of_those_who_let_go_only_and_without_it_one_file_stays() -> None:
    store = denying("delete")
    assert kinds(store, deletes=True) == ["store-delete"]
    assert kinds(store) == kinds(store) == []
    assert [entry.name for entry in store.names("")] == [".ckptsync/doctor/n0"]


def test_a_sound_directory_is_left_as_it_was(tmp_path: Path) -> None:
    assert kinds(PosixStore(str(tmp_path)), deletes=True) == []
    assert list(tmp_path.iterdir()) == []


class Replacing(MemoryStore):
    """A store whose server replaces a file that is there."""

    def create(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        self.write(name, chunks, about)


class Forgetful(MemoryStore):
    """A store behind a cache that shows what was there before."""

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        super().read_into(name, start, out)
        out[:] = bytes(out.nbytes)


class Lingering(MemoryStore):
    """A store that keeps what it says it has deleted."""

    def delete(self, name: str) -> None:
        """Nothing."""


@pytest.mark.parametrize(
    ("kind", "store"),
    [("create-again", Replacing()), ("read", Forgetful()), ("delete", Lingering())],
)
def test_a_store_that_does_not_do_what_it_says_is_found(kind: str, store: Any) -> None:
    assert kinds(store, deletes=True) == [f"store-{kind}"]


def test_a_store_over_ssh_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    assert kinds(over_ssh(tmp_path), deletes=True) == []
    assert not any(tmp_path.rglob("doctor/*"))


class Silent(MemoryStore):
    """Of a server that does not answer."""

    def names(self, prefix: str) -> Iterator[Entry]:
        raise Transient(f"{prefix}: nobody answers")


def test_a_store_that_does_not_answer_has_refused_nothing() -> None:
    with pytest.raises(Transient):
        kinds(Silent())


def look(url: object, *output_dirs: Path) -> Checked:
    return check_store(StoreTarget(str(url), {}, Limits(), deletes=True), "n0", output_dirs)


def of_runs(*paths: Path | str, store: str = "/nowhere/store") -> list[tuple[str, str]]:
    text = (
        f"store: {{url: {store}}}\n"
        f"worker: {{runs: [{', '.join(f'{{path: {str(p)!r}}}' for p in paths)}]}}\n"
    )
    return [(f.level, f.kind) for f in check_runs(read(text, "x.yaml", {}))]


def test_runs_that_are_to_come_are_no_fault_and_those_that_cannot_are(tmp_path: Path) -> None:
    (tmp_path / "out/a").mkdir(parents=True)
    assert of_runs(tmp_path / "out/*", tmp_path / "soon") == []
    for gone in ("gone/*", "gone/out"):
        assert of_runs(tmp_path / gone) == [("warn", "output-absent")]
    for name in ("one", "two"):
        (tmp_path / name / "out").mkdir(parents=True)
    left_out = [("fail", "run-left-out")]
    assert of_runs(tmp_path / "one/out", tmp_path / "two/out") == left_out
    assert of_runs(tmp_path / "one/out", store=str(tmp_path)) == left_out


def test_a_sound_store_is_left_as_it_was_and_tells_the_time(tmp_path: Path) -> None:
    answer = look(str(tmp_path))
    assert answer.findings == ()
    assert answer.store is not None
    assert answer.clock == 0.0
    assert list(tmp_path.iterdir()) == []


def test_a_store_that_is_not_there_is_a_warning_unless_it_was_served_before(tmp_path: Path) -> None:
    assert look(str(tmp_path / "soon")) == Checked(())
    url = str(tmp_path / "gone/store")
    out = tmp_path / "out"
    (out / "_ckptsync").mkdir(parents=True)
    assert [(f.level, f.kind) for f in look(url, out).findings] == [("warn", "store-absent")]
    assert not Path(url).exists()
    (out / "_ckptsync/store").write_text(f"{url}\n")
    assert [(f.level, f.kind) for f in look(url, out).findings] == [("fail", "store-absent")]


@pytest.mark.parametrize("url", ["s3://", "sftp://127.0.0.1:1/x", "s3://user:s3cret@b"])
def test_a_store_that_cannot_be_reached_is_a_failure_and_no_secret_is_told(url: str) -> None:
    (one,) = look(url).findings
    assert (one.level, one.kind) == ("fail", "store-unreachable")
    assert "s3cret" not in repr(one)
    assert one.subject == (url if url.startswith("sftp") else "s3://…")


def test_a_groups_store_with_a_umask_that_shuts_the_group_out_is_found(tmp_path: Path) -> None:
    tmp_path.chmod(0o2775)
    before = os.umask(0o077)
    try:
        assert [f.kind for f in look(str(tmp_path)).findings] == ["umask"]
        for mask in (0o002, 0o022):  # the group reads what this user has written
            os.umask(mask)
            assert look(str(tmp_path)).findings == ()
    finally:
        os.umask(before)


def test_the_room_of_an_output_directory_that_is_to_come_is_that_above_it(tmp_path: Path) -> None:
    assert [f.kind for f in check_output_dirs([tmp_path / "soon/out"], 1 << 60)] == ["disk-full"]


def test_a_checkpoint_is_expected_to_hold_all_where_all_is_trained(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(100))
    model, named = str(tmp_path), {"model_name_or_path": "x"}
    assert expected_size(model, {}) == 700
    assert expected_size(model, {**named, "finetuning_type": "full"}) == 700
    assert expected_size(model, named) == 0, "LLaMA-Factory trains an adapter unless it is told"
    assert expected_size("", {}) == expected_size(str(tmp_path / "none"), {}) == 0


def test_how_a_stores_own_file_system_is_mounted_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mountinfo").write_text("40 22 0:40 / / rw - nfs4 head:/srv rw,vers=4.2,soft\n")
    (tmp_path / "store").mkdir()
    monkeypatch.setattr("ckptsync.mounts.TABLE", str(tmp_path / "mountinfo"))
    assert [f.kind for f in look(str(tmp_path / "store")).findings] == ["nfs-soft"]
    assert {f.kind for f in check_output_dirs([tmp_path])} == {"nfs-soft", "no-events"}


def test_a_clock_that_is_days_off_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = time.time
    monkeypatch.setattr("ckptsync.stores.clock.time.time", lambda: real() - 2 * 86400)
    assert measure_clock(PosixStore(str(tmp_path)), "n0") == pytest.approx(-2 * 86400, abs=2)


@needs_namespaces
def test_a_store_in_which_somebody_else_made_our_own_directory_and_no_run_may_be_made_is_found(
    tmp_path: Path,
) -> None:
    (tmp_path / ".ckptsync").mkdir()
    words = ["--publish", "--store", tmp_path, "--python", sys.executable]
    user = ["unshare", "--user", "--map-user=1000", "--map-group=1000"]
    assert "store-create" not in kinds_found(doctor(words, within=user))
    tmp_path.chmod(0o555)
    told = doctor(words, within=user)
    tmp_path.chmod(0o755)
    assert [f["exit_code"] for f in told["findings"] if f["kind"] == "store-create"] == [4]
