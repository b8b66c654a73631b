"""What waits to be verified, also where a damaged record keeps the catalogue from saying anything."""

from __future__ import annotations

import subprocess
import sys

from ckptsync.catalogue.reading import read
from ckptsync.records.coding import encode, record_name
from ckptsync.stores.memory import MemoryStore
from ckptsync.verify.due import Schedule
from ckptsync.verify.waiting import waiting
from tests.heads import verify_next
from tests.verified import LOCATION, RUN, arrive, manifest, whole_store


def asked(store: MemoryStore, now: float) -> list[tuple[str, str]]:
    return [(f"{d.location.run}/{d.location.location}", d.why) for d in waiting(store, read(store), Schedule(), now)]


def damaged() -> MemoryStore:
    """A second node's manifest cannot be read."""
    store = whole_store()
    data = encode(manifest({"rng_state_1.pth": b"x"}, "n1"))
    store.write(record_name(manifest({"rng_state_1.pth": b"x"}, "n1"), data), [data[:-5]])
    return store


def test_what_is_new_waits() -> None:
    assert asked(whole_store(), 1e6) == [(f"{RUN}/{LOCATION}", "never")]


def test_a_location_with_a_damaged_manifest_waits_for_the_report_that_says_so() -> None:
    store = damaged()
    assert read(store).summaries == ()
    assert asked(store, 1e6) == [(f"{RUN}/{LOCATION}", "never")]
    report = verify_next(store, Schedule(), 1e6).report
    assert report is not None
    assert report.verdict == "damaged"
    assert asked(store, 30.0) == []


def test_what_a_newer_program_has_written_does_not_wait() -> None:
    store = whole_store()
    data = encode(manifest({"a": b"x"}, "n1", format=2))
    store.write(record_name(manifest({"a": b"x"}, "n1", format=2), data), [data])
    assert asked(store, 1e6) == []


def test_ages_count_on_the_clock_of_a_store_that_is_ahead() -> None:
    store = MemoryStore()
    arrive(store, {"model.safetensors": b"x", "config.json": b"{}"})
    assert asked(store, 0.0) == asked(store, 1.0)


def test_who_asks_imports_none_of_what_verifies() -> None:
    code = "import ckptsync.verify.waiting, sys; print(sorted({'numpy', 'torch', 'ckptsync.verify.location'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
