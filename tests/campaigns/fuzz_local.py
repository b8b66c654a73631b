"""Doors on this machine: the configuration, the command line, the spool beside a training, and
files that may be lost (caches, what alerts told, baselines).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from ckptsync.cli.commands import COMMANDS
from ckptsync.cli.main import parser
from ckptsync.config.loading import from_environment, load
from ckptsync.config.schema import KEYS, SECTIONS
from ckptsync.errors import CkptsyncError, StoreError
from ckptsync.spool import markers, pins
from ckptsync.stores.contract import read_all
from ckptsync.stores.memory import MemoryStore
from ckptsync.walk import UnsafeSpool
from ckptsync.worker.options import RunDir, WorkerOptions
from ckptsync.worker.worker import Worker
from tests.campaigns.fuzz import KEPT, Case, Door, Wrong, by_dice, command
from tests.campaigns.fuzz_changes import NAMES, changed_bytes, changed_json, odd
from tests.support import hook_pins, small_store
from tests.support.files_in_memory import contents, write_files
from tests.support.worker_in_process import ONE, lay, tick

# the configuration

_CONFIGS = Path(KEPT.parent.parent / "configs")
_YAML = (
    "2001-99-99", "0b_", "0x_", "0o8", "1:99:99", "!!timestamp x", "!!int x", "!!float x",
    "!!bool maybe", "!!binary ===", "!!set {a}", "!!omap [a]", "!!pairs [a]",
    "!!python/object/apply:os.system [id]", "!x y", "!<tag:yaml.org,2002:int> x", "&a [*a]",
    "*nobody", "<<: *a", "<<: [1]", "<<: {a: b}", "? [a]: b", "{[]: 1}", "{{}: 1}", "=", "~",
    ".inf", "-.inf", ".nan", "1e999", "9" * 5000, "[" * 3000, "{a: " * 2000, "- " * 3000,
    "? " * 2000,
    ("a: &a [x,x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a]\nc: &c"
    " [*b,*b,*b,*b,*b,*b,*b,*b,*b]\nd: &d [*c,*c,*c,*c,*c,*c,*c,*c,*c]\ne: &e"
    " [*d,*d,*d,*d,*d,*d,*d,*d,*d]\nf: [*e,*e,*e,*e,*e,*e,*e,*e,*e]"),
    '"\\xZZ"', '"\\ud800"', "'", "%YAML 9.9\n---", "---\n---", "...", "\t- a", "| \n", ">-\n x",
    "\u2028", "\ufeff", "\x85", "5s", "-5s", "1e9d", "99999999999d", "50MB/s", "0", "-1", "null",
    "true", "[]", "{}", "08:00,50M 99:99,off", "''", "a: " * 50,
)  # fmt: skip


_SET = {"store.url": "url: /mnt/x", "worker.runs": "runs: [{path: /data/out}]"}


def _every_key() -> list[str]:
    """Return the lines of a file that loads; the other keys are commented out."""
    lines = []
    for section in ("", *SECTIONS):
        lines += [f"{section}:"] if section else []
        for name in (name for name in KEYS if name.rpartition(".")[0] == section):
            default = f"# {name.rpartition('.')[2]}: {json.dumps(KEYS[name].default)}"
            lines.append(f"{'  ' if section else ''}{_SET.get(name, default)}")
    return lines


def _make_configuration(dice: random.Random) -> Case:
    lines = dice.choice(sorted(_CONFIGS.glob("*.yaml"))).read_text().splitlines()
    if dice.randrange(2):
        lines = _every_key()
    lines = [
        (
            line.replace("# ", "", 1)
            if line.lstrip().startswith("# ") and ": " in line and dice.randrange(3) == 0
            else line
        )
        for line in lines
    ]
    for _ in range(dice.choice((1, 1, 2, 4))):
        at, token = dice.randrange(len(lines)), dice.choice(_YAML)
        key, colon, _ = lines[at].partition(": ")
        kind = dice.randrange(6)
        if kind <= 2 and colon:
            lines[at] = f"{key}: {token}"
        elif kind == 3:
            lines.insert(
                at, dice.choice((token, f"{dice.choice(sorted(KEYS)).rpartition('.')[2]}: {token}"))
            )
        elif kind == 4:
            lines[at] = " " * dice.randrange(4) + lines[at]
        else:
            lines[at : at + dice.randrange(3)] = dice.choices(lines, k=dice.randrange(3))
    if dice.randrange(50) == 0:
        lines += [f"key{n}: {n}" for n in range(40_000)]
    text = "\n".join(lines).encode("utf-8", "surrogatepass")
    variables = [key.variable for key in KEYS.values() if key.variable]
    environment = {
        dice.choice((*variables, "CKPTSYNC_HEAD_X")): str(dice.choice((*_YAML, odd(dice))))
        for _ in range(dice.choice((0, 0, 1, 2)))
    }
    return {
        "text": changed_bytes(text, dice) if dice.randrange(4) == 0 else text,
        "environment": environment,
    }


def _run_configuration(case: Case, home: Path) -> str:
    path = home / "in" / "c.yaml"
    path.write_bytes(case["text"])
    try:
        from_environment(case["environment"])
    except CkptsyncError as e:
        if e.exit_code != 2:
            raise
    load(path, case["environment"])
    return "loaded"


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


# the spool


@cache
def _spooled() -> Mapping[str, bytes]:
    """An output directory in which a hook and a worker have been at work."""
    with tempfile.TemporaryDirectory() as made:
        out = Path(made)
        source = lay(out, ONE)
        hook_pins.commit(source)
        spool = out / "_ckptsync"
        begun = markers.TrainingProcess(
            "t", 0, 1, 1, "host", 1, "1", "boot", 1.0, "trainer", {"torch": "2.13"}, "p1", "m"
        )
        markers.write_mark(markers.process_path(spool, "p1"), begun)
        mark = markers.RankMark("t", "save", "checkpoint-4", 4, 0, 1, 1, "host", 1, 1.0)
        markers.write_mark(markers.save_folder(spool, "checkpoint-4", "save") / "rank-0.json", mark)
        tick(Worker(WorkerOptions("n0", RunDir("run", out)), MemoryStore()), 0.0)
        return contents(out)


_KINDS = (
    "directory",
    "fifo",
    "link",
    "link to a directory",
    "broken link",
    "link to itself",
    "gone",
    "no rights",
)
_TARGETS = {"link": "secret", "link to a directory": ".", "broken link": "nothing"}
_SPOOLED = ("_ckptsync", "_ckptsync/pins", "_ckptsync/trains", "_ckptsync/saves",
    "_ckptsync/pins/checkpoint-4.0", "_ckptsync/pins/checkpoint-4.0/files",
    "_ckptsync/pins/checkpoint-4.0/added", "_ckptsync/took", "_ckptsync/hook.log")  # fmt: skip


def _make_spool(dice: random.Random) -> Case:
    """``files`` that are others, and ``kinds``: what stands in place of a file or directory."""
    good = _spooled()
    names = [name for name in good if name.startswith("_ckptsync/") and "/files/" not in name] + [
        "checkpoint-4/trainer_state.json"
    ]
    files: dict[str, bytes] = {}
    for name in dice.sample(names, dice.choice((0, 1, 1, 2))):
        title = name
        if dice.randrange(3) == 0:
            folder, _, base = name.rpartition("/")
            base = dice.choice(
                (
                    "rank-1.json",
                    "rank-٣.json",
                    "x.json",
                    ".json",
                    "owner.json",
                    "notes.json",
                    "stored",
                    ".fresh-owner.json",
                    "x" * 200,
                )
            )
            places = (
                folder,
                "_ckptsync/pins/checkpoint-4.1",
                "_ckptsync/pins/.claim-n0@checkpoint-4.7",
                "_ckptsync/pins/.new-n0-checkpoint-4",
                "_ckptsync/pins/.claim-n0-",
                "_ckptsync/saves/checkpoint-4@",
                "_ckptsync/saves/@",
            )
            title = f"{dice.choice(places)}/{base}"
        files[title] = changed_json(good.get(name, b"{}"), dice)
    found_dirs = (*names, *_SPOOLED, "checkpoint-4", "checkpoint-4/model.safetensors")
    kinds = {dice.choice(found_dirs): dice.choice(_KINDS) for _ in range(dice.choice((0, 0, 1, 2)))}
    if kinds.get("_ckptsync") == "link to a directory":  # which an operator may have made
        del kinds["_ckptsync"]
    return {"files": files, "kinds": kinds}


def _run_spool(case: Case, home: Path) -> str:
    write_files(home / "run", {**_spooled(), **case["files"]})
    for name, kind in case["kinds"].items():
        _put(home / "run" / name, kind, home / "outside")
    store, failures = MemoryStore(), []
    try:
        worker = Worker(WorkerOptions("n0", RunDir("run", home / "run")), store)
        failures = [f for now in (0.0, 10.0, 700.0, 1400.0) for f in tick(worker, now).failures]
    except (StoreError, UnsafeSpool):
        pass  # by these a service leaves out this directory alone
    except CkptsyncError as e:
        raise Wrong(f"other directories wait for one: {type(e).__name__}: {e}") from e
    leaked = [e.name for e in store.names("") if b"what lies outside" in read_all(store, e.name)]
    if leaked:
        raise Wrong(f"sends what lies outside as {leaked}")
    spool = home / "run" / "_ckptsync"
    markers.list_training_processes(spool)
    markers.list_rank_marks(spool, "checkpoint-4")
    pins.list_pins(home / "run")
    return f"{len(failures)} failures"


def _put(path: Path, kind: str, outside: Path) -> None:
    """Something else than a file stands there."""
    if not path.parent.is_dir() or path.parent.resolve() != path.parent:
        return  # another one stands in its way
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif kind != "no rights" or not path.exists():
        path.unlink(missing_ok=True)
    if kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind in _TARGETS:
        path.symlink_to(outside / _TARGETS[kind])
    elif kind == "link to itself":
        path.symlink_to(path.name)
    elif kind == "no rights" and path.exists():
        path.chmod(0)


DOORS: Mapping[str, Door] = {
    "configuration": Door(
        by_dice(_make_configuration), _run_configuration, ("in",), codes=frozenset({2})
    ),
    "argv": Door(by_dice(_make_argv), _run_argv, ("store", "work", "out", ""), _world),
    "spool": Door(by_dice(_make_spool), _run_spool, ("run",), _spooled),
}
