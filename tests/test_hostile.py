"""Every attack in ``tests/hostile`` ends in one clear error, quickly, in bounded memory, with
nothing run and nothing written.
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ckptsync.catalogue.uncached import read_state
from ckptsync.cli.main import main
from ckptsync.digest import digest
from ckptsync.doctor.published_facts import publish
from ckptsync.errors import CkptsyncError, Corrupt
from ckptsync.layouts import registry
from ckptsync.merger.plan import MergeOptions
from ckptsync.merger.prepare import prepare
from ckptsync.safe_names import STORE_FILE
from ckptsync.status import heartbeat
from ckptsync.status.heartbeat import Facts, Heartbeat
from ckptsync.stores.contract import Store
from ckptsync.stores.memory import MemoryStore
from ckptsync.stores.opening import open_store
from ckptsync.stores.posix.store import PosixStore
from ckptsync.verifier.verification import VerifyOptions, resolve_target, verify
from tests.hostile import headers, names, pickles, zips
from tests.hostile.running import SECONDS
from tests.support.exhaustive import ALL, sampled
from tests.support.files_in_memory import MemoryFiles
from tests.support.small_store import make
from tests.support.verified_stores import LOCATION, RUN, WHOLE, arrive

ROOT = Path(__file__).parent.parent


def test_inspect_merge_and_verify_refuse_every_attack(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.hostile.running", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines()]
    for kind, count in Counter(t["kind"] for t in told).items():
        assert count >= (100 if ALL else 4), kind
    assert len({t["kind"] for t in told}) == 4
    assert [wrong for t in told if (wrong := _wrong(t))] == []


def _wrong(told: dict[str, Any]) -> str:
    who = f"{told['name']} by {told['way']}"
    if told["canary"]:
        return f"{who}: ran"
    if told["wrote"]:
        return f"{who}: wrote {told['wrote']}"
    if told["code"] not in told["right"] and not (
        told["harmless"] and told["code"] in (0, 3, 5, 10)
    ):
        return f"{who}: exit code {told['code']}, {told['right']} expected: {told['said']}"
    if told["seconds"] > 2 * SECONDS:  # of CPU; alone it takes a fraction of SECONDS
        return f"{who}: took {told['seconds']:.1f} s"
    if "\n" in told["said"]:
        return f"{who}: said more than a line: {told['said']}"
    return ""


@pytest.mark.parametrize("kind", [pickles, zips, headers, names], ids=lambda kind: kind.__name__)
def test_no_attack_is_read_as_if_it_were_none(kind: ModuleType, tmp_path: Path) -> None:
    """All of them, in this process; those of links and of gigabytes are tried above alone."""
    wrong = []
    for attack in kind.attacks(str(tmp_path / "canary")):
        content = {n: data for n, data in attack.files.items() if isinstance(data, bytes)}
        if attack.links or content.keys() != attack.files.keys():
            continue
        try:
            prepare(MemoryFiles(content), MergeOptions())
            code = 0
        except CkptsyncError as e:
            code = e.exit_code
        if code not in attack.codes and not attack.harmless:
            wrong.append((attack.name, code, attack.codes))
    assert not wrong
    assert not list(tmp_path.iterdir())


def test_what_the_attacks_are_wrapped_in_is_read_when_nothing_is_wrong() -> None:
    """So that each attack fails for its own sake."""
    item = pickles.item()
    for files in (
        {".metadata": pickles.metadata(len(item)), "__0_0.distcp": item},
        {zips.FILE: zips.archive(zips.plain())},
    ):
        tree = MemoryFiles(files)
        assert [t.name for t in registry.tensors(tree, registry.sources(tree)[0])] == ["w"]


def hostile_manifest(store: Store, data: bytes) -> str:
    """Write a record whose name its bytes deserve, and return the name."""
    name = f"{RUN}/.ckptsync/{LOCATION}/manifest-n0-0-{digest(data)[:16]}.json"
    store.write(name, [data])
    return name


@pytest.mark.parametrize("data", [b"", b"\xff", b"[]", b"[" * 1_000_000], ids=len)
def test_a_hostile_manifest_is_damage_and_nothing_else(data: bytes) -> None:
    store = MemoryStore()
    name = hostile_manifest(store, data)
    found = read_state(store)
    assert found.locations == ()
    assert [(fault.name, type(fault.error)) for fault in found.faults] == [(name, Corrupt)]


def test_a_hostile_manifest_does_not_hide_an_honest_one(tmp_path: Path) -> None:
    store = PosixStore(str(tmp_path))
    store.write(STORE_FILE, [b'{"format":1}'])
    arrive(store, WHOLE)
    hostile_manifest(store, b"[]")
    (report,) = (
        one.report for one in verify(resolve_target(str(tmp_path)), VerifyOptions("parse"))
    )
    assert report.verdict == "damaged"
    assert {f.name.partition("/manifest-")[0] for f in report.findings if f.kind == "digest"} == {
        ".ckptsync/checkpoint-4"
    }


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with all that lies beside checkpoints."""
    path = make(tmp_path_factory.mktemp("hostile") / "store")
    store = PosixStore(str(path))
    for node in ("node0", "node1"):
        heart = Heartbeat(node, "i", "m", 1, "1", 1.0, ("worker",), "1", written=time.time())
        heartbeat.write(store, heart)
        heartbeat.write_facts(
            store, Facts(node, "h", "m", "u", "022", "1", "3.11", "6"), heart.roles
        )
        publish(store, {"node": node, "host": node, "at": time.time()})
    return path


HARM: dict[str, Callable[[bytes], bytes]] = {
    "a flipped bit": lambda data: re.sub(
        rb'":"(.)',
        lambda found: b'":"' + bytes([found[1][0] | 0x80]),
        data,
        count=1,
        flags=re.DOTALL,
    ),
    "text that is not UTF-8": lambda data: data.replace(b'":"', b'":"\xff'),
    "deep": lambda data: b"[" * 200_000,
    "numbers of 4000 digits": lambda data: re.sub(
        rb'(?<!format)":[0-9.]+', b'":' + b"9" * 4000, data
    ),
    "cut short": lambda data: data[: len(data) // 2],
}
BROKEN = {
    "heartbeat": ".ckptsync/nodes/node0.json",
    "facts": ".ckptsync/nodes/node0~facts.json",
    "launch": ".ckptsync/launches/node0.json",
    "manifest": "fsdp2/.ckptsync/*/manifest-node0-*",
    "model": "fsdp2/.ckptsync/*/model-*",
    "report": "fsdp2/.ckptsync/*/report-*",
    "agreement": "fsdp2/.ckptsync/*/agreement-*",
}


SHOWN_BY = dict.fromkeys(("manifest", "model", "report"), "ls")
SHOWN_BY |= {"heartbeat": "status", "facts": "status", "launch": "doctor"}


@pytest.mark.parametrize(("kind", "harm"), sampled(itertools.product(BROKEN, HARM), 3))
def test_a_broken_file_of_one_node_or_location_hides_no_other(
    kind: str, harm: str, told: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = str(shutil.copytree(told, tmp_path / "store"))
    (broken,) = (tmp_path / "store").glob(BROKEN[kind])
    data = HARM[harm](broken.read_bytes())
    # as somebody could write it, its digest in its name
    if kind in ("manifest", "model", "report"):
        broken = broken.rename(broken.with_name(f"{broken.stem[:-16]}{digest(data)[:16]}.json"))
    broken.chmod(0o600)
    broken.write_bytes(data)
    for command in (["ls"], ["status"], ["doctor"], ["gc", "--keep-last", "1", "--dry-run"]):
        assert main([*command, "--store", url]) in (
            (0, 2) if command == ["doctor"] else (0, 1, 3, 10)
        )
        said = capsys.readouterr()
        if command == ["ls"]:
            assert "zero3" in said.out
        if command == ["status"]:
            assert "node1" in said.out
        if command == [SHOWN_BY.get(kind)]:
            assert broken.name.removesuffix(".json") in said.out + said.err


def test_a_reason_that_is_no_text_is_recorded_as_well_as_it_can_be(
    told: Path, tmp_path: Path
) -> None:
    url = str(shutil.copytree(told, tmp_path / "store"))
    assert main(["keep", "fsdp2/checkpoint-4", "--store", url, "--reason", "a\udcffb"]) == 0
    (seen,) = (s for s in read_state(open_store(url)).locations if s.run == "fsdp2")
    assert [k.reason for k in seen.records.keeps.values()] == ["a\ufffdb"]
