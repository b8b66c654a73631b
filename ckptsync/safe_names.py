"""Which file names may be joined to a directory, and which are reserved for ckptsync.

Names come from indexes, pickles, manifests and servers. `checked_path` accepts only plain relative
paths, so that no name reaches outside of its directory; `is_ours` protects ckptsync's own
directories on every file system.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable

from ckptsync.errors import Corrupt

RECORDS = ".ckptsync"
"""The directory of records and other files of ckptsync, in a store and in each of its runs."""
STORE_FILE = f"{RECORDS}/store.json"
"""The file that makes a directory or a bucket a store."""
CONSOLIDATED = "consolidated"
"""The directory of consolidated models, in each of a store's runs."""
LOGS = "logs"
"""The directory of logs, in each of a store's runs; no new checkpoint gets this name."""
# Windows's servers give a long name a short one, too
_SHORT = re.compile(r"(ckptsy|consol)~[0-9]+")
# what nearly all of them are
_PLAIN = re.compile(r"\.?[A-Za-z0-9_-][A-Za-z0-9_.~-]*(?:/\.?[A-Za-z0-9_-][A-Za-z0-9_.~-]*)*")


def is_ours(part: str) -> bool:
    """Return whether any file system could take a directory's name for one of ckptsync's own.

    Some file systems fold case, drop invisible characters, or dots and spaces at the end, or give
    a long name a short one (``ckptsy~1``).
    """
    visible = "".join(
        c for c in unicodedata.normalize("NFKC", part) if unicodedata.category(c) != "Cf"
    )
    name = visible.casefold().rstrip(". ")
    return name in (RECORDS, CONSOLIDATED) or _SHORT.fullmatch(name) is not None


def checked_run_name(name: str) -> str:
    """Return ``name`` if a store can keep a run under it; raise Corrupt if not.

    It must be one plain path component, begin with neither ``.`` nor ``_``, and not be
    `CONSOLIDATED`.
    """
    if "/" in checked_path(name) or name.startswith((".", "_")) or name == CONSOLIDATED:
        why = f"begins with neither '.' nor '_', and is not {CONSOLIDATED}"
        raise Corrupt(f"{name!r}: not one directory's name that {why}")
    return name


def find_alike(paths: Iterable[str]) -> list[tuple[str, str]]:
    """Return pairs of paths that some file systems take for the same, or for file and directory.

    The same: they differ only in case, or in the spelling of accents. File and directory: one is,
    so folded, a directory of the other; these pairs come last.
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
        pairs += [(folded[parent], path) for parent in above if parent in folded]
    return pairs


def _folded(path: str) -> str:
    """Return a path with case and accents folded, as the least distinguishing file system does."""
    composed = unicodedata.normalize("NFC", path)
    return unicodedata.normalize("NFC", composed.casefold())


def checked_path(path: str) -> str:
    """Return ``path`` itself if it is a plain relative POSIX path; raise Corrupt if not.

    Refused: "", an empty, ``.`` or ``..`` part, a part above 255 bytes of UTF-8, a path above 4096,
    control characters, lone surrogates, and backslashes.
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
