"""Writing a report, last of all."""

from __future__ import annotations

import contextlib
from dataclasses import replace

from ckptsync.errors import Exists
from ckptsync.records.coding import encode, record_name
from ckptsync.records.names import parse_record_name, records_prefix
from ckptsync.records.report import Report
from ckptsync.stores.contract import Store


def write_report(store: Store, report: Report) -> str:
    """Give it the highest number seen plus one, and write it; the record's name.  Raises StoreError."""
    listed = (parse_record_name(entry.name) for entry in store.names(records_prefix(report.run, report.place)))
    highest = max((p.n for p in listed if p and p.kind == "report"), default=0)
    last = replace(report, n=highest + 1)
    data = encode(last)
    name = record_name(last, data)
    with contextlib.suppress(Exists):  # named by its own bytes: it is this very report
        store.create(name, [data])
    return name
