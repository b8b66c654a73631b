from __future__ import annotations

import pytest

from ckptsync.catalogue.summary import Fault
from ckptsync.errors import CkptsyncError, Corrupt, Unsupported
from ckptsync.records.names import parse_record_name


@pytest.mark.parametrize(
    ("record", "error", "kind"),
    [
        ("manifest-n0-0", Corrupt("x"), "digest"),
        ("model-0", Corrupt("x"), "digest"),
        ("report-1", Corrupt("x"), "note"),
        ("manifest-n0-0", Unsupported("x"), "note"),
    ],
)
def test_a_record_that_cannot_be_read_is_damage_unless_it_is_only_newer_or_a_report(
    record: str, error: CkptsyncError, kind: str
) -> None:
    name = f"run/.ckptsync/checkpoint-1~ab/{record}-{'0' * 16}.json"
    parsed = parse_record_name(name)
    assert parsed
    fault = Fault(name, parsed, error)
    assert (fault.run, fault.location) == ("run", "checkpoint-1~ab")
    assert (fault.finding.kind, fault.finding.name) == (kind, name.removeprefix("run/"))
