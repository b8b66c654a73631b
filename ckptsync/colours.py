"""Whether a terminal's user wants colours."""

from __future__ import annotations

import os
from typing import TextIO


def has_colours(stream: TextIO) -> bool:
    """Return whether to colour what is written to a stream: NO_COLOR and TERM=dumb forbid it."""
    is_forbidden = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return stream.isatty() and not is_forbidden
