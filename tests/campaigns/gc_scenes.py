"""Stores of which something is to go, and what has to be true of them wherever somebody who removes
it dies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ckptsync.catalogue.uncached import read_state
from ckptsync.head.gc import RetentionRequest, RetentionResult, apply_retention, read_manifests
from ckptsync.head.orphans import delete_orphans, find_orphans
from ckptsync.head.removal import LEASE
from ckptsync.head.retention_rules import Rules
from ckptsync.records.manifest import Manifest
from ckptsync.records.store_paths import parse_record_name
from ckptsync.safe_names import RECORDS
from ckptsync.stores.clock import store_now
from ckptsync.stores.contract import Entry, Store, StoreWrapper, read_all
from ckptsync.stores.memory import MemoryStore
from ckptsync.verifier.verification import VerifyOptions, verify_location
from tests.campaigns.cluster import stored_bytes
from tests.support.retention_stores import FIRST, entry, fill, put, verify

MOST_LOOKS = 6  # of gc, until nothing is left to do
DRAFT = ".ckptsync-0123456789abcdef.part"
Files = Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class Scene:
    """A store before a gc under ``rules``, which are ``said`` in a configuration so.

    ``kept``: locations that stay VERIFIED, whoever dies; ``strays``: orphaned files.
    """

    name: str
    files: Files
    rules: Rules
    said: Mapping[str, object]
    kept: frozenset[str]
    strays: frozenset[str] = frozenset()

    @property
    def asked(self) -> RetentionRequest:
        """Of another run nothing is said, and no grace is given."""
        return RetentionRequest(lambda run: self.rules if run == "run" else Rules(), 0.0)

    def end(self) -> Files:
        """What is left where nobody dies."""
        store = remembered(
            {name: data for name, data in self.files.items() if name not in self.strays}
        )
        for _ in range(MOST_LOOKS):
            apply_retention(store, self.asked)
        return content(store)


def scenes() -> dict[str, Scene]:
    """Marking, removing, removing shards, withdrawing, deleting orphans: each from a store of four
    checkpoints, and one of another run.
    """
    plain, last, shards = filled(), Rules(keep_last=2), Rules(shards=1)
    newest, every = (
        frozenset({"checkpoint-3", "checkpoint-4"}),
        frozenset(f"checkpoint-{n}" for n in range(1, 5)),
    )
    strays = {f"run/checkpoint-{n}/stray.bin": b"x" for n in range(1, 5)} | {
        f"run/checkpoint-2/{DRAFT}": b"y"
    }
    found = (
        Scene("mark", plain, last, {"keep_last": 2}, newest),
        Scene("remove", marked(plain, last), last, {"keep_last": 2}, newest),
        Scene("shards", marked(plain, shards), shards, {"shards": "drop-after:1"}, every),
        Scene("back", marked(plain, last), Rules(keep_last=4), {"keep_last": 4}, newest),
        Scene("orphans", {**plain, **strays}, Rules(), {}, every, frozenset(strays)),
    )
    return {scene.name: scene for scene in found}


def filled() -> Files:
    """Of one checkpoint two nodes sent files, and one of them other bytes under a name of the
    other's; another has moved from where it was first.
    """
    store = MemoryStore()
    for n in (3, 4):
        fill(store, f"checkpoint-{n}", FIRST + n)
    own, (mine,) = (
        b"a of another node",
        read_manifests(store, [fill(store, "checkpoint-1", FIRST + 1, is_verified=False)]).values(),
    )
    store.write(f"run/{RECORDS}/checkpoint-1/files/n1/a.bin", [own])
    theirs = replace(
        mine, node="n1", save="one", files=(entry("a.bin", own, FIRST + 1),), ranks=(1,)
    )
    _said_again(store, replace(mine, save="one"), theirs)
    (moved,) = read_manifests(
        store, [fill(store, "checkpoint-2", FIRST + 2, is_verified=False)]
    ).values()
    before = put(store, replace(moved, location="checkpoint-2~0badcafe"))
    _said_again(store, replace(moved, n=1, supersedes=(before,)))
    fill(store, "checkpoint-1", run="other")
    return content(store)


def _said_again(store: Store, *manifests: Manifest) -> None:
    location = manifests[0].location
    for e in [*store.names(f"run/{RECORDS}/{location}/")]:
        if parse_record_name(e.name):
            store.delete(e.name)
    verify(store, location, tuple(put(store, m) for m in manifests))


def marked(files: Files, rules: Rules) -> Files:
    """The same once a head has looked."""
    store = remembered(files)
    apply_retention(store, RetentionRequest(lambda run: rules if run == "run" else Rules(), 1e9))
    return content(store)


def remembered(files: Files) -> MemoryStore:
    """These files, in memory."""
    store = MemoryStore()
    for name, data in files.items():
        store.write(name, [data])
    return store


def content(store: Store) -> Files:
    """All of its runs, by name."""
    return {
        e.name: read_all(store, e.name)
        for e in store.names("")
        if not e.name.startswith(f"{RECORDS}/")
    }


def harm(store: Store, scene: Scene) -> Iterator[str]:
    """What must not be true at any moment."""
    found = read_state(store)
    whole = set()
    for seen in (s for s in found.locations if s.status != "RETIRED"):
        report = verify_location(
            store, seen, VerifyOptions("digest"), found.faults_of(seen.run, seen.location)
        )
        if (seen.status, report.verdict) != ("VERIFIED", "ok"):
            yield (
                f"{seen.run}/{seen.location} is {seen.status}, {report.verdict}:"
                f" {[f.detail for f in report.findings]}"
            )
        elif seen.run == "run":
            whole.add(seen.location)
    yield from (
        f"{location}: was to be kept, and is not VERIFIED"
        for location in sorted(scene.kept - whole)
    )
    newest = found.of("run", "checkpoint-4")
    if newest is None or not newest.conditions.resume.holds:
        yield "checkpoint-4: the newest, and nothing can be resumed from it"
    others = {name: data for name, data in scene.files.items() if name.startswith("other/")}
    yield from (
        f"{name}: of another run"
        for name, data in others.items()
        if stored_bytes(store, name) != data
    )


def finished(store: Store, scene: Scene) -> Iterator[str]:
    """Let gc come again, after any lease, as often as it has something to do: it comes to an
    end.
    """
    looks: list[RetentionResult] = []
    while not looks or looks[-1].done or looks[-1].failed:
        if len(looks) == MOST_LOOKS:
            yield (
                "it does not come to an end:"
                f" {[(d.location, d.result, d.reason) for d in looks[-1].done]}, {looks[-1].failed}"
            )
            return
        looks.append(apply_retention(Later(store), scene.asked))
    if scene.strays:
        now = store_now(store)
        list(delete_orphans(store, list(find_orphans(store, now)), now))


def differences(store: Store, scene: Scene) -> Iterator[str]:
    """What is not as if nobody had died."""
    there, wanted = content(store), scene.end()
    yield from (f"{name}: is left" for name in sorted(_plain(there) - _plain(wanted)))
    yield from (f"{name}: is gone" for name in sorted(_plain(wanted) - _plain(there)))
    yield from (
        f"{name}: has other bytes"
        for name in _plain(wanted) & _plain(there)
        if there[name] != wanted[name]
    )
    yield from (
        f"{location}: no tombstone says that it went"
        for location in sorted(_stones(wanted) - _stones(there))
    )


def _plain(files: Files) -> set[str]:
    return {name for name in files if "/tombstone-" not in name}


def _stones(files: Files) -> set[str]:
    return {name.rpartition("/")[0] for name in files if "/tombstone-" in name}


class Later(StoreWrapper):
    """The same store, a quarter of an hour and more later by its clock: what was said before is
    older by that.
    """

    def names(self, prefix: str) -> Iterator[Entry]:
        for e in self.inner.names(prefix):
            yield Entry(e.name, e.size, e.mtime + LEASE + 1) if "/clocks/" in e.name else e
