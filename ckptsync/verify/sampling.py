"""A sample of what is verified, and what may be said of it.  Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ckptsync.records.report import Reading


@dataclass(frozen=True, slots=True)
class Sample:
    """``share`` of all bytes, above 0 and at most 1; another ``seed`` takes others."""

    share: float
    seed: int = 0


def said(reading: Reading) -> str:
    """Never that all is well: only of what was read."""
    percent = 100 * reading.size / reading.of_size if reading.of_size else 100.0
    return (
        f"a sample: {reading.size} of {reading.of_size} bytes ({percent:.1f} %), in {reading.files} of {reading.of_files} files, were compared;"
        " nothing is known of the others"
    )
