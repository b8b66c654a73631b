"""Heads that consolidate, killed at calls with the same and with other options afterwards, in pairs
at once, and at any moment while checkpoints arrive.

Calls: one job of a head's, in its child process, is killed at each system call that changes a file.
Then the same head ends what it began; or one with other options is refused while the model is
young, and makes its own once that is old.  Pairs: two heads at once; of one configuration both
succeed, of two one wins and the other says so.  Moments: two heads consolidate and verify what
keeps arriving, while models lose bytes or files, and one of the heads, or a child of its, is
killed.  No model record may ever bind bytes that differ.  In the end every location is VERIFIED,
and its model is what one of the two heads would have made alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import yaml

from ckptsync.catalogue.uncached import read_state
from ckptsync.digest import digest
from ckptsync.errors import NotFound
from ckptsync.head.agreement import IDLE
from ckptsync.head.consolidate import HeadOptions, consolidate_location
from ckptsync.head.due_jobs import Job
from ckptsync.merger.plan import MergeOptions
from ckptsync.records.io import decode
from ckptsync.records.model_record import ModelRecord
from ckptsync.records.store_paths import consolidated_prefix, parse_record_name
from ckptsync.stores.contract import Store, read_all
from ckptsync.stores.memory import MemoryStore
from ckptsync.stores.opening import create_store, open_store
from tests.campaigns.campaign import CLEAN, new_store
from tests.campaigns.cluster import NODES, RUNS, Service, head_command, stored_bytes
from tests.campaigns.kill_commands import run
from tests.campaigns.killing import PATIENCE, Ended, Victim
from tests.campaigns.nodes import below, is_alive
from tests.support.vector import ROOT, vector
from tests.support.waiting import until
from tests.support.worker_in_process import push_now

PAIRS = 6  # times that two heads begin at once, with one configuration and with two
REFUSED = "another head, with other options"
REFUSALS = (REFUSED, "consolidated by another head meanwhile")
JOB = Job("consolidate", "run", "checkpoint-4")
Weights = Mapping[str, str]
"""Name → digest of each file of weights."""


class Heads:
    """Two configurations: ``a`` makes several files in fp32, ``b`` one in bf16 with another
    config.json and no tokenizer.
    """

    def __init__(self, home: Path, url: str, options: Mapping[str, object]) -> None:
        home.mkdir(parents=True, exist_ok=True)
        other = home / "other-config"
        other.mkdir()
        config = json.loads((ROOT / "base/config.json").read_text())
        (other / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
        self.merges = {
            "a": HeadOptions(MergeOptions("fp32", 30_000), {"*": str(ROOT / "base")}),
            "b": HeadOptions(MergeOptions("bf16"), {"*": str(other)}),
        }
        self._heads = {
            name: {
                "every": "1s",
                "dtype": head.merge.dtype,
                "max_shard_size": head.merge.max_shard_size,
                "config_from": dict(head.config_from),
            }
            for name, head in self.merges.items()
        }
        store = {"url": url, "options": dict(options)}
        verify = {"level": "parse", "period": "40s", "tick": "1s"}
        self.services = {
            name: Service(home, name, "head", "verifier", store=store, verify=verify, head=head)
            for name, head in self._heads.items()
        }

    def configure(self, service: Service, options: str) -> None:
        """Give a service the options ``a`` or ``b`` for its next start."""
        configuration = yaml.safe_load(service.config.read_text())
        service.config.write_text(yaml.safe_dump(configuration | {"head": self._heads[options]}))

    def expected(self, kind: str) -> list[Weights]:
        """Return the weights that each head would make alone."""
        models = []
        for merge in self.merges.values():
            store = MemoryStore()
            for node, source in zip(NODES, vector(RUNS[kind]).sources, strict=True):
                push_now(source.parent, store, node, "run")
            [location] = [s.location for s in read_state(store).readable]
            consolidate_location(store, "run", location, merge)
            models.append(weights([*model_records(store)][-1][0]))
        return models

    def consolidate(self, name: str) -> str | None:
        """Let a head's child consolidate the location; return its error, None if it was killed."""
        lines = run(head_command(JOB, self.services[name].config), CLEAN).out.splitlines()
        result = json.loads(lines[-1]) if lines else {}
        if "exit_code" not in result:  # only the last line of a whole run has it
            return None
        errors = [*result.get("errors", ()), result]
        return "; ".join(error["error"] for error in errors if "error" in error)


def arrive(store: Store, run_: str, kind: str, step: int, scratch: Path) -> None:
    """Send both nodes' parts of a checkpoint, as workers do."""
    for node, source in zip(NODES, vector(RUNS[kind]).sources, strict=True):
        copied = scratch / f"{run_}-{step}" / node / f"checkpoint-{step}"
        shutil.copytree(source, copied)
        push_now(copied.parent, store, node, run_)
    shutil.rmtree(scratch / f"{run_}-{step}")


def weights(record: ModelRecord) -> Weights:
    """Return the digests of a model's files of weights."""
    return {f.path: f.digest for f in record.files if f.path.endswith(".safetensors")}


def model_records(store: Store) -> Iterator[tuple[ModelRecord, str]]:
    """Yield every model record of a store, and its name."""
    for entry in store.names(""):
        parsed = parse_record_name(entry.name)
        if parsed and parsed.kind == "model":
            with contextlib.suppress(NotFound):  # retention deletes model records, too
                record = decode(entry.name, read_all(store, entry.name))
                assert isinstance(record, ModelRecord)
                yield record, entry.name


def differing(store: Store, spoilt: Collection[str] = ()) -> list[str]:
    """Return what model records bind and is not there, but for files that the campaign spoilt."""
    wrong = []
    for record, name in model_records(store):
        for file in record.files:
            path = f"{consolidated_prefix(record.run, record.location)}{file.path}"
            data = stored_bytes(store, path)
            actual = "nothing" if data is None else digest(data)
            if actual != file.digest and path not in spoilt:
                wrong.append(f"{name}: {path} is {actual}, not {file.digest}")
    return wrong


def unfinished(
    store: Store, models: Mapping[tuple[str, str], Sequence[Weights]], status: str
) -> list[str]:
    """Return the locations that have not this status, or none of these models."""
    states = {(s.run, s.location): s for s in read_state(store).locations}
    wrong = [
        f"{run_}/{place}: nobody asked for it" for run_, place in states.keys() - models.keys()
    ]
    for (run_, place), possible in models.items():
        state = states.get((run_, place))
        if state is None or state.status != status or state.model_record is None:
            wrong.append(f"{run_}/{place}: {state.status if state else 'absent'}")
        elif weights(state.model_record) not in possible:
            wrong.append(f"{run_}/{place}: its model is neither head's")
    return wrong


def _unnamed(store: Store) -> list[str]:
    """Return files in the model's directory that its record does not name."""
    named = {f.path for record, _ in model_records(store) for f in record.files}
    prefix = consolidated_prefix("run", "checkpoint-4")
    names = [entry.name for entry in store.names(prefix)]
    return [f"{name}: in no model record" for name in names if name[len(prefix) :] not in named]


def _grow_old(store: Path) -> None:
    """Have models be as if whoever writes them had stopped a while ago."""
    for path in store.rglob("*"):
        is_of_model = path.match("agreement-*.json") or "consolidated" in path.parts
        if is_of_model and path.is_file():
            with contextlib.suppress(FileNotFoundError):
                then = time.time() - 2 * IDLE
                os.utime(path, (then, then))


class Bench:
    """One checkpoint in a directory, which two heads may consolidate."""

    def __init__(self, home: Path) -> None:
        self.heads = Heads(home, str(home / "store"), {})
        self.path, self._original = home / "store", home / "original"
        arrive(create_store(str(self._original)), "run", "fsdp2", 4, home / "scratch")
        self.models = dict(zip("ab", self.heads.expected("fsdp2"), strict=True))

    def renew(self) -> Store:
        """Return a store with the checkpoint alone."""
        shutil.rmtree(self.path, ignore_errors=True)
        shutil.copytree(self._original, self.path)
        return open_store(str(self.path))

    def wrong(self, store: Store, makers: Iterable[str]) -> list[str]:
        """Return what is wrong with a model that one of these heads has made."""
        models = {("run", "checkpoint-4"): [self.models[name] for name in makers]}
        return [*differing(store), *unfinished(store, models, "CONSOLIDATED")]


class Consolidation(Victim):
    """Head ``a``, which dies, and ``second``, the head that comes after it."""

    def __init__(self, bench: Bench, second: str) -> None:
        self.name, self._bench, self._second = f"head a, then {second}", bench, second
        self.mark = str(bench.path)
        self._store = bench.renew()

    def prepare(self) -> Sequence[str]:
        self._store = self._bench.renew()
        return head_command(JOB, self._bench.heads.services["a"].config)

    def violations(self, ended: Ended) -> Iterable[str]:
        return differing(self._store)

    def finish(self) -> Iterable[str]:
        is_made = bool([*model_records(self._store)])
        is_begun = any("/agreement-" in entry.name for entry in self._store.names("run/"))
        error = self._bench.heads.consolidate(self._second)
        if self._second == "b" and is_begun and not is_made:
            if REFUSED not in (error or ""):
                yield f"head b says {error!r}"
            _grow_old(self._bench.path)
            error = self._bench.heads.consolidate("b")
        if error != "":
            yield f"head {self._second} says {error!r}"
        yield from self._bench.wrong(self._store, "a" if is_made else self._second)
        yield from () if is_made else _unnamed(self._store)


def in_pairs(bench: Bench) -> list[str]:
    """Let two heads begin at once, again and again; return the first that is wrong."""
    refusals = 0
    for pair in ("aa", "ab") * PAIRS:
        store = bench.renew()
        with ThreadPoolExecutor() as pool:
            errors = [*pool.map(bench.heads.consolidate, pair)]
        refused = [error for error in errors if error]
        refusals += len(refused)
        wrong = [
            f"said {error!r}"
            for error in refused
            if pair == "aa" or not any(words in error for words in REFUSALS)
        ]
        winners = [name for name, error in zip(pair, errors, strict=True) if error == ""]
        wrong += [*bench.wrong(store, winners), *_unnamed(store)]
        if wrong:
            return [f"heads {pair} at once: {line}" for line in wrong]
    print(f"{2 * PAIRS} pairs at once, {refusals} refusals", flush=True)
    return [] if refusals else ["no head met one with other options"]


class Moments:
    """Two heads at work while checkpoints arrive, killed at random moments."""

    def __init__(self, home: Path, dice: random.Random, kind: str) -> None:
        self._home, self._dice = home, dice
        home.mkdir()
        url, options = new_store(kind, home)
        self._store = create_store(url, options)
        self._directory = Path(url) if kind == "posix" else None
        self._heads = Heads(home / "heads", url, options)
        self._wanted: dict[tuple[str, str], list[Weights]] = {}
        self._models = {name: self._heads.expected(name) for name in RUNS}
        self._wrong: list[str] = []
        self._spoilt: set[str] = set()
        self._over = threading.Event()

    def run(self, moments: int) -> list[str]:
        """Return the violations that are found first."""
        begun = time.monotonic()
        observer = threading.Thread(target=self._observe, daemon=True)
        observer.start()
        services = self._heads.services
        self._heads.configure(services["b"], "a")
        for service in services.values():
            service.start()
        try:
            for n in range(moments):
                if self._wrong:
                    break
                if n % 10 == 0:
                    self._arrive(n)
                if n % 5 == 4:
                    self._damage()
                if self._directory and n % 7 == 6:
                    _grow_old(self._directory)
                time.sleep(self._dice.uniform(0.0, 1.2))
                self._kill(services[self._dice.choice("ab")])
            self._wrong += [] if self._wrong else self._finished(services)
        finally:
            self._over.set()
            observer.join()
            for service in services.values():
                service.kill()
        print(
            f"{moments} deaths at random moments, {len(self._wanted)} checkpoints,"
            f" {len(self._spoilt)} files spoilt, in {time.monotonic() - begun:.0f} s",
            flush=True,
        )
        return self._wrong

    def _arrive(self, n: int) -> None:
        for kind in RUNS:
            arrive(self._store, kind, kind, n, self._home / "scratch")
            self._wanted[kind, f"checkpoint-{n}"] = self._models[kind]

    def _damage(self) -> None:
        """Flip a bit in a file of a consolidated model, or delete the file."""
        names = [
            f"{consolidated_prefix(record.run, record.location)}{path}"
            for record, _ in model_records(self._store)
            for path in weights(record)
        ]
        if names:
            name = self._dice.choice(names)
            self._spoilt.add(name)
            # it has been deleted before, and is not made again yet
            with contextlib.suppress(NotFound):
                data = bytearray(read_all(self._store, name))
                data[self._dice.randrange(len(data))] ^= 1
                self._store.write(name, [data])
            if self._dice.random() < 0.5:
                self._store.delete(name)

    def _kill(self, head: Service) -> None:
        """Kill the head, whose children die with it; or a child of its alone."""
        children = [*below(head.pid)][1:]
        if children and self._dice.random() < 0.5:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._dice.choice(children), signal.SIGKILL)
            return
        head.kill()
        if not until(lambda: not any(map(is_alive, children)), 10):
            self._wrong.append(f"{head.name}: a child has outlived it")
            return
        if self._directory:  # elsewhere nothing grows old in time
            self._heads.configure(head, self._dice.choice("aab"))
        head.start()

    def _observe(self) -> None:
        while not self._over.wait(0.2) and not self._wrong:
            self._wrong += differing(self._store, self._spoilt)

    def _finished(self, services: Mapping[str, Service]) -> list[str]:
        """Wait until all is VERIFIED; what was spoilt is verified and made again.

        All heads get one configuration, as the error of a head with another one asks.
        """
        for service in services.values():
            service.kill()
            self._heads.configure(service, "a")
        if self._directory:
            _grow_old(self._directory)
        for service in services.values():
            service.start()

        def wrong() -> list[str]:
            late = unfinished(self._store, self._wanted, "VERIFIED")
            return [*late, *differing(self._store)]

        return [] if until(lambda: not wrong(), PATIENCE, 0.5) else wrong()
