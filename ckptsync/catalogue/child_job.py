"""A job: the work on a store that a head or a verifier gives to a child process."""

from __future__ import annotations

from typing import Literal

import msgspec

from ckptsync.records.report import Level

JobKind = Literal["consolidate", "verify", "retain"]


class Job(msgspec.Struct, frozen=True):
    """One piece of work on a run's ``location``, on a whole ``run``, or (both empty) on the store.

    ``size``: bytes to read.  ``level``: of a verification.  ``key`` changes when
    a retry could end differently: a job that failed waits as long as its key is the same.
    ``once_per_key``: a job that succeeded is not done again either until its key changes.
    """

    kind: JobKind
    run: str = ""
    location: str = ""
    size: int = 0
    level: Level | None = None
    key: str = ""
    once_per_key: bool = False

    @property
    def subject(self) -> str:
        """Return what messages and heartbeats call the object of this job."""
        return f"{self.run}/{self.location}" if self.location else self.run or "every run"
