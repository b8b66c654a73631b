"""Doors that commands have: records in a store that they read, and their own arguments."""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from ckptsync.catalogue.uncached import read_state
from ckptsync.cli.commands import COMMANDS
from ckptsync.cli.main import parser
from ckptsync.digest import digest
from ckptsync.head.consolidate import HeadOptions
from ckptsync.head.due_jobs import VerifyPolicy
from ckptsync.records.save_decisions import Tombstone
from ckptsync.stores.opening import create_store, open_store
from tests.campaigns.fuzz import Case, Door, Wrong, command
from tests.campaigns.fuzz_changes import NAMES, changed_json
from tests.support import small_store
from tests.support.files_in_memory import contents, file_paths, write_files
from tests.support.filled_stores import put
from tests.support.head_in_process import consolidate_due, verify_next
from tests.support.worker_in_process import push_now

_RECORD = re.compile(
    r"(.*/\.ckptsync/[^/]+/(?:manifest-.*|model|report|tombstone|keep)-)(\d+)-[0-9a-f]{16}\.json"
)


@cache
def _good() -> Mapping[str, bytes]:
    """A store with records of every kind, as files.

    Of ``other`` a head can make a model.
    """
    with tempfile.TemporaryDirectory() as made:
        root = small_store.make(Path(made) / "store")
        store = create_store(str(root))
        for node in ("node0", "node1"):
            shutil.copytree(
                small_store.DATA / "fsdp2" / node / "checkpoint-4",
                Path(made) / node / "checkpoint-8",
            )
            push_now(Path(made) / node, store, node, "fsdp2")
            push_now(small_store.DATA / "fsdp2" / node, store, node, "other")
        command("keep", "fsdp2/checkpoint-4", "--reason", "of the paper", "--store", str(root))
        locations = {p.location: p for p in read_state(store).locations if p.run == "fsdp2"}
        manifests = tuple(k.name for k in locations["checkpoint-8"].manifests)
        where = ("fsdp2", "checkpoint-8", "checkpoint-8")
        put(store, Tombstone(*where, 0, manifests, "of a rule", "shards", "withdrawn"))
        return contents(root)


def _json(*argv: str) -> dict[str, Any]:
    """Return what a command says with ``--json``; saying nothing but an error hides all."""
    _, text = command(*argv, "--json")
    answer: dict[str, Any] = json.loads(text.splitlines()[0])
    if "error" in answer:
        raise Wrong(f"{argv[0]} says nothing but {text[:800]}")
    return answer


def _statuses(url: str) -> dict[tuple[str, str, str], str]:
    """Return what each command says of every location."""
    commands = (
        ("ls", "locations", "status", ()),
        ("status", "locations", "status", ()),
        ("verify", "reports", "verdict", ("--level", "stat")),
    )
    return {
        (name, row["run"], row["location"]): row[column]
        for name, rows, column, words in commands
        for row in _json(name, "--store", url, *words).get(rows, ())
    }


@cache
def _before() -> Mapping[tuple[str, str, str], str]:
    with tempfile.TemporaryDirectory() as made:
        return _statuses(str(write_files(Path(made) / "store", _good())))


# records


def _make_records(dice: random.Random) -> Case:
    """All records of a location, some of them others than they were."""
    run, location = dice.choice(
        (("fsdp2", "checkpoint-4"), ("fsdp2", "checkpoint-8"), ("zero3", "checkpoint-4"))
    )
    prefix = f"{run}/.ckptsync/{location}/"
    names = [n for n in _good() if n.startswith(prefix) and "/sending/" not in n]
    files = {name: _good()[name] for name in names}
    for name in dice.sample(names, min(len(names), dice.choice((1, 1, 1, 2)))):
        data = changed_json(_good()[name], dice) if dice.randrange(8) else _good()[name]
        record, title = _RECORD.fullmatch(name), name
        if record and dice.randrange(12):
            n = dice.choice((*[record[2]] * 5, str(dice.randrange(9)), "007", "\u0663", "9" * 30))
            title = f"{record[1]}{n}-{digest(data)[:16]}.json"
        if dice.randrange(8) == 0:
            others = ("checkpoint-12", "checkpoint-4~x", "checkpoint-4~", "checkpoint-04", "x")
            title = title.replace(location, dice.choice(others), 1)
        if dice.randrange(3):
            del files[name]
        files[title] = data
    return {"run": run, "location": location, "files": files, "head": dice.randrange(4) == 0}


def _run_records(case: Case, home: Path) -> str:
    """Raises Wrong where more is hidden, or changed, than what belongs to the case's run."""
    run, prefix = case["run"], f"{case['run']}/.ckptsync/{case['location']}/"
    others = {n: data for n, data in _good().items() if not n.startswith(prefix)}
    url = str(write_files(home / "store", others | case["files"]))
    now = _statuses(url)
    for key, status in _before().items():
        if key[1] != run and now.get(key) != status:
            raise Wrong(f"{key} was {status}, is {now.get(key, 'hidden')}")
    for words in ("repair", "gc --dry-run --keep-last 1", "gc --dry-run --orphans"):
        command(*words.split(), "--store", url, "--json")
    command("pull", f"{run}/checkpoint-4", str(home / "out"), "--store", url, "--dry-run")
    if case["head"]:
        made = consolidate_due(open_store(url), HeadOptions())
        proved = [verify_next(open_store(url), VerifyPolicy(), 2e9) for _ in range(4)]
        rows = _json("ls", "--store", url)["locations"]
        if ("other", "VERIFIED") not in [(row["run"], row["status"]) for row in rows]:
            raise Wrong(f"a head leaves another run alone: {made!r:.1000} {proved!r:.1000}")
    return "read"


# command lines


@cache
def _options() -> Mapping[str, Sequence[argparse.Action]]:
    """Command, or two words of one → its arguments."""
    actions: dict[str, Sequence[argparse.Action]] = {}

    def add(name: str, command: argparse.ArgumentParser) -> None:
        below = [a for a in command._actions if isinstance(a, argparse._SubParsersAction)]
        for action in below:
            for word, child in action.choices.items():
                add(f"{name} {word}".strip(), child)
        if not below:
            actions[name] = command._actions

    for name in COMMANDS:
        if name not in _LEFT_OUT:
            add(name, parser(name))
    return actions


_LIKELY: Mapping[str, Sequence[str]] = {
    "URL": ("store",), "PATH": ("work/checkpoint-4",), "RUN[/CHECKPOINT] | PATH": ("fsdp2",
    "store/fsdp2", "work/checkpoint-4"), "SRC": ("store/fsdp2/checkpoint-4", "work/checkpoint-4"),
    "DST": ("out/new", "out"), "A": ("fsdp2/checkpoint-4", "store/fsdp2/checkpoint-4"),
    "B": ("fsdp2/checkpoint-4", "work/checkpoint-4"),
    "DIR": ("work", "work/checkpoint-4", "out"), "RUN": ("fsdp2", "zero3"),
    "RUN/CHECKPOINT": ("fsdp2/checkpoint-4", "zero3/checkpoint-4"), "RUN[/CHECKPOINT]": ("fsdp2",
    "fsdp2/checkpoint-4"), "WHAT": ("keep", "drop-after:1"),
    "METRIC:N": ("eval_loss:2",), "TIME": ("1d",), "SIZE": ("5GB",), "N": ("1", "2"),
    "ID": ("node0",), "RATE": ("50MB/s",), "FILE": ("out/file",), "GLOB": ("*.json", "**/*"),
    "USER": ("root",),
}  # fmt: skip
# what does not end, runs a command or leaves a worker, and what changes the Python that it runs in
_LEFT_OUT = ("run", "web", "demo", "hook", "resume", "drain", "events", "init", "uninstall")
# what does not end, asks systemd, writes the file that it names, or is to be run
_NEVER = ("--watch", "--wait", "--user", "--python", "--html")
_SLOW = ("load", "model")  # levels that start torch
_CHANGES = ("push", "pull", "merge", "convert", "keep", "rm", "gc", "repair")
_READS = ("ls", "status", "inspect", "diff")
_TEXTS = (
    *(n for n in NAMES if "outside" not in n and n not in (".",
    "..") and "\0" not in n and n != "\ud800"), "store", "out", "work", "work/checkpoint-4",
    "work/checkpoint-4/trainer_state.json", "store/fsdp2", "store/fsdp2/checkpoint-4",
    "fsdp2", "fsdp2/checkpoint-4", "fsdp2/latest", "fsdp2/checkpoint-4~x", "other",
    "zero3/checkpoint-4", "node0", "out/new", "file://", "s3://", "s3://b", "s3://b/../x",
    "gs://b/x", "x://y", "http://127.0.0.1:1/x",
    "dcp:pytorch_model_fsdp_0", "dcp:.", "dcp:.#x", "zero:.", "#world=3", "@base", "eval_loss:2",
    "max:x:1", ":", "x:y", "keep", "drop-after:1", "1d", "0s", "-1d", "1h30m", "5GB", "0", "-1",
    "1", "2", "99999999999999999999", "1e9", "nan", "50MB/s",
    "08:00,50M 19:00,off", "\udcff", "a=b", "auto", "*", "[", "**/*", "{}",
)  # fmt: skip


_COUNTS: Mapping[object, Sequence[int]] = {"+": (1, 1, 2), "*": (1, 1, 2), "?": (0, 1, 1), 0: (0,)}
"""How many values an argument gets, by its ``nargs``; others get one."""


def _make_argv(dice: random.Random) -> Case:
    name = dice.choice(sorted(_options()))
    argv: list[str] = []
    for action in _options()[name]:
        is_flag = bool(action.option_strings)
        is_never = {*_NEVER, "--help", "--dry-run"} & {*action.option_strings}
        if is_never or (is_flag and dice.randrange(4)):
            continue
        likely: Sequence[str] = _LIKELY.get(str(action.metavar), _TEXTS)
        if action.choices:
            likely = [c for c in map(str, action.choices) if c not in _SLOW]
        argv += [dice.choice(action.option_strings)] if is_flag else []
        for _ in range(dice.choice(_COUNTS.get(action.nargs, (1,)))):
            argv.append(dice.choice(_TEXTS if dice.randrange(4) == 0 else likely))
    if name.startswith("service") or (name in _CHANGES and dice.randrange(2)):
        argv.append("--dry-run")
    if dice.randrange(10) == 0:
        odd_word = dice.choice(("--", "-", "--no-such", "--json=1", "-c", "@x", "--help"))
        argv.insert(dice.randrange(len(argv) + 1), odd_word)
    return {"argv": [*name.split(), *argv]}


@cache
def _world() -> Mapping[str, bytes]:
    with tempfile.TemporaryDirectory() as made:
        small_store.make(Path(made) / "store")
        shutil.copytree(small_store.DATA / "zero3" / "node0", Path(made) / "work")
        return contents(Path(made))


def _run_argv(case: Case, home: Path) -> str:
    argv = case["argv"]
    write_files(home, _world())
    os.environ["CKPTSYNC_LIMITS_PATIENCE"] = "0s"
    os.chdir(home)
    before = _without_caches(home)
    code, text = command(*argv)
    after = _without_caches(home)
    is_refused = code in (2, 5) and argv[0] in _CHANGES
    if after != before and ("--dry-run" in argv or argv[0] in _READS or is_refused):
        changed = sorted({n for n in {*before, *after} if before.get(n) != after.get(n)})
        raise Wrong(f"changes {changed[:5]} with exit code {code}: {text[:300]}")
    return f"exit code {code}"


def _without_caches(home: Path) -> dict[str, bytes]:
    """Return all files but what nobody may look at, and caches."""
    names = (n for n in file_paths(home) if not n.startswith(("outside/", "own/")))
    return {name: (home / name).read_bytes() for name in names}


DOORS: Mapping[str, Door] = {
    "records": Door(_make_records, _run_records, ("store", "out"), _before),
    "argv": Door(_make_argv, _run_argv, ("store", "work", "out", ""), _world),
}
