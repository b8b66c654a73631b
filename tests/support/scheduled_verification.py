"""Verify a location as a head does, in this process: a report is written also without news."""

from __future__ import annotations

from dataclasses import replace

from ckptsync.errors import ConfigError
from ckptsync.records.report import Report
from ckptsync.stores.contract import Store
from ckptsync.verifier.verification import InStore, VerifyOptions, verify
from ckptsync.verifier.write_reports import write_report


def verify_scheduled(
    store: Store, run: str, location: str, options: VerifyOptions
) -> tuple[Report, str] | None:
    """Return the report and its record's name, ``None`` where the location cannot be judged."""
    always = replace(options, always_report=True)
    try:
        [chosen] = verify(InStore(store, run, location), always)
    except ConfigError:  # it is gone
        return None
    return (chosen.report, write_report(store, chosen.news)) if chosen.news else None
