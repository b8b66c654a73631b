"""A node's own manifest that was damaged in the store, or is gone, written again: from the same files the same record follows, byte for byte."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product

from ckptsync.errors import Corrupt
from ckptsync.merge.output import is_beside
from ckptsync.records import coding, saves
from ckptsync.records.manifest import Manifest
from ckptsync.records.names import RecordName, node_file_name, parse_record_name
from ckptsync.spool.marks import Took
from ckptsync.stores.contract import About
from ckptsync.worker.looking import Seen
from ckptsync.worker.plan import draft, part, without_copies
from ckptsync.worker.remembering import Kept
from ckptsync.worker.saving import Desk, outgoing, read_whole, told, with_took


def restore(seen: Seen, desk: Desk, kept: Sequence[Kept] = ()) -> tuple[str, ...]:
    """The names of those that were written again.  ``kept``: what was said and added beside pins that are gone.  Raises as `read_whole` and the store do.

    The digest in a record's name proves the bytes that are written.  What cannot be told from the files any more stays as it is:
    which files an earlier manifest of several had named, one that had moved, or one of another version of this program.
    """
    damaged = tuple(_damaged(seen, desk))
    if not damaged:
        return ()
    seen = outgoing(_rejoined(seen, kept), desk.selection)
    whole = draft(told(seen, desk.node), read_whole(seen, desk))
    beside = {path for path, held in seen.hold.held.items() if held.is_added and not held.is_pinned}
    done = []
    for parsed in damaged:
        for manifest in _candidates(parsed, whole, beside, desk, [k.took for k in kept]):
            data = coding.encode(manifest)
            if coding.record_name(manifest, data) == str(parsed):
                desk.to.store.write(str(parsed), [data], About(len(data)))
                done.append(str(parsed))
                break
    return tuple(done)


def _rejoined(seen: Seen, kept: Iterable[Kept]) -> Seen:
    """The same save with what the hook added to it, where its pin has gone."""
    files = {f.path: (f.size, f.mtime) for f in seen.hold.stats}
    hold = seen.hold
    for its in kept:
        if its.commit is not None and its.commit.files == files:
            hold = hold.with_added(its.root, (s for s in its.added if is_beside(s.path)))
    return replace(seen, hold=hold)


def _damaged(seen: Seen, desk: Desk) -> Iterator[RecordName]:
    """Those that are gone, too; not those of a newer program: they are well."""
    yield from desk.known.lost_of(desk.node, seen.spot.name)
    for name, error in desk.known.broken.items():
        parsed = parse_record_name(name)
        is_ours = parsed is not None and (parsed.kind, parsed.node) == ("manifest", desk.node)
        if parsed and is_ours and isinstance(error, Corrupt) and parsed.location.partition("~")[0] == seen.spot.name:
            yield parsed


def _candidates(
    parsed: RecordName, whole: Manifest, beside: Collection[str], desk: Desk, kept: Iterable[Took]
) -> Iterator[Manifest]:
    """All that it may have said: every file, or those that no other manifest of this node there names; by our clock, or by none.

    ``beside``: files that were found around the checkpoint, which may have come later.
    """
    live = saves.live(desk.known.manifests(whole.checkpoint))
    others = {
        f.path for k in live if (k.manifest.node, k.manifest.location) == (parsed.node, parsed.location) for f in k.manifest.files
    }
    said = [
        whole,
        *(with_took(whole, took) for took in (Took(), *kept)),
    ]  # a push says nothing, since it has no pin to remember it beside
    rest = tuple(f for f in whole.files if f.path not in others)
    written = without_copies(whole, [k.manifest for k in live]).files
    alone = tuple(f for f in whole.files if f.path not in beside)
    added = tuple(f for f in whole.files if f.path in beside)
    for files in dict.fromkeys((whole.files, rest, written, alone, added)):
        for offset, remembered in product(dict.fromkeys((0, desk.offset())), said) if files else ():
            manifest = part(replace(remembered, location=parsed.location, n=parsed.n, clock_offset=offset), files)
            yield manifest
            yield _with_names(manifest, desk.known.copies)


def _with_names(manifest: Manifest, sizes: Mapping[str, int]) -> Manifest:
    """The same with the files beside the checkpoint that the store has of this node; ``sizes``: what lies there."""
    names = {f.path: node_file_name(manifest.run, manifest.location, manifest.node, f.path) for f in manifest.files}
    files = tuple(replace(f, stored_as=names[f.path] if names[f.path] in sizes else "") for f in manifest.files)
    return replace(manifest, files=files)
