"""How files get into a pin, and what of a pin's word they undo."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptsync.spool.links import grow, trim
from ckptsync.spool.marks import Took
from ckptsync.spool.pins import mark_stored, open_pin, pins, record
from ckptsync.walk import walk


@pytest.mark.parametrize("change", ["grow", "trim"])
def test_what_was_said_of_a_pins_files_is_not_said_of_others(tmp_path: Path, change: str) -> None:
    source = tmp_path / "checkpoint-4"
    source.mkdir()
    (source / "a").write_bytes(b"a")
    pin = open_pin(tmp_path, source.name, 0, "n0")
    assert pin
    grow(pin, source, [f.path for f in walk(source).files])
    record(pin, Took(stable=1, finished=2))
    mark_stored(pin)
    (before,) = pins(tmp_path)
    assert (before.took.stable, before.stored) == (1, True)
    (source / "late").write_bytes(b"l")
    grow(before, source, ["late"]) if change == "grow" else trim(before, ["a"])
    (after,) = pins(tmp_path)
    assert (after.took, after.stored) == (Took(), False)
