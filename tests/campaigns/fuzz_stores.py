"""Doors that files in a store come through: records, what nodes say, and what is kept of them
elsewhere.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from ckptsync.catalogue.cached import cache_path
from ckptsync.catalogue.uncached import read_state
from ckptsync.digest import FileDigest, digest, digest_stream
from ckptsync.doctor.published_facts import launch_name
from ckptsync.head.consolidate import HeadOptions
from ckptsync.head.due_jobs import VerifyPolicy
from ckptsync.records.save_decisions import Tombstone
from ckptsync.safe_names import STORE_FILE, checked_path
from ckptsync.status import heartbeat
from ckptsync.status.heartbeat import Disk, Heartbeat
from ckptsync.stores.opening import create_store, open_store
from ckptsync.verifier.expected_files import decode_baseline, directory_file, encode_baseline
from tests.campaigns.fuzz import Case, Door, Wrong, by_dice, command
from tests.campaigns.fuzz_changes import changed_json
from tests.support import small_store
from tests.support.files_in_memory import contents, write_files
from tests.support.filled_stores import put
from tests.support.head_in_process import consolidate_due, verify_next
from tests.support.status_examples import job, waiting
from tests.support.worker_in_process import push_now

_RECORD = re.compile(
    r"(.*/\.ckptsync/[^/]+/(?:manifest-.*|model"
    r" record|report|tombstone|keep)-)(\d+)-[0-9a-f]{16}\.json"
)


@cache
def _good() -> Mapping[str, bytes]:
    """A store with records of every kind, and three nodes, as files.

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
        for node, roles in (
            ("node0", ("worker",)),
            ("node1", ("worker",)),
            ("head", ("head", "verifier")),
        ):
            heart = Heartbeat(
                *(node, "i", "machine", 1, "1", 1.0, roles, "1.0", 7, 1.0),
                running=(job("verify", "fsdp2"), *waiting("fsdp2/a")),
                disk=(Disk("/data", 1, 2, 3),),
                watch={"/data": "events"},
                lacks={"r": ("x",)},
            )
            heartbeat.write(store, heart)
            facts = {"torch": "2.13", "NCCL_DEBUG": "INFO"}
            told = heartbeat.Facts(
                *(node, "host", "m", "u", "022", "1", "3", "6"),
                limits={"nofile": 9},
                file_systems={"/": "ext4"},
                gpus=("H200",),
                trains={"fsdp2": heartbeat.Train("trainer", 2, 1, 1.0, facts, "runs")},
            )
            heartbeat.write_facts(store, told, roles)
            said = {
                "node": node,
                "host": "h",
                "boot": "b",
                "at": 1.0,
                "versions": {"torch": "2.13"},
                "variables": {"NNODES": "2"},
            }
            store.write(
                launch_name(node),
                [json.dumps(said | {"gpus": ["H200"], "clock": 0.1, "booted": 1.0}).encode()],
            )
        return contents(root)


def _json(*argv: str) -> dict[str, Any]:
    """What a command says with ``--json``; that it says nothing else than an error hides all."""
    _, said = command(*argv, "--json")
    found: dict[str, Any] = json.loads(said.splitlines()[0])
    if "error" in found:
        raise Wrong(f"{argv[0]} says nothing but {said[:800]}")
    return found


def _seen(url: str) -> dict[str, dict[Any, Any]]:
    """By command, what each says of every location, or node."""
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
        "nodes": {
            (n["name"], ""): (n["node"], n["state"], n["host"]) for n in status.get("nodes", ())
        },
    }


@cache
def _before() -> dict[str, dict[Any, Any]]:
    with tempfile.TemporaryDirectory() as made:
        return _seen(str(write_files(Path(made) / "store", _good())))


def _compare(url: str, touched: str) -> None:
    """Raises Wrong where more is hidden, or changed, than what belongs to ``touched``: a run, or a
    node.
    """
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


# what nodes say of themselves, and store.json


def _make_nodes(dice: random.Random) -> Case:
    names = [n for n in _good() if n.startswith((".ckptsync/nodes/", ".ckptsync/launches/"))] + [
        ".ckptsync/store.json"
    ]
    name = dice.choice(names)
    title = (
        name
        if dice.randrange(8)
        else name.rpartition("/")[0]
        + "/"
        + dice.choice(("x.json", ".json", "~head.json", "a~facts.json", "a b.json"))
    )
    return {
        "files": {title: changed_json(_good()[name], dice)},
        "how": dice.choice(([], ["--json"], ["--nodes", "--strict"])),
    }


def _run_nodes(case: Case, home: Path) -> str:
    url = str(write_files(home / "store", {**_good(), **case["files"]}))
    (name,) = case["files"]
    if name == STORE_FILE:
        code, _ = command("ls", "--store", url, "--json")
        return f"store {code}"
    node = name.rpartition("/")[2].removesuffix(".json").removesuffix("~facts")
    _compare(url, node)
    command("status", "--store", url, "--check")
    command("status", "--store", url)
    if "/launches/" in name or "facts" in name:
        command("doctor", "--store", url, *case["how"])
    store = open_store(url)
    for one in ("node0", "node1"):
        heartbeat.beat(store, Heartbeat(one, "mine", "other", 1, "1", 0.0, ("worker",), "1.0"))
    return "read"


# files that this machine keeps: what was read of a store, and a baseline


@cache
def _baseline() -> bytes:
    found = digest_stream([b"abc"], 3)
    recorded = FileDigest(3, found.digest, found.block_size, found.blocks)
    return encode_baseline([directory_file(f"f{n}", recorded) for n in range(3)])


def _make_kept(dice: random.Random) -> Case:
    """``change``: bytes of the cache, by location and value; or another baseline."""
    if dice.randrange(2):
        return {"baseline": changed_json(_baseline(), dice)}
    return {
        "change": [[dice.random(), dice.randrange(256)] for _ in range(dice.choice((1, 2, 9)))],
        "cut": dice.choice((1.0, 1.0, dice.random())),
    }


def _run_kept(case: Case, home: Path) -> str:
    if "baseline" in case:
        for one in decode_baseline(case["baseline"], "baseline.json"):
            checked_path(one.path)
        return "a baseline"
    url = str(write_files(home / "store", _good()))
    before = _json("ls", "--store", url)
    path = cache_path(url)
    data = bytearray(path.read_bytes())
    for at, value in case["change"]:
        data[int(at * len(data))] = value
    path.write_bytes(data[: int(case["cut"] * len(data))])
    if _json("ls", "--store", url) != before:
        raise Wrong("a damaged cache is believed")
    return "a cache"


DOORS: Mapping[str, Door] = {
    "records": Door(by_dice(_make_records), _run_records, ("store", "out"), _before),
    "kept": Door(by_dice(_make_kept), _run_kept, ("store",), _before),
    "heartbeats": Door(by_dice(_make_nodes), _run_nodes, ("store",), _before),
}
