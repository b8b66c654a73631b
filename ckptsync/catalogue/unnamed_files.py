"""Files in a location's directories that no record names: anybody's, and nobody has proven them.

Nothing deletes them unasked, since people put files of their own there; but what opens a model may
run some of them, and so they are told.
"""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterator, Sequence
from dataclasses import replace

from ckptsync import plain_json, safe_open
from ckptsync.catalogue.location_summary import LINES, Summary, UnnamedFile, names_key
from ckptsync.catalogue.uncached import read_location
from ckptsync.errors import CkptsyncError, Corrupt
from ckptsync.layouts.file_names import may_run
from ckptsync.records.location_status import LocationState
from ckptsync.records.store_paths import own_prefixes
from ckptsync.stores.contract import Store, read_all
from ckptsync.stores.opening import directory_of
from ckptsync.stores.posix.draft import is_unfinished

MOST = 2000
"""Files of VERIFIED locations that are listed once more, the newest first: each costs a call."""
_LIMIT = 4 << 20
_KEYS = frozenset({"auto_map", "auto_mapping", "custom_pipelines"})


def find_unnamed(store: Store, seen: LocationState) -> tuple[UnnamedFile, ...]:
    """Return the files that no record names, first those that may run.  Raises StoreError."""
    prefixes = own_prefixes(seen.run, seen.location)
    sizes: dict[str, int | None] = {name: seen.sizes[name] for name in seen.unnamed}
    sizes |= dict.fromkeys(_walked(store, *prefixes)[1])
    unnamed = [
        UnnamedFile(
            name.removeprefix(f"{seen.run}/"),
            size,
            _runs(store, name, is_of_model=name.startswith(prefixes[2])),
        )
        for name, size in sizes.items()
    ]
    return tuple(sorted(unnamed, key=lambda f: (not f.runs, f.name)))


def with_unnamed(
    store: Store, summaries: Sequence[Summary], busy: Container[tuple[str, str]]
) -> Iterator[Summary]:
    """Yield the summaries; of a store that is a path, the newest with what lies there now.

    A path is what others than nodes and heads may write to.  ``busy``: run and checkpoint of what
    is being sent, and is named soon.  Raises StoreError.
    """
    newest: dict[tuple[str, str], Summary] = {}
    if directory_of(store) is not None:
        left = MOST
        for s in sorted(summaries, key=lambda s: s.arrived, reverse=True):
            if s.status in ("CONFLICT", "RETIRED") or (s.run, s.checkpoint) in busy:
                continue
            names, odd = _walked(store, *own_prefixes(s.run, s.location))
            left -= 1 + len(names)
            if odd or names_key(names) != s.named:
                newest[s.run, s.location] = _looked_at(store, s)
            if left <= 0:
                break
    yield from (newest.get((s.run, s.location), s) for s in summaries)


def _looked_at(store: Store, s: Summary) -> Summary:
    location = read_location(store, s.run, s.location).of(s.run, s.location)
    unnamed = find_unnamed(store, location) if location else ()
    return replace(
        s,
        unnamed=tuple(map(str, unnamed[:LINES])),
        unnamed_files=len(unnamed),
        unnamed_runs=any(file.runs for file in unnamed),
    )


def _walked(store: Store, own: str, records: str, model: str) -> tuple[list[str], list[str]]:
    """Return the files of a location as they lie in a directory, and what is none; else nothing."""
    root = directory_of(store)
    names, odd = list[str](), list[str]()
    # an error is for the store's own listing to say
    with contextlib.suppress(OSError):
        for prefix in (own, f"{records}files/", model) if root else ():
            found = safe_open.files_below(
                str(root), prefix, is_unfinished, lambda name, _: odd.append(name)
            )
            names += [name for name, _ in found]
    return names, odd


def _runs(store: Store, name: str, *, is_of_model: bool) -> bool:
    """Return whether a file may run; of a configuration, by what it says."""
    if not name.endswith("config.json"):
        return may_run(name, pickles=is_of_model)
    try:
        return _leads_to_code(plain_json.parse(read_all(store, name, _LIMIT), name))
    except Corrupt:
        return False  # nothing opens it
    except CkptsyncError:
        return True  # a link, or gone


def _leads_to_code(value: object) -> bool:
    if isinstance(value, dict):
        return not _KEYS.isdisjoint(value) or any(map(_leads_to_code, value.values()))
    return isinstance(value, list) and any(map(_leads_to_code, value))
