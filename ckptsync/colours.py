"""Decide whether output is coloured."""

from __future__ import annotations

import os
from typing import TextIO


def has_colours(stream: TextIO) -> bool:
    """Return whether a stream is a terminal whose user has not forbidden colours.

    NO_COLOR and TERM=dumb forbid them.
    """
    is_forbidden = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return stream.isatty() and not is_forbidden
