"""Each right that a store refuses is named; and nothing is left there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptsync.doctor.permissions import refused
from ckptsync.errors import StoreError, Transient
from ckptsync.stores.contract import UNKNOWN, About, Chunk, Entry, Store
from ckptsync.stores.memory import MemoryStore
from ckptsync.stores.posix.store import PosixStore
from tests.sftp_stores import over_ssh


class Denying(MemoryStore):
    """A store whose server refuses some of the methods to this user."""

    def __init__(self, *denied: str) -> None:
        super().__init__()
        self._denied = denied

    def _ask(self, method: str, name: str) -> None:
        if method in self._denied:
            raise StoreError(f"{name}: access denied", hint="ask for s3:Something")

    def names(self, prefix: str) -> Iterator[Entry]:
        self._ask("names", prefix)
        return super().names(prefix)

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        self._ask("read_into", name)
        super().read_into(name, start, out)

    def write(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        self._ask("write", name)
        super().write(name, chunks, about)

    def create(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        self._ask("create", name)
        if "refusing" in self._denied:
            return super().write(name, chunks, about)
        return super().create(name, chunks, about)

    def delete(self, name: str) -> None:
        self._ask("delete", name)
        super().delete(name)


def kinds(store: Store, *, deletes: bool = False) -> list[str]:
    return [finding.kind for finding in refused(store, "n0", deletes=deletes)]


@pytest.mark.parametrize(
    ("denied", "kind"),
    [("names", "list"), ("create", "create"), ("refusing", "create-again"), ("read_into", "read"), ("write", "write")],
)
def test_each_right_that_is_refused_is_named(denied: str, kind: str) -> None:
    assert kinds(Denying(denied)) == [f"store-{kind}"]


def test_deleting_is_wanted_of_those_who_let_go_only_and_without_it_one_file_stays() -> None:
    store = Denying("delete")
    assert kinds(store, deletes=True) == ["store-delete"]
    assert kinds(store) == kinds(store) == []
    assert [entry.name for entry in store.names("")] == [".ckptsync/doctor/n0"]


def test_a_refusal_says_what_the_server_said_and_what_to_do() -> None:
    (one,) = refused(Denying("write"), "n0", deletes=True)
    assert (one.level, one.exit_code, one.hint) == ("fail", 4, "ask for s3:Something")
    assert "access denied" in one.what


@pytest.mark.parametrize("denied", ["", "write", "refusing", "read_into"])
def test_nothing_is_left(denied: str) -> None:
    store = Denying(denied)
    kinds(store)
    assert list(store.names("")) == []


def test_a_sound_directory_is_left_as_it_was(tmp_path: Path) -> None:
    assert kinds(PosixStore(str(tmp_path)), deletes=True) == []
    assert list(tmp_path.iterdir()) == []


class Forgetful(MemoryStore):
    """A store behind a cache that shows what was there before."""

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        super().read_into(name, start, out)
        out[:] = bytes(out.nbytes)


class Lingering(MemoryStore):
    """A store that keeps what it says it has deleted."""

    def delete(self, name: str) -> None:
        """Nothing."""


@pytest.mark.parametrize(("kind", "store"), [("read", Forgetful()), ("delete", Lingering())])
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
