"""Kill heads at every write and at any moment, start them again with the same and with other
options, and see that all converges.

    python -m tests.campaigns.head_kill --moments 200 --seed 1

Three parts.  Calls: one order of a head's, in its child process, is killed at the nth system call
that changes a file, for every n.  Then the same head ends what it began; or one with other options
and configuration is refused while the model is young, and makes its own once that is old.  Pairs:
two heads at once; of one configuration both succeed, of two one wins and the other says so.
Moments: two heads consolidate and verify what keeps arriving, while models lose bytes or files, and
one of the heads, or a child of its, is killed at a random moment, again and again.  In a directory,
a head may come back with other options, and models grow old at once, also those that a living head
writes.  All the while somebody looks: no model record may ever bind bytes that differ.  In the end
every location is VERIFIED, and its model is what one of the two heads would have made alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
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
from ckptsync.records.store_paths import (
    consolidated_prefix,
    parse_record_name,
)
from ckptsync.stores.contract import Store, read_all
from ckptsync.stores.memory import MemoryStore
from ckptsync.stores.opening import create_store, open_store
from tests.campaigns.campaign import CLEAN, arguments, new_store, started, verdict, working
from tests.campaigns.cluster import NODES, RUNS, Service, head_command
from tests.campaigns.nodes import below, is_alive
from tests.campaigns.trapping import can_trap, drawn, traced
from tests.support.vector import ROOT, vector
from tests.support.waiting import until
from tests.support.worker_in_process import push_now

PATIENCE = 300.0  # seconds, on a busy machine, until all is VERIFIED once nobody is killed any more
PAIRS = 6  # times that two heads begin at once, with one configuration and with two
REFUSED = "another head, with other options"
ModelRecords = Mapping[str, str]


def main(argv: Sequence[str] | None = None) -> int:
    """0 if every promise was kept, 1 if not."""
    parser = arguments(__doc__, "calls", "seed")
    parser.add_argument("--moments", type=int, default=200, help="deaths at random moments")
    parser.add_argument(
        "--store",
        choices=("posix", "s3"),
        default="posix",
        help="calls are killed with a directory only",
    )
    args = parser.parse_args(argv)
    dice = random.Random(args.seed)
    wrong: list[str] = []
    with working("heads") as home:
        if can_trap() and args.store == "posix":
            wrong += at_calls(home / "calls", dice, args.calls)
        if not wrong and args.moments:
            wrong += Moments(home / "moments", dice, args.store).run(args.moments)
        if wrong:
            print(
                f"everything is kept in {shutil.copytree(home, f'{home}-violated', symlinks=True)}"
            )
    return verdict(wrong)


class Heads:
    """Two configurations that have little in common: ``a`` makes several files in fp32, ``b`` one
    in bf16 with another config.json and no tokenizer.
    """

    def __init__(self, home: Path, url: str, options: Mapping[str, object]) -> None:
        home.mkdir(parents=True, exist_ok=True)
        other = home / "other-config"
        other.mkdir()
        config = json.loads((ROOT / "base/config.json").read_text()) | {
            "tie_word_embeddings": False
        }
        (other / "config.json").write_text(json.dumps(config))
        self.merges = {
            "a": HeadOptions(MergeOptions("fp32", 30_000), {"*": str(ROOT / "base")}),
            "b": HeadOptions(MergeOptions("bf16"), {"*": str(other)}),
        }
        self._heads = {
            name: {
                "every": "1s",
                "dtype": its.merge.dtype,
                "max_shard_size": its.merge.max_shard_size,
                "config_from": dict(its.config_from),
            }
            for name, its in self.merges.items()
        }
        store = {"url": url, "options": dict(options)}
        verify = {"level": "parse", "period": "40s", "tick": "1s"}
        self.services = {
            name: Service(
                home, name, "head", "verifier", store=store, verify=verify, head=self._heads[name]
            )
            for name in self.merges
        }

    def configure(self, service: Service, options: str) -> None:
        """Give a service the options ``a`` or ``b`` for its next start."""
        configuration = yaml.safe_load(service.config.read_text())
        service.config.write_text(yaml.safe_dump(configuration | {"head": self._heads[options]}))


def arrive(store: Store, run: str, kind: str, step: int, scratch: Path) -> None:
    """Both nodes' parts, as workers send them."""
    for node, source in zip(NODES, vector(RUNS[kind]).sources, strict=True):
        copied = scratch / f"{run}-{step}" / node / f"checkpoint-{step}"
        shutil.copytree(source, copied)
        push_now(copied.parent, store, node, run)
    shutil.rmtree(scratch / f"{run}-{step}")


def expected(kind: str, heads: Heads) -> list[ModelRecords]:
    """The weights that each head would make alone: name of a file → digest."""
    found = []
    for merge in heads.merges.values():
        store = MemoryStore()
        for node, source in zip(NODES, vector(RUNS[kind]).sources, strict=True):
            (
                push_now(source.parent, store, node, "run")
                if source.name.startswith("checkpoint-")
                else None
            )
        [location] = [s.location for s in read_state(store).readable]
        consolidate_location(store, "run", location, merge)
        [model_record] = [model_record for model_record, _ in model_records(store)][-1:]
        found.append(weights(model_record))
    return found


def weights(model_record: ModelRecord) -> ModelRecords:
    """Of a model record's files."""
    return {f.path: f.digest for f in model_record.files if f.path.endswith(".safetensors")}


def model_records(store: Store) -> Iterator[tuple[ModelRecord, str]]:
    """Every one in a store, and its name."""
    for entry in store.names(""):
        parsed = parse_record_name(entry.name)
        if parsed and parsed.kind == "model":
            with contextlib.suppress(NotFound):  # retention takes model records away, too
                record = decode(entry.name, read_all(store, entry.name))
                assert isinstance(record, ModelRecord)
                yield record, entry.name


def differing(store: Store, apart: Collection[str] = ()) -> list[str]:
    """Model records that bind bytes which are not there.

    ``apart``: names that the campaign itself has damaged, also while this looks.
    """
    wrong = []
    for model_record, name in model_records(store):
        for file in model_record.files:
            full = f"{consolidated_prefix(model_record.run, model_record.location)}{file.path}"
            try:
                found = digest(read_all(store, full))
            except NotFound:
                found = "nothing"
            if found != file.digest and full not in apart:
                wrong.append(f"{name}: {full} is {found}, not {file.digest}")
    return wrong


def at_calls(home: Path, dice: random.Random, most: int) -> list[str]:
    """The child of head ``a`` dies at each call that changes a file.

    Then it comes again; or that of head ``b`` does, now and when the model is old.
    """
    begun, deaths = time.monotonic(), 0
    heads = Heads(home, str(home / "store"), {})
    original = home / "original"
    arrive(create_store(str(original)), "run", "fsdp2", 4, home / "scratch")
    models = dict(zip("ab", expected("fsdp2", heads), strict=True))
    _copied(original, home / "store")
    assert _ordered(heads, "a", traced(home / "trace")) == ""
    count, traps = drawn(home / "trace", str(home / "store"), most, dice)
    for trap in traps:
        for second in "ab":
            store = _copied(original, home / "store")
            deaths += _ordered(heads, "a", trap.before()) is None
            wrong = differing(store)
            is_made, has_begun = bool([*model_records(store)]), _has_begun(store)
            said = _ordered(heads, second)
            if second == "b" and has_begun and not is_made:
                if REFUSED not in (said or ""):
                    wrong.append(f"head b says {said!r}")
                _grow_old(home / "store")
                said = _ordered(heads, "b")
            if said != "":
                wrong.append(f"head {second} says {said!r}")
            wanted = {("run", "checkpoint-4"): [models["a" if is_made else second]]}
            wrong += [*differing(store), *_unfinished(store, wanted, ("CONSOLIDATED",))]
            wrong += [] if is_made else _unnamed(store)
            if wrong:
                return [f"killed at {trap}, then {second}: {line}" for line in wrong]
    print(f"{deaths} deaths at {count} calls in {time.monotonic() - begun:.0f} s", flush=True)
    if traps and not deaths:
        return ["no head died at a call"]
    return _in_pairs(home, heads, original, models)


def _in_pairs(
    home: Path, heads: Heads, original: Path, models: Mapping[str, ModelRecords]
) -> list[str]:
    """Two children at once."""
    refusals = 0
    for pair in ("aa", "ab") * PAIRS:
        store = _copied(original, home / "store")
        with ThreadPoolExecutor() as pool:
            said = [*pool.map(lambda name: _ordered(heads, name), pair)]
        refused = [text for text in said if text]
        refusals += len(refused)
        wrong = [f"said {text!r}" for text in refused if pair == "aa" or not _is_refusal(text)]
        winners = [name for name, text in zip(pair, said, strict=True) if text == ""]
        wanted = {("run", "checkpoint-4"): [models[name] for name in winners]}
        wrong += [*differing(store), *_unfinished(store, wanted, ("CONSOLIDATED",))]
        wrong += _unnamed(store)
        if wrong:
            return [f"heads {pair} at once: {line}" for line in wrong]
    print(f"{2 * PAIRS} pairs at once, {refusals} refusals", flush=True)
    return [] if refusals else ["no head met one with other options"]


def _is_refusal(text: str) -> bool:
    """Whether a head says that another one makes the model, or has just made it."""
    return REFUSED in text or "consolidated by another head meanwhile" in text


def _copied(original: Path, to: Path) -> Store:
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(original, to)
    return open_store(str(to))


def _ordered(heads: Heads, name: str, before: Sequence[str] = ()) -> str | None:
    """Let a head's child consolidate the location; return its error, None if it was killed."""
    job, null = Job("consolidate", "run", "checkpoint-4"), subprocess.DEVNULL
    command = [*before, *head_command(job, heads.services[name].config)]
    with started(command, stdin=null, stdout=subprocess.PIPE, stderr=null, env=CLEAN) as process:
        lines = process.communicate(timeout=PATIENCE)[0].decode().splitlines()
    result = json.loads(lines[-1]) if lines else {}
    if "exit_code" not in result:  # only the last line of a whole run has it
        return None
    return "; ".join(
        error["error"] for error in [*result.get("errors", ()), result] if "error" in error
    )


def _has_begun(store: Store) -> bool:
    return any("/agreement-" in entry.name for entry in store.names("run/"))


def _grow_old(store: Path) -> None:
    """Have models be as if whoever writes them had stopped a while ago."""
    for path in store.rglob("*"):
        is_of_model = path.match("agreement-*.json") or "consolidated" in path.parts
        if is_of_model and path.is_file():
            with contextlib.suppress(FileNotFoundError):
                at = time.time() - 2 * IDLE
                os.utime(path, (at, at))


def _unnamed(store: Store) -> list[str]:
    """Files in the model's directory that its record does not name."""
    named = {f.path for record, _ in model_records(store) for f in record.files}
    prefix = consolidated_prefix("run", "checkpoint-4")
    names = [entry.name for entry in store.names(prefix)]
    return [f"{name}: in no model record" for name in names if name[len(prefix) :] not in named]


class Moments:
    """Two heads at work while checkpoints arrive."""

    def __init__(self, home: Path, dice: random.Random, kind: str) -> None:
        self._home, self._dice = home, dice
        home.mkdir()
        url, options = new_store(kind, home)
        self._store = create_store(url, options)
        self._directory = Path(url) if kind == "posix" else None
        self._heads = Heads(home / "heads", url, options)
        self._wanted: dict[tuple[str, str], list[ModelRecords]] = {}
        self._models = {name: expected(name, self._heads) for name in RUNS}
        self._wrong: list[str] = []
        self._spoilt: set[str] = set()
        self._over = threading.Event()

    def run(self, moments: int) -> list[str]:
        """Violations, the first that are found."""
        begun = time.monotonic()
        looking = threading.Thread(target=self._look, daemon=True)
        looking.start()
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
            looking.join()
            for service in services.values():
                service.kill()
        kills = (
            f"{moments} deaths at random moments, {len(self._wanted)} checkpoints,"
            f" {len(self._spoilt)} files spoilt"
        )
        print(f"{kills}, in {time.monotonic() - begun:.0f} s", flush=True)
        return self._wrong

    def _arrive(self, n: int) -> None:
        for kind in RUNS:
            arrive(self._store, kind, kind, n, self._home / "scratch")
            self._wanted[kind, f"checkpoint-{n}"] = self._models[kind]

    def _damage(self) -> None:
        """A file of a consolidated model is another, or gone."""
        names = [
            f"{consolidated_prefix(s.run, s.location)}{f.path}"
            for s, _ in model_records(self._store)
            for f in s.files
            if f.path.endswith(".safetensors")
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
        """The head, whose children die with it; or a child of its alone."""
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

    def _look(self) -> None:
        while not self._over.wait(0.2) and not self._wrong:
            self._wrong += differing(self._store, self._spoilt)

    def _finished(self, services: Mapping[str, Service]) -> list[str]:
        """What was spoilt is found when its turn to be verified comes again, and made again.

        All heads get one configuration, as the error of a head with another one asks.
        """
        for service in services.values():
            service.kill()
            self._heads.configure(service, "a")
        if self._directory:
            _grow_old(self._directory)
        for service in services.values():
            service.start()

        def late() -> list[str]:
            unfinished = _unfinished(self._store, self._wanted, ("VERIFIED",))
            return [*unfinished, *differing(self._store)]

        return [] if until(lambda: not late(), PATIENCE, 0.5) else late()


def _unfinished(
    store: Store, wanted: Mapping[tuple[str, str], Sequence[ModelRecords]], words: Sequence[str]
) -> list[str]:
    """Locations that are not what they should be by now."""
    there = {(s.run, s.location): s for s in read_state(store).locations}
    wrong = [
        f"{run}/{location}: a location that nobody asked for"
        for run, location in there.keys() - wanted.keys()
    ]
    for (run, location), models in wanted.items():
        seen = there.get((run, location))
        if seen is None or seen.status not in words or seen.model_record is None:
            wrong.append(f"{run}/{location}: {seen.status if seen else 'absent'}")
        elif weights(seen.model_record) not in models:
            wrong.append(f"{run}/{location}: its model is neither head's")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
