"""Memory that nobody uses any more, given back to the system: glibc keeps what threads have freed, some 20 MB after a large save."""

from __future__ import annotations

import ctypes


def give_back() -> None:
    """Some ms; nothing where another C library keeps house."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):  # musl has none, and keeps less
        return
