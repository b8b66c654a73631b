"""Send a node's part of a save: files first, its manifest last.  Killed anywhere and called again, with or without memory, it finishes the job.

A file lies under its plain name if this node could create that name, or if the name has the same bytes already; else under this node's
name (`FileEntry.stored_as`).  Where it lies is said in the manifest and stays so: nothing moves when another node sends its part.

A file that no manifest names is digested while it is sent.  What some manifest names is read first, and mostly need not be sent.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from ckptsync.digest import BLOCK_HEX
from ckptsync.errors import Exists, Incomplete, StoreError, Unsupported
from ckptsync.records import coding, saves
from ckptsync.records.manifest import FileEntry, Manifest
from ckptsync.records.names import file_name, node_file_name, records_prefix, sending_prefix
from ckptsync.stores.contract import About, Store
from ckptsync.stores.limits import Limits
from ckptsync.worker import plan
from ckptsync.worker.content import Guarded, Source, Stored, is_stored
from ckptsync.worker.plan import Unsent
from ckptsync.worker.snapshot import AGAIN, Held, Hold, Passed, nothing, unchanged
from ckptsync.worker.together import Together

ROUNDS = 5  # other nodes write manifests while we send; each may show that the save belongs in another location
SMALL = 1 << 20  # bytes of a file that costs a round trip rather than bandwidth
SMALL_AT_ONCE = 4  # times as many as large ones
ANNOUNCE_EVERY = 60.0  # seconds
_LEAST_ENTRY = 200  # bytes of a file in a manifest


@dataclass(frozen=True, slots=True)
class Destination:
    """The store as the upload of one checkpoint sees it.

    ``known`` reads the manifests of the checkpoint's name, ``is_contended`` whether another node is sending it now; several threads call them.
    ``passed`` is told the bytes of each chunk, by one thread at a time.  ``threads``: large files that are sent at once; ``small``: files
    at once that cost a round trip rather than bandwidth, 0: as `small_at_once` says.
    ``clock``: this node's, in ns, of a worker that tries again and again, and so may wait for proof.
    """

    store: Store
    node: str
    known: Callable[[], tuple[saves.Known, ...]]
    is_contended: Callable[[], bool] = lambda: False
    passed: Passed = nothing
    threads: int = Limits().threads
    small: int = 0
    clock: Callable[[], int] | None = None

    def must_wait(self, part: Manifest, known: Sequence[saves.Known]) -> bool:
        """Return whether it is too early to take a part for one of a save that nothing but ranks and time ties it to."""
        if self.clock is None or not (until := saves.doubtful_until(part, known)):
            return False
        return self.clock() - part.clock_offset < until or self.is_contended()


def small_at_once(threads: int) -> int:
    """Return how many small files go beside ``threads`` large ones; who asks for one at a time gets that."""
    return SMALL_AT_ONCE * threads if threads > 1 else 1


@dataclass(frozen=True, slots=True)
class Sent:
    """``location`` of the save; ``files`` and ``size`` of what this call stored.

    ``held``: a manifest of the save that has all of it already, so that nothing was written.
    """

    location: str
    files: int = 0
    size: int = 0
    held: Manifest | None = None


def upload(planned: Manifest, hold: Hold, to: Destination, read: dict[str, FileEntry] | None = None) -> Sent:
    """Store what ``planned`` names, then the manifest.  Raises Incomplete if the source changed: nothing was committed then.

    ``planned.supersedes``: manifests that are gone; those of the location where it comes to lie are replaced.
    ``read``: entries of the files that have been read, by path; what is read here is added.
    """
    _check(planned)
    together = Together(to.threads, to.passed)
    sender = _Sender(hold, replace(to, passed=together.passed), together, {} if read is None else read)
    planned, there = sender.compare(planned, known := to.known())
    if there:
        return Sent(there.location, held=there)
    if to.must_wait(planned, known):
        raise Incomplete(
            f"{planned.checkpoint}: waits for proof that another node's part is of the same save", hint="it is tried again"
        )
    with announced(to.store, planned.node, planned.run, planned.checkpoint, to.passed) as passed:
        together.hook = passed
        return _upload(planned, sender)


def _upload(planned: Manifest, sender: _Sender) -> Sent:
    to = sender.to
    for _ in range(ROUNDS):
        known = to.known()
        planned, there = sender.compare(planned, known)
        if there:
            return Sent(there.location, held=there)
        planned = replace(planned, location=saves.choose_location(planned, known))
        unsent = plan.missing(planned, _counting(planned.location, known))
        files = sender.send(planned, unsent)
        planned, known = sender.with_digests(planned), to.known()
        after = plan.missing(planned, _counting(planned.location, known))
        is_same = {u.entry.path for u in after} == {u.entry.path for u in unsent}
        if is_same and saves.choose_location(planned, known) == planned.location:
            unchanged(sender.hold)
            _commit(planned, files, known, sender)
            _resolve(planned.node, planned.location, sender)
            return Sent(planned.location, len(sender.done), sum(f.size for f in sender.done.values()))
    raise Incomplete(f"{planned.checkpoint}: other nodes kept changing the location it belongs to", hint="it is tried again")


def settle(node: str, location: str, hold: Hold, to: Destination) -> str:
    """See that a stored save lies in the location where all manifests that are known now put it; return the location it is in afterwards.

    ``node``: whose part it is; ``to.node`` is who moves it, mostly the same.  While another node sends files of that checkpoint, nothing
    moves: the next look finds it still to be done.  Nothing is deleted, since a worker may not be allowed to.
    """
    known = to.known()
    home = saves.better_location(node, location, known)
    if home == location and not in_doubt(node, location, known, to.store):
        return location
    first = known[0].manifest
    with announced(to.store, to.node, first.run, first.checkpoint, to.passed) as passed:
        together = Together(to.threads, passed)
        sender = _Sender(hold, replace(to, passed=together.passed), together, {})
        # once this node has announced itself, either it sees that another node sends, or that node sees this one
        if not to.is_contended():
            home = saves.better_location(node, location, to.known())
            if home != location:
                _move(node, location, home, sender)
                location = home
        _resolve(node, location, sender)
    return location


@contextlib.contextmanager
def announced(store: Store, node: str, run: str, checkpoint: str, passed: Passed) -> Iterator[Passed]:
    """Say in the store that this node is sending a checkpoint, as long as this lasts.

    What it has written and not yet named in a manifest would be litter to every other node.  Yields what has to be told of the bytes that
    pass, instead of ``passed``: it says so again every minute.
    """
    name = sending_prefix(run, checkpoint) + node
    said = 0.0

    def say(content: bytes) -> None:
        nonlocal said
        store.write(name, [content], About(len(content)))
        said = time.monotonic()

    def pulse(count: int) -> None:
        if time.monotonic() - said > ANNOUNCE_EVERY:
            say(b"sending\n")
        passed(count)

    say(b"sending\n")
    try:
        yield pulse
    finally:
        with contextlib.suppress(StoreError):  # the others will wait in vain for a while, and that is all
            say(b"")


def create_record(store: Store, record: coding.Record) -> None:
    """Write a record; it may be there already."""
    data = coding.encode(record)
    name = coding.record_name(record, data)
    # the name is of these bytes alone: the origin lets a store go on with what a killed try left, and what exists is this very record
    with contextlib.suppress(Exists):
        store.create(name, [data], About(len(data), name))


def _check(planned: Manifest) -> None:
    """Raise Unsupported for what a manifest cannot say, before the first file is sent: too many files, or times that no reader takes."""
    for file in planned.files:
        if not -(2**63) <= file.mtime < 2**63:
            raise Unsupported(f"{file.path}: its time is after the year 2262", hint="`touch` it: a trainer's clock was wrong")
    if len(planned.files) * _LEAST_ENTRY > coding.LIMITS["manifest"]:
        coding.encode(replace(planned, files=tuple(replace(f, digest="0" * 64, blocks=("0" * BLOCK_HEX,)) for f in planned.files)))


def _counting(location: str, known: Iterable[saves.Known]) -> list[Manifest]:
    return [k.manifest for k in saves.live(known) if k.manifest.location == location]


def _own(node: str, location: str, known: Iterable[saves.Known]) -> list[saves.Known]:
    return [k for k in saves.live(known) if (k.manifest.node, k.manifest.location) == (node, location)]


def _is_another(there: Manifest, planned: Manifest) -> bool:
    """Return whether a hook said that they are two saves: the same bytes again (random states, a part that did not change) belong to both."""
    return bool(there.save and planned.save) and there.save != planned.save


@dataclass(slots=True)
class _Sender:
    """One upload on its way.  ``done``: what it has stored, by name.  ``replaced``: other bytes lay under a name that no manifest bound.

    ``elsewhere``: names in the store that may have the bytes of a file that this node no longer holds.
    """

    hold: Hold
    to: Destination
    together: Together
    read: dict[str, FileEntry]
    elsewhere: Callable[[FileEntry], Iterable[str]] = lambda _: ()
    done: dict[str, FileEntry] = field(default_factory=dict)
    replaced: bool = False

    def with_digests(self, planned: Manifest) -> Manifest:
        """Return the plan with the digests that are known by now."""
        return replace(planned, files=tuple(self.read.get(f.path, f) for f in planned.files))

    def compare(self, planned: Manifest, known: Sequence[saves.Known]) -> tuple[Manifest, Manifest | None]:
        """Return the plan with a digest for every file that some manifest of the checkpoint's name names; and one of the save that has all of it.

        What a hook gave an id is this node's part of that save, and is said once also where another node has stored the same bytes.
        Without an id, and what comes after that, may be a copy: pulled, or brought from another node.
        """
        named = {f.path for k in known for f in k.manifest.files}
        self.together.each(self._digest, [f for f in planned.files if f.path in named])
        planned, live = self.with_digests(planned), [k.manifest for k in saves.live(known)]
        there = [m for m in live if not _is_another(m, planned)]
        ours = [m for m in there if m.node == planned.node]
        written = plan.without_copies(planned, live)
        is_own_part = bool(planned.save) and all(m.save != planned.save for m in ours)
        found = plan.stored(planned.files, planned.node, ours if is_own_part else there)
        return written, found or plan.stored(written.files, planned.node, ours)

    def send(self, planned: Manifest, unsent: Sequence[Unsent]) -> tuple[FileEntry, ...]:
        """Store what is not there yet, small files first; return the entries, which say where the files lie."""
        is_listed = any(u.lies == "there" for u in unsent)  # nothing else asks for it, and the first byte waits
        listed = {e.name: e.size for e in self.to.store.names(f"{planned.run}/{planned.location}/")} if is_listed else {}

        def put(one: Unsent) -> FileEntry:
            return self._put(planned, one, listed)

        small = [u for u in unsent if u.entry.size <= SMALL]
        large = [u for u in unsent if u.entry.size > SMALL]
        many = self.to.small or small_at_once(self.to.threads)
        return (*self.together.each(put, small, many), *self.together.each(put, large))

    def put_beside(self, planned: Manifest, file: FileEntry) -> FileEntry:
        """Store a file under the node's name; return its entry."""
        name = node_file_name(planned.run, planned.location, planned.node, file.path)
        if name not in self.done and not (file.digest and is_stored(self.to.store, name, file, self.to.passed)):
            source = self._source(file)
            self.to.store.write(name, source, source.about)
            self._learn(source, name)
        return replace(self.read.get(file.path, file), stored_as=name)

    def _put(self, planned: Manifest, one: Unsent, listed: dict[str, int]) -> FileEntry:
        name, file = file_name(planned.run, planned.location, one.entry.path), one.entry
        is_there = name in self.done or (one.lies == "there" and listed.get(name) == file.size)
        if one.lies == "taken" or not (is_there or self._put_plain(planned, one, name)):
            return self.put_beside(planned, self.read.get(file.path, file))
        return replace(self.read.get(file.path, file), stored_as="")

    def _put_plain(self, planned: Manifest, one: Unsent, name: str) -> bool:
        """Store a file under its plain name; return whether the name has its bytes now."""
        source, store = self._source(one.entry), self.to.store
        try:
            store.create(name, source, source.about)
        except Exists as e:
            file = self._digested(source)
            if e.is_same or (e.is_same is None and is_stored(store, name, file, self.to.passed)):
                return True
            return self._replace(planned, name, source)
        self._learn(source, name)
        return True

    def _replace(self, planned: Manifest, name: str, source: Source | Stored) -> bool:
        """Write over bytes that no manifest binds while nobody else sends: litter; return whether that was so."""
        file = source.entry

        def check() -> None:
            here = _counting(planned.location, self.to.known())
            if any(m.stored_name(f) == name and f.digest != file.digest for m in here for f in m.files):
                raise _Taken(f"{name}: named by another node meanwhile")

        if self.to.is_contended():
            return False
        try:
            check()  # after that: who has ended meanwhile has his manifest among those read now
            self.to.store.write(name, Guarded(source, check), source.about)
        except _Taken:
            return False
        self.replaced = True
        self._learn(source, name)
        return True

    def _learn(self, source: Source | Stored, name: str) -> None:
        self.done[name] = self._digested(source)

    def _digested(self, source: Source | Stored) -> FileEntry:
        found = source.digested()
        self.read[found.path] = found
        return found

    def _digest(self, file: FileEntry) -> None:
        if not file.digest:
            self._digested(self._source(file))

    def _source(self, file: FileEntry) -> Source | Stored:
        file = self.read.get(file.path, file)
        held = self.hold.held.get(file.path)
        if held is not None and self._has(held, file):
            return Source(held, self.to.node, file, self.to.passed, len(self.hold.held))
        for name in self.elsewhere(file):
            if is_stored(self.to.store, name, file, self.to.passed):
                return Stored(self.to.store, name, file, self.to.node, self.to.passed)
        raise Incomplete(f"{file.path}: neither this node nor the store holds its bytes any more", hint=AGAIN)

    def _has(self, held: Held, file: FileEntry) -> bool:
        """Return whether a file here has the bytes of an entry, which may be another node's with the same bytes, and other times."""
        if not file.digest or held.stat.size != file.size or held.stat.mtime == file.mtime:
            return held.stat.size == file.size
        return Source(held, self.to.node, passed=lambda _: self.to.passed(0)).digested().digest == file.digest


class _Taken(Incomplete):
    """Another node has named what was about to be replaced."""


def _commit(planned: Manifest, files: Iterable[FileEntry], known: Sequence[saves.Known], sender: _Sender) -> None:
    named = tuple(sorted(files, key=lambda f: f.path))
    here = records_prefix(planned.run, planned.location)
    # where other bytes lay, which no manifest binds, it was another save whose manifest is gone
    gone = () if sender.replaced else tuple(name for name in planned.supersedes if name.startswith(here))
    replaced = tuple(sorted({*gone, *plan.left_behind(planned, saves.live(known))}))
    n = saves.next_n(known, planned.node, planned.location)
    create_record(sender.to.store, replace(plan.part(planned, named), n=n, supersedes=replaced))


def _move(node: str, location: str, home: str, sender: _Sender) -> None:
    """Store at home what a node has in another location, and say there where it lies."""
    known = sender.to.known()
    mine, there = _own(node, location, known), _counting(home, known)
    manifest = saves.moved(mine, home, saves.next_n(known, node, home))
    sender.elsewhere = _names_of([*_counting(location, known), *there])
    lies = {f.path: f for m in there if m.node == node for f in m.files}
    lies |= {f.path: f for f in sender.send(manifest, plan.missing(manifest, there))}
    files = tuple(replace(f, stored_as=lies[f.path].stored_as) for f in manifest.files)
    create_record(sender.to.store, replace(manifest, files=files))


def in_doubt(node: str, location: str, known: Iterable[saves.Known], store: Store) -> frozenset[str]:
    """Return the names under which this node has stored files, and which may have another node's bytes.

    Another node names the same stored file with another digest.  Where the store cannot create a name exclusively, any plain name of
    a path that two nodes name with two digests may have been written by both.
    """
    here = _counting(location, known)
    contested = saves.contested(here)
    digests: dict[str, set[str]] = {}
    for f in (f for m in here for f in m.files):
        digests.setdefault(f.path, set()).add(f.digest)
    mine = ((m.stored_name(f), f) for m in here if m.node == node for f in m.files)
    several = {path for path, its in digests.items() if len(its) > 1 and not store.is_exclusive}
    return frozenset(name for name, f in mine if name in contested or (f.path in several and not f.stored_as))


def _resolve(node: str, location: str, sender: _Sender) -> None:
    """Store under the node's own name, in a further manifest, what another node has written over, or names with another digest.

    The smallest node id keeps a name that several claim, if its bytes are there.
    """
    store, known = sender.to.store, sender.to.known()
    names = in_doubt(node, location, known, store)
    if not names:
        return
    here, mine = _counting(location, known), _own(node, location, known)
    lying = {at.name: at.entry.digest for its in saves.locate(here).values() for at in its}
    manifest = saves.moved(mine, location, saves.next_n(known, node, location))
    sender.elsewhere = _names_of(here)

    def is_well(file: FileEntry) -> bool:
        name = manifest.stored_name(file)
        return name not in names or (lying[name] == file.digest and bool(is_stored(store, name, file, sender.to.passed)))

    files = tuple(f if is_well(f) else sender.put_beside(manifest, f) for f in manifest.files)
    if files != manifest.files:
        create_record(store, replace(manifest, files=files))


def _names_of(manifests: Sequence[Manifest]) -> Callable[[FileEntry], Iterable[str]]:
    """Return the question which names in the store may have the bytes of a file."""

    def names(file: FileEntry) -> Iterable[str]:
        return dict.fromkeys(m.stored_name(f) for m in manifests for f in m.files if f.path == file.path)

    return names
