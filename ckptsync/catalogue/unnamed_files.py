"""Files in a location's directories that no record names: nobody has proven them.

Whoever opens a model may run such a file, as code or as a pickle. Nothing deletes it unasked, since
people put files of their own there; so status and verification name it. In a store that is a path,
which other programs may write to, the directories of the newest locations are walked at each
reading of the catalogue.
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


def find_unnamed(store: Store, state: LocationState) -> tuple[UnnamedFile, ...]:
    """Return the files and links that no record names, first those that may run code, then by name.

    Links are found, by a walk, in a store that is a path only. Files whose name ends in
    ``config.json`` are read. Raise StoreError.
    """
    prefixes = own_prefixes(state.run, state.location)
    sizes: dict[str, int | None] = {name: state.sizes[name] for name in state.unnamed}
    sizes |= dict.fromkeys(_walk_location(store, *prefixes)[1])
    unnamed = [
        UnnamedFile(
            name.removeprefix(f"{state.run}/"),
            size,
            _may_run(store, name, is_of_model=name.startswith(prefixes[2])),
        )
        for name, size in sizes.items()
    ]
    return tuple(sorted(unnamed, key=lambda f: (not f.runs, f.name)))


def with_unnamed(
    store: Store, summaries: Sequence[Summary], busy: Container[tuple[str, str]]
) -> Iterator[Summary]:
    """Yield all summaries; in a store that is a path, the newest ones with their unnamed files.

    The directories are walked at the first ``next``, until about `MOST` files are counted. Skipped
    are locations in conflict or retired, and ``busy`` checkpoints (run, name), whose files a
    manifest will name soon. Where the walk differs from the records, the checkpoint is read. Raise
    StoreError.
    """
    newest: dict[tuple[str, str], Summary] = {}
    if directory_of(store) is not None:
        remaining = MOST
        for summary in sorted(summaries, key=lambda summary: summary.arrived, reverse=True):
            if (
                summary.status in ("CONFLICT", "RETIRED")
                or (summary.run, summary.checkpoint) in busy
            ):
                continue
            names, links = _walk_location(store, *own_prefixes(summary.run, summary.location))
            remaining -= 1 + len(names)
            if links or names_key(names) != summary.named:
                newest[summary.run, summary.location] = _look_again(store, summary)
            if remaining <= 0:
                break
    yield from (newest.get((summary.run, summary.location), summary) for summary in summaries)


def _look_again(store: Store, summary: Summary) -> Summary:
    """Read a location; return the summary with its unnamed files as they are now. Raise StoreError.

    There are none if no manifest of it counts any more.
    """
    state = read_location(store, summary.run, summary.location).of(summary.run, summary.location)
    unnamed = find_unnamed(store, state) if state else ()
    return replace(
        summary,
        unnamed=tuple(map(str, unnamed[:LINES])),
        unnamed_files=len(unnamed),
        unnamed_runs=any(file.runs for file in unnamed),
    )


def _walk_location(store: Store, own: str, records: str, model: str) -> tuple[list[str], list[str]]:
    """Return the names of a location's files, and the names of what is no file, such as links.

    ``own``, ``records``, ``model``: its prefixes (`own_prefixes`). Both lists are empty for a store
    that is no path. Unfinished drafts are left out. An OSError ends the walk early and is ignored:
    the store's own listing raises it.
    """
    root = directory_of(store)
    names, links = list[str](), list[str]()
    # an error is for the store's own listing to say
    with contextlib.suppress(OSError):
        for prefix in (own, f"{records}files/", model) if root else ():
            files = safe_open.files_below(
                str(root), prefix, is_unfinished, lambda name, _: links.append(name)
            )
            names += [name for name, _ in files]
    return names, links


def _may_run(store: Store, name: str, *, is_of_model: bool) -> bool:
    """Return whether a file may run code when it is opened; reads it if it ends in ``config.json``.

    A configuration that is no JSON cannot (False); one that cannot be read, such as a link or more
    than 4 MiB, may (True). Pickles count only in the consolidated model.
    """
    if not name.endswith("config.json"):
        return may_run(name, pickles=is_of_model)
    try:
        text = read_all(store, name, _LIMIT)
    except CkptsyncError:
        return True
    try:
        return _leads_to_code(plain_json.parse(text, name))
    except Corrupt:
        return False  # nothing opens it


def _leads_to_code(value: object) -> bool:
    """Return whether a configuration has a key that names code, at any depth."""
    if isinstance(value, dict):
        return not _KEYS.isdisjoint(value) or any(map(_leads_to_code, value.values()))
    return isinstance(value, list) and any(map(_leads_to_code, value))
