"""Read JSON that another program wrote as plain values, with the standard library alone.

Files of trainers, notes of a hook and answers of a child are read with `parse`, which raises one
error only. Files that have a type of ours are read by `ckptsync.typed_json`, which needs
msgspec.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from ckptsync.errors import not_parsed

_HALF = re.compile(r"\\u[dD][89a-fA-F]")  # half a character, unless the other half follows


def parse(
    data: bytes | bytearray | str,
    name: str,
    expected: str = "JSON",
    unique: Callable[[list[tuple[str, Any]]], Any] | None = None,
) -> Any:
    """Return the values that ``data`` holds; raise Corrupt, and no other error, if it is not JSON.

    ``name`` of the file and ``expected`` (such as "an index") are for the message. ``unique`` is
    json's ``object_pairs_hook``.

    ``NaN`` and ``Infinity`` are floats, since trainers write them, and whole numbers may have 4,300
    digits: check the range of a number before computing with it.
    """
    try:
        text = data if isinstance(data, str) else data.decode("utf-8")
        value = json.loads(text, object_pairs_hook=unique)
        if _HALF.search(text) or (isinstance(data, str) and not text.isascii()):
            # half a character could not be written anywhere
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError, MemoryError) as e:
        raise not_parsed(e, name, expected) from e
    return value
