"""Victims that delete checkpoints: `ckptsync gc` by hand, and the head's retention.

At each death: what the rules keep is whole, and VERIFIED; so is whatever is not given up; another
run is untouched.  Then gc comes again, at once and after the dead one's lease, and all is as if
nobody had died.  At half of the moments another gc with other rules is at work beside the one that
dies.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from ckptsync.catalogue.uncached import read_state
from ckptsync.head.due_jobs import Job
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
from ckptsync.stores.opening import create_store
from ckptsync.verifier.verification import VerifyOptions, verify_location
from tests.campaigns.campaign import CKPTSYNC, CLEAN, new_store, started
from tests.campaigns.cluster import head_command, stored_bytes
from tests.campaigns.killing import PATIENCE, Ended, Victim, unexpected
from tests.support.files_in_memory import write_files
from tests.support.filled_stores import entry, put
from tests.support.retention_stores import FIRST, fill, verify

MOST_ROUNDS = 6  # of gc, until nothing is left to do
DRAFT = ".ckptsync-0123456789abcdef.part"
OLD = 9 * 86400.0  # seconds: a draft is orphaned after a week
OTHER = {"keep_last": 1, "shards": "drop-after:1"}  # rules of who is at work beside
KEPT_BY_BOTH = frozenset({"checkpoint-4"})
Files = Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class Scene:
    """A store before a gc under ``rules``, which a configuration writes as ``configured``.

    ``kept``: locations that stay VERIFIED, whoever dies; ``orphans``: orphaned files.
    """

    name: str
    files: Files
    rules: Rules
    configured: Mapping[str, object]
    kept: frozenset[str]
    orphans: frozenset[str] = frozenset()

    @property
    def request(self) -> RetentionRequest:
        """Return what a gc asks for: no rules for the other run, and no grace."""
        return RetentionRequest(lambda run: self.rules if run == "run" else Rules(), 0.0)

    def end(self) -> Files:
        """Return what is left where nobody dies."""
        store = in_memory({n: data for n, data in self.files.items() if n not in self.orphans})
        for _ in range(MOST_ROUNDS):
            apply_retention(store, self.request)
        return content(store)


def scenes() -> dict[str, Scene]:
    """Return marking, removing, removing shards, withdrawing and deleting orphans, by name.

    Each begins with a store of four checkpoints, and one of another run.
    """
    plain, last, shards = _plain_store(), Rules(keep_last=2), Rules(shards=1)
    newest = frozenset({"checkpoint-3", "checkpoint-4"})
    every = frozenset(f"checkpoint-{n}" for n in range(1, 5))
    orphans = {f"run/checkpoint-{n}/stray.bin": b"x" for n in range(1, 5)}
    orphans[f"run/checkpoint-2/{DRAFT}"] = b"y"
    table = (
        Scene("mark", plain, last, {"keep_last": 2}, newest),
        Scene("remove", _marked(plain, last), last, {"keep_last": 2}, newest),
        Scene("shards", _marked(plain, shards), shards, {"shards": "drop-after:1"}, every),
        Scene("back", _marked(plain, last), Rules(keep_last=4), {"keep_last": 4}, newest),
        Scene("orphans", {**plain, **orphans}, Rules(), {}, every, frozenset(orphans)),
    )
    return {scene.name: scene for scene in table}


def _plain_store() -> Files:
    """Return a store where one checkpoint has two nodes' files, and one has moved.

    Of the first both nodes have other bytes under one name.
    """
    store = MemoryStore()
    for n in (3, 4):
        fill(store, f"checkpoint-{n}", FIRST + n)
    own = b"a of another node"
    first = fill(store, "checkpoint-1", FIRST + 1, is_verified=False)
    (mine,) = read_manifests(store, [first]).values()
    store.write(f"run/{RECORDS}/checkpoint-1/files/n1/a.bin", [own])
    files = (entry("a.bin", own, FIRST + 1),)
    theirs = replace(mine, node="n1", save="one", files=files, ranks=(1,))
    _record_again(store, replace(mine, save="one"), theirs)
    second = fill(store, "checkpoint-2", FIRST + 2, is_verified=False)
    (moved,) = read_manifests(store, [second]).values()
    before = put(store, replace(moved, location="checkpoint-2~0badcafe"))
    _record_again(store, replace(moved, n=1, supersedes=(before,)))
    fill(store, "checkpoint-1", run="other")
    return content(store)


def _record_again(store: Store, *manifests: Manifest) -> None:
    """Replace all records of a location by these manifests, verified."""
    location = manifests[0].location
    for e in [*store.names(f"run/{RECORDS}/{location}/")]:
        if parse_record_name(e.name):
            store.delete(e.name)
    verify(store, location, tuple(put(store, m) for m in manifests))


def _marked(files: Files, rules: Rules) -> Files:
    """Return the same files once a head has marked what goes."""
    store = in_memory(files)
    apply_retention(store, RetentionRequest(lambda run: rules if run == "run" else Rules(), 1e9))
    return content(store)


def in_memory(files: Files) -> MemoryStore:
    """Return a store in memory with these files."""
    store = MemoryStore()
    for name, data in files.items():
        store.write(name, [data])
    return store


def content(store: Store) -> Files:
    """Return all files of a store's runs, by name."""
    names = [e.name for e in store.names("") if not e.name.startswith(f"{RECORDS}/")]
    return {name: read_all(store, name) for name in names}


def harm(store: Store, scene: Scene) -> Iterator[str]:
    """Yield what must not be true at any moment."""
    catalogue = read_state(store)
    whole = set()
    for state in (s for s in catalogue.locations if s.status != "RETIRED"):
        faults = catalogue.faults_of(state.run, state.location)
        report = verify_location(store, state, VerifyOptions("digest"), faults)
        if (state.status, report.verdict) != ("VERIFIED", "ok"):
            details = [f.detail for f in report.findings]
            yield f"{state.run}/{state.location} is {state.status}, {report.verdict}: {details}"
        elif state.run == "run":
            whole.add(state.location)
    for location in sorted(scene.kept - whole):
        yield f"{location}: was to be kept, and is not VERIFIED"
    newest = catalogue.of("run", "checkpoint-4")
    if newest is None or not newest.conditions.resume.holds:
        yield "checkpoint-4: the newest, and nothing can be resumed from it"
    for name, data in scene.files.items():
        if name.startswith("other/") and stored_bytes(store, name) != data:
            yield f"{name}: of another run"


def come_again(store: Store, scene: Scene) -> Iterator[str]:
    """Let gc come after any lease, as often as it has something to do; yield if that never ends."""
    results: list[RetentionResult] = []
    while not results or results[-1].done or results[-1].failed:
        if len(results) == MOST_ROUNDS:
            done = [(d.location, d.result, d.reason) for d in results[-1].done]
            yield f"it does not come to an end: {done}, {results[-1].failed}"
            return
        results.append(apply_retention(_Later(store), scene.request))
    if scene.orphans:
        now = store_now(store)
        list(delete_orphans(store, list(find_orphans(store, now)), now))


def differences(store: Store, scene: Scene) -> Iterator[str]:
    """Yield what is not as if nobody had died."""
    there, wanted = content(store), scene.end()
    plain = [{n for n in files if "/tombstone-" not in n} for files in (there, wanted)]
    stones = [
        {n.rpartition("/")[0] for n in files if "/tombstone-" in n} for files in (there, wanted)
    ]
    yield from (f"{name}: is left" for name in sorted(plain[0] - plain[1]))
    yield from (f"{name}: is gone" for name in sorted(plain[1] - plain[0]))
    same = plain[0] & plain[1]
    yield from (f"{name}: has other bytes" for name in same if there[name] != wanted[name])
    yield from (f"{name}: no tombstone says that it went" for name in sorted(stones[1] - stones[0]))


class _Later(StoreWrapper):
    """The same store, more than a quarter of an hour later by its clock."""

    def names(self, prefix: str) -> Iterator[Entry]:
        for e in self.inner.names(prefix):
            yield Entry(e.name, e.size, e.mtime + LEASE + 1) if "/clocks/" in e.name else e


class Retention(Victim):
    """A scene on a kind of store, acted by ``who``: the command (gc), or a head's child (head)."""

    mark = "clocks"  # it begins by asking the store what time it is there

    def __init__(self, kind: str, scene: Scene, who: str, home: Path) -> None:
        self.name = f"{kind}, {who}, {scene.name}"
        self._kind, self._scene, self._who, self._home = kind, scene, who, home
        self._top, self._options = new_store(kind, home)
        self._url, self._count = self._top, 0
        self._store: Store = MemoryStore()
        self._other: subprocess.Popen[bytes] | None = None
        self.environment = {**CLEAN, "XDG_CACHE_HOME": str(home / "cache")}

    def prepare(self) -> Sequence[str]:
        """Make a store with the scene's files alone; orphaned files are old in a directory."""
        self._count, self._other = self._count + 1, None
        if self._kind == "s3":
            self._url = f"{self._top}/{self._count}"
            self._store = create_store(self._url, self._options)
            for name, data in self._scene.files.items():
                self._store.write(name, [data])
        else:
            shutil.rmtree(self._url, ignore_errors=True)
            self._store = create_store(self._url)
            root = write_files(Path(self._url), self._scene.files)
            for name in self._scene.orphans:
                os.utime(root / name, (time.time() - OLD,) * 2)
        return self._command(self._scene.configured)

    def _command(self, rules: Mapping[str, object]) -> list[str]:
        config = self._home / f"{'-'.join(rules) or 'nothing'}.yaml"
        store = {"url": self._url, "options": dict(self._options)}
        retention = {"grace": "0s", "runs": {"run": dict(rules)} if rules else {}}
        options = {"node": "head", "roles": ["head"], "store": store, "retention": retention}
        config.write_text(yaml.safe_dump(options))
        if self._who == "head":
            return head_command(Job("retain"), config)
        orphans = ["--orphans"] if self._scene.orphans else []
        return [*CKPTSYNC, "gc", "-c", str(config), *orphans]

    @contextlib.contextmanager
    def beside(self, number: int) -> Iterator[None]:
        if number % 2 == 0 or self._scene.orphans:
            yield
            return
        null = subprocess.DEVNULL
        streams = {"stdin": null, "stdout": null, "stderr": null}
        with started(self._command(OTHER), **streams, env=self.environment) as self._other:
            yield

    def violations(self, ended: Ended) -> Iterable[str]:
        yield from unexpected(ended)
        yield from harm(self._store, self._kept())

    def finish(self) -> Iterable[str]:
        """Wait for the one beside, or come at once; then do all that is left to do."""
        scene = self._kept()
        if self._other is None:
            apply_retention(self._store, scene.request)
        elif code := self._other.wait(PATIENCE):
            yield f"the one beside has ended with {code}"
        yield from harm(self._store, scene)
        yield from come_again(self._store, scene)
        yield from harm(self._store, scene)
        if self._other is None:
            yield from differences(self._store, scene)

    def _kept(self) -> Scene:
        return replace(self._scene, kept=KEPT_BY_BOTH) if self._other else self._scene


def victims(kind: str, names: Sequence[str], home: Path) -> Iterator[Victim]:
    """Yield each scene by the command and by the head, where there is such a thing.

    Only the command deletes orphans, and no server makes a file old.
    """
    for name, scene in scenes().items():
        for who in ("gc", "head") if name in names else ():
            if not (scene.orphans and (who == "head" or kind == "s3")):
                yield Retention(kind, scene, who, home)
