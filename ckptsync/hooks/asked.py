"""What the hook shall do beside keeping every save, where no script says it: ``CKPTSYNC_STORE``, ``CKPTSYNC_RUN`` and ``CKPTSYNC_WAIT``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ckptsync.errors import ConfigError
from ckptsync.units import parse_duration


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
        return Asked(store, seconds("CKPTSYNC_WAIT", wait), run)
    except ConfigError as e:
        return Asked(store, 0.0, run, e)


def seconds(name: str, wait: float | str) -> float:
    """Return the seconds of a wait: a number, or a text such as `10m`.  Raises ConfigError, which calls it ``name``."""
    hint = "say for how long the training may stay at its end: 600, or 10m"
    try:
        text = str(wait).strip() or "0"
        is_number = isinstance(wait, float) or text.replace(".", "", 1).isdigit()
        found = float(text) if is_number else parse_duration(text)
    except ValueError as e:
        raise ConfigError(f"{name}: {e}", hint=hint) from e
    if not (math.isfinite(found) and found >= 0):
        raise ConfigError(f"{name}: {text[:40]} is not a time to wait", hint=hint)
    return found
