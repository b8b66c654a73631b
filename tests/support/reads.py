"""Which files of a store in a directory are read."""

from __future__ import annotations

import pytest

from ckptsync.stores.posix.store import PosixStore


def names_read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that gets the name of each file that a store reads from now on."""
    names: list[str] = []
    read_into = PosixStore.read_into

    def counted(self: PosixStore, name: str, start: int, out: memoryview) -> None:
        names.append(name)
        read_into(self, name, start, out)

    monkeypatch.setattr(PosixStore, "read_into", counted)
    return names
