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
from tests.support.files_in_memory import contents, write_files
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
    """What a command says with ``--json``; that it says nothing else than an error hides all."""
    _, said = command(*argv, "--json")
    found: dict[str, Any] = json.loads(said.splitlines()[0])
    if "error" in found:
        raise Wrong(f"{argv[0]} says nothing but {said[:800]}")
    return found


def _seen(url: str) -> dict[str, dict[Any, Any]]:
    """By command, what each says of every location."""
    status, verified = (
        _json("status", "--store", url),
        _json("verify", "--store", url, "--level", "stat"),
    )
    return {
        "ls": {
            (p["run"], p["location"]): p["status"]
            for p in _json("ls", "--store", url).get("locations", ())
        },
        "status": {(p["run"], p["location"]): p["status"] for p in status.get("locations", ())},
        "verify": {(r["run"], r["location"]): r["verdict"] for r in verified.get("reports", ())},
    }


@cache
def _before() -> dict[str, dict[Any, Any]]:
    with tempfile.TemporaryDirectory() as made:
        return _seen(str(write_files(Path(made) / "store", _good())))


def _compare(url: str, touched: str) -> None:
    """Raises Wrong where more is hidden, or changed, than what belongs to the run ``touched``."""
    seen = _seen(url)
    for how, before in _before().items():
        for key, word in before.items():
            if key[0] != touched and seen[how].get(key) != word:
                raise Wrong(f"{how}: {key} was {word}, is {seen[how].get(key, 'hidden')}")


# records


def _make_records(dice: random.Random) -> Case:
    """All records of a location, some of them others than they were."""
    run, location = dice.choice(
        (("fsdp2", "checkpoint-4"), ("fsdp2", "checkpoint-8"), ("zero3", "checkpoint-4"))
    )
    names = [
        n for n in _good() if n.startswith(f"{run}/.ckptsync/{location}/") and "/sending/" not in n
    ]
    files = {name: _good()[name] for name in names}
    for name in dice.sample(names, min(len(names), dice.choice((1, 1, 1, 2)))):
        data = changed_json(_good()[name], dice) if dice.randrange(8) else _good()[name]
        found, title = _RECORD.fullmatch(name), name
        if found and dice.randrange(12):
            n = dice.choice((*[found[2]] * 5, str(dice.randrange(9)), "007", "\u0663", "9" * 30))
            title = f"{found[1]}{n}-{digest(data)[:16]}.json"
        if dice.randrange(8) == 0:
            other = dice.choice(
                ("checkpoint-12", "checkpoint-4~x", "checkpoint-4~", "checkpoint-04", "x")
            )
            title = title.replace(location, other, 1)
        if dice.randrange(3):
            del files[name]
        files[title] = data
    return {"run": run, "location": location, "files": files, "head": dice.randrange(4) == 0}


def _run_records(case: Case, home: Path) -> str:
    others = {
        n: d
        for n, d in _good().items()
        if not n.startswith(f"{case['run']}/.ckptsync/{case['location']}/")
    }
    url = str(write_files(home / "store", others | case["files"]))
    _compare(url, case["run"])
    for argv in (
        ("repair", "--store", url),
        ("gc", "--store", url, "--dry-run", "--keep-last", "1"),
        ("gc", "--store", url, "--dry-run", "--orphans"),
    ):
        command(*argv, "--json")
    command("pull", f"{case['run']}/checkpoint-4", str(home / "out"), "--store", url, "--dry-run")
    if case["head"]:
        made = consolidate_due(open_store(url), HeadOptions())
        proved = [verify_next(open_store(url), VerifyPolicy(), 2e9) for _ in range(4)]
        if ("other", "VERIFIED") not in [
            (p["run"], p["status"]) for p in _json("ls", "--store", url)["locations"]
        ]:
            raise Wrong(
                f"a head and a verifier leave another run alone: {made!r:.1000} {proved!r:.1000}"
            )
    return "read"


# command lines


@cache
def _options() -> Mapping[str, Sequence[argparse.Action]]:
    """Command, or two words of one → its arguments."""
    found: dict[str, Sequence[argparse.Action]] = {}

    def add(name: str, at: argparse.ArgumentParser) -> None:
        below = [a for a in at._actions if isinstance(a, argparse._SubParsersAction)]
        for action in below:
            for word, child in action.choices.items():
                add(f"{name} {word}".strip(), child)
        if not below:
            found[name] = at._actions

    for name in COMMANDS:
        add(name, parser(name))
    return {name: actions for name, actions in found.items() if name.split()[0] not in _LEFT_OUT}


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


def _make_argv(dice: random.Random) -> Case:
    name = dice.choice(sorted(_options()))
    argv: list[str] = []
    for action in _options()[name]:
        is_flag = bool(action.option_strings)
        if set(action.option_strings) & {*_NEVER, "--help", "--dry-run"} or (
            is_flag and dice.randrange(4)
        ):
            continue
        many = (
            dice.choice((1, 1, 2))
            if action.nargs in ("+", "*")
            else 0
            if action.nargs == "?" and dice.randrange(3) == 0
            else 1
        )
        likely = (
            [c for c in map(str, action.choices) if c not in _SLOW]
            if action.choices
            else _LIKELY.get(str(action.metavar), ()) or _TEXTS
        )
        values = [dice.choice(_TEXTS if dice.randrange(4) == 0 else likely) for _ in range(many)]
        argv += ([dice.choice(action.option_strings)] if is_flag else []) + (
            [] if action.nargs == 0 else values
        )
    if name.startswith("service") or (name in _CHANGES and dice.randrange(2)):
        argv.append("--dry-run")
    if dice.randrange(10) == 0:
        argv.insert(
            dice.randrange(len(argv) + 1),
            dice.choice(("--", "-", "--no-such", "--json=1", "-c", "@x", "--help")),
        )
    return {"argv": [*name.split(), *argv]}


@cache
def _world() -> Mapping[str, bytes]:
    with tempfile.TemporaryDirectory() as made:
        small_store.make(Path(made) / "store")
        shutil.copytree(small_store.DATA / "zero3" / "node0", Path(made) / "work")
        return contents(Path(made))


def _mine(home: Path) -> dict[str, bytes]:
    """All but what nobody may look at, and caches."""
    found: dict[str, bytes] = {}
    for top in home.iterdir():
        if top.is_file():
            found[top.name] = top.read_bytes()
        elif top.name not in ("outside", "own"):
            found |= {f"{top.name}/{name}": data for name, data in contents(top).items()}
    return found


def _run_argv(case: Case, home: Path) -> str:
    write_files(home, _world())
    os.environ["CKPTSYNC_LIMITS_PATIENCE"] = "0s"
    os.chdir(home)
    before = _mine(home)
    code, said = command(*case["argv"])
    after = _mine(home)
    if after != before and (
        "--dry-run" in case["argv"]
        or case["argv"][0] in _READS
        or (code in (2, 5) and case["argv"][0] in _CHANGES)
    ):
        changed = sorted({n for n in {*before, *after} if before.get(n) != after.get(n)})
        raise Wrong(f"changes {changed[:5]} with exit code {code}: {said[:300]}")
    return f"exit code {code}"


DOORS: Mapping[str, Door] = {
    "records": Door(_make_records, _run_records, ("store", "out"), _before),
    "argv": Door(_make_argv, _run_argv, ("store", "work", "out", ""), _world),
}
