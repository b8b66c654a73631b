"""What the hook shall do beside keeping every save, where no script says it: ``CKPTSYNC_STORE``, ``CKPTSYNC_RUN`` and ``CKPTSYNC_WAIT``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ckptsync.config.units import parse_duration
from ckptsync.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Asked:
    """Options of `CkptSyncCallback`: ``store`` for a worker that the training brings along, and ``run``, its name there; ``wait`` in seconds.

    ``refused``: why the environment's wait is none, so that nobody waits; the other options hold all the same.
    """

    store: str = ""
    wait: float = 0.0
    run: str = ""
    refused: ConfigError | None = None


def asked(environment: Mapping[str, str]) -> Asked:
    """Return what the environment says."""
    store, wait, run = (environment.get(f"CKPTSYNC_{name}", "").strip() for name in ("STORE", "WAIT", "RUN"))
    try:
        return Asked(store, _seconds(wait), run)
    except ConfigError as e:
        return Asked(store, 0.0, run, e)


def _seconds(text: str) -> float:
    if not text:
        return 0.0
    try:
        seconds = float(text) if text.replace(".", "", 1).isdigit() else parse_duration(text)
    except ValueError as e:
        raise ConfigError(f"CKPTSYNC_WAIT: {e}", hint="say for how long the training may stay at its end: 600, or 10m") from e
    if not math.isfinite(seconds):
        raise ConfigError("CKPTSYNC_WAIT: too long", hint="say for how long the training may stay at its end: 600, or 10m")
    return seconds
