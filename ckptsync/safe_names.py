"""Names of files: which are safe to join to a directory, and which are ours."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable

from ckptsync.errors import Corrupt

RECORDS = ".ckptsync"
"""The directory of records and other files of ckptsync, in a store and in each of its runs."""
STORE_FILE = f"{RECORDS}/store.json"
"""The file that makes a directory or a bucket a store."""
# what nearly all of them are
_PLAIN = re.compile(r"\.?[A-Za-z0-9_-][A-Za-z0-9_.~-]*(?:/\.?[A-Za-z0-9_-][A-Za-z0-9_.~-]*)*")


def find_alike(paths: Iterable[str]) -> list[tuple[str, str]]:
    """Return pairs of paths that some file systems take for one, or for a file and a directory.

    They differ only in case, or in the spelling of accents.
    """
    folded: dict[str, str] = {}
    pairs: list[tuple[str, str]] = []
    for path in paths:
        key = path.lower() if path.isascii() else _folded(path)
        if key in folded:
            pairs.append((folded[key], path))
        folded.setdefault(key, path)
    for key, path in folded.items():
        parts = key.split("/")
        above = ("/".join(parts[:n]) for n in range(1, len(parts)))
        pairs += [(folded[one], path) for one in above if one in folded]
    return pairs


def _folded(path: str) -> str:
    composed = unicodedata.normalize("NFC", path)
    return unicodedata.normalize("NFC", composed.casefold())


def checked_path(path: str) -> str:
    """Return ``path`` itself, if it is a plain relative POSIX path; raise Corrupt if not.

    Names come from indexes, pickles, manifests and servers, and so from anyone.
    """
    if len(path) < 256 and _PLAIN.fullmatch(path):
        return path
    parts = path.split("/")
    if (
        not path
        or len(path.encode("utf-8", "surrogatepass")) > 4096
        or any(p in ("", ".", "..") or len(p.encode("utf-8", "surrogatepass")) > 255 for p in parts)
    ):
        raise Corrupt(f"{path!r}: not a plain relative path")
    if any(unicodedata.category(c) in ("Cc", "Cs") or c == "\\" for c in path):
        raise Corrupt(f"{path!r}: has characters that no checkpoint file's name has")
    return path
