"""``ckptsync repair`` on a real store: what is planned, what is done, what is lost and for whom.

And the exit codes.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ckptsync.catalogue.uncached import read_state
from ckptsync.cli import repair
from ckptsync.cli.repair import RepairOutcome
from ckptsync.errors import StoreError
from ckptsync.head.consolidate import HeadOptions
from ckptsync.head.gc import RetentionRequest, apply_retention
from ckptsync.head.repair import How, Repair, RepairPlan
from ckptsync.head.retention_rules import Rules
from ckptsync.status import heartbeat
from ckptsync.status.heartbeat import Heartbeat
from ckptsync.stores.opening import create_store, open_store
from ckptsync.verifier.verification import VerifyOptions, verify_location
from ckptsync.verifier.write_reports import write_report
from tests.support.command_line import Cli
from tests.support.head_in_process import consolidate_due
from tests.support.retention_stores import FIRST, fill
from tests.support.small_store import SHARD, flip, make, make_two
from tests.support.worker_in_process import push_now

MODEL = "fsdp2/consolidated/checkpoint-4/model.safetensors"


@pytest.fixture
def store(named: Path) -> Path:
    return make(named)


@pytest.fixture
def twice(named: Path) -> Path:
    """A store of two checkpoints with the same b.bin."""
    opened = create_store(str(named))
    for n in (1, 2):
        fill(opened, f"checkpoint-{n}", FIRST + n)
    return named


def beat(
    store: Path,
    node: str,
    lacks: dict[str, tuple[str, ...]] | None = None,
    *,
    stopped: bool = False,
) -> None:
    told = Heartbeat(
        node, "i", "m", 1, "b", 0.0, ("worker",), "1", lacks=lacks or {}, stopped=stopped
    )
    heartbeat.write(open_store(str(store)), told)


def damaged(store: Path, name: str) -> str:
    """One flipped bit that a verification has found; the report's name."""
    flip(store / name)
    opened = open_store(str(store))
    seen = read_state(opened, name.partition("/")[0]).locations[0]
    return write_report(opened, verify_location(opened, seen, VerifyOptions("digest")))


def word(store: Path) -> str:
    seen = read_state(open_store(str(store)), "fsdp2").of("fsdp2", "checkpoint-4")
    assert seen is not None
    return seen.status


def tree(store: Path) -> dict[str, bytes]:
    return {str(p.relative_to(store)): p.read_bytes() for p in store.rglob("*") if p.is_file()}


def test_a_consolidated_file_is_made_again_and_verified(store: Path, cli: Cli) -> None:
    before = (store / MODEL).read_bytes()
    damaged(store, MODEL)
    harmed = tree(store)
    cli("repair", "fsdp2/checkpoint-4", "--dry-run")
    assert tree(store) == harmed
    out = cli("repair").out
    assert "made again: consolidated/checkpoint-4/model.safetensors" in out
    assert (store / MODEL).read_bytes() == before
    assert word(store) == "VERIFIED"


def test_a_named_checkpoint_is_read_before_all_is_called_well(store: Path, cli: Cli) -> None:
    said = cli("repair", "fsdp2/checkpoint-4").out
    assert "fsdp2/checkpoint-4: nothing is damaged (every byte in the store was read: " in said
    flip(store / f"fsdp2/{SHARD}")
    before = tree(store)
    said = cli("repair", "fsdp2/checkpoint-4", "--dry-run", code=3).out
    assert f"waits for a node: {SHARD}" in said
    assert tree(store) == before
    cli("repair", "fsdp2/checkpoint-4", code=3)
    assert word(store) == "DAMAGED"


def test_what_a_node_has_sent_again_is_read_by_the_next_repair(store: Path, cli: Cli) -> None:
    whole = (store / f"fsdp2/{SHARD}").read_bytes()
    damaged(store, f"fsdp2/{SHARD}")
    (store / f"fsdp2/{SHARD}").write_bytes(whole)
    assert "nothing is damaged" in cli("repair", "fsdp2/checkpoint-4").out
    assert word(store) == "VERIFIED"


def test_nothing_is_read_again_until_all_files_have_been_sent(store: Path, cli: Cli) -> None:
    other = SHARD.replace("__0_0", "__1_0")
    whole = (store / f"fsdp2/{SHARD}").read_bytes()
    flip(store / f"fsdp2/{other}")
    damaged(store, f"fsdp2/{SHARD}")
    (store / f"fsdp2/{SHARD}").write_bytes(whole)
    said = cli("repair", "fsdp2/checkpoint-4", code=3).out
    assert f"waits for a node: {other}" in said
    assert "every byte in the store was read" not in said


def test_a_shard_is_asked_of_its_node_running_or_not(store: Path, cli: Cli) -> None:
    damaged(store, f"fsdp2/{SHARD}")
    assert f"waits for a node: {SHARD}: node0 does not run" in cli("repair", code=3).out
    beat(store, "node0", stopped=True)
    cli("repair", code=3)
    beat(store, "node0")
    said = f"upload requested: {SHARD}: node0 has to upload it again"
    assert said in cli("repair", code=3).out


def test_what_nobody_has_is_lost_and_said_with_its_tensors(store: Path, cli: Cli) -> None:
    report = damaged(store, f"fsdp2/{SHARD}")
    beat(store, "node0", {report: (SHARD,)})
    (location,) = cli("repair", "--json", code=10).json["locations"]
    (part,) = location["parts"]
    assert (part["how"], part["words"]) == ("lost", "node0 no longer has the file")
    tensors, ranks, rest = part["consequences"]
    assert tensors.startswith("tensors model.")
    assert ranks == "states of rank 0"
    assert rest.startswith("the consolidated model still exists")


def test_a_model_whose_shards_are_lost_is_lost_too(store: Path, cli: Cli) -> None:
    flip(store / MODEL)
    report = damaged(store, f"fsdp2/{SHARD}")
    beat(store, "node0", {report: (SHARD,)})
    out = cli("repair", code=10).out
    assert (
        "LOST: consolidated/checkpoint-4/model.safetensors: some shards that it is built from"
        " are lost too" in out
    )


def test_what_is_missing_before_anybody_reported_it_is_asked_for(store: Path, cli: Cli) -> None:
    beat(store, "node0")
    (store / "fsdp2" / SHARD).unlink()
    cli("repair", code=3)
    assert word(store) == "DAMAGED", "now a report asks for it"


def test_a_file_that_lies_elsewhere_in_the_store_is_copied(twice: Path, cli: Cli) -> None:
    damaged(twice, "run/checkpoint-1/b.bin")
    assert "copied: checkpoint-1/b.bin: from run/checkpoint-2/b.bin" in cli("repair").out
    assert (twice / "run/checkpoint-1/b.bin").read_bytes() == b"b" * 100
    assert {s.status for s in read_state(open_store(str(twice))).locations} == {"VERIFIED"}


def test_a_model_is_made_again_after_a_shard_of_it_was_copied(named: Path, cli: Cli) -> None:
    store = make_two(named)
    names = (MODEL, f"fsdp2/{SHARD}")
    before = [(store / name).read_bytes() for name in names]
    flip(store / MODEL)
    damaged(store, f"fsdp2/{SHARD}")
    cli("repair")
    assert [(store / name).read_bytes() for name in names] == before
    assert word(store) == "VERIFIED"


@pytest.mark.parametrize("code", [3, 10])
def test_what_was_copied_is_not_copied_again(twice: Path, cli: Cli, code: int) -> None:
    flip(twice / "run/checkpoint-1/a.bin")
    report = damaged(twice, "run/checkpoint-1/b.bin")
    beat(twice, "n0", {report: ("checkpoint-1/a.bin",)} if code == 10 else None)
    assert "copied: checkpoint-1/b.bin" in cli("repair", code=code).out
    assert "checkpoint-1/b.bin" not in cli("repair", code=code).out


def test_waiting_ends_when_the_node_has_sent_it_and_it_is_verified(
    store: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    before = (store / "fsdp2" / SHARD).read_bytes()
    model = (store / MODEL).read_bytes()
    flip(store / MODEL)
    damaged(store, f"fsdp2/{SHARD}")
    beat(store, "node0")
    monkeypatch.setattr(repair, "EVERY", 0.01)
    open_store(str(store)).write(f"fsdp2/{SHARD}", [before])
    cli("repair", code=3)  # nobody has verified what was sent
    cli("repair", "--wait")
    assert (store / MODEL).read_bytes() == model, "what depends on it was made again, too"
    assert word(store) == "VERIFIED"


@pytest.mark.parametrize(
    ("how", "error", "remaining", "code", "is_waiting"),
    [
        ("ask", None, (), 3, True),
        ("ask", StoreError("no route"), (), 4, False),
        ("copy", None, ("copy",), 3, False),
        ("copy", None, ("ask",), 3, True),
        ("ask", None, ("copy", "lost"), 10, False),
    ],
)
def test_what_failed_or_is_left_decides_the_exit_code_and_whether_to_wait(
    how: How, error: StoreError | None, remaining: tuple[How, ...], code: int, *, is_waiting: bool
) -> None:
    plan, left = (
        RepairPlan("r", "c", tuple(Repair(how, how, "") for how in hows))
        for hows in ((how,), remaining)
    )
    outcome = RepairOutcome(plan, (), error, left if remaining else None)
    assert (outcome.exit_code, outcome.is_waiting) == (code, is_waiting)


def test_a_damaged_manifest_is_for_its_own_node(store: Path, cli: Cli) -> None:
    (manifest,) = (store / "fsdp2/.ckptsync/checkpoint-4").glob("manifest-node1-*")
    flip(manifest)
    name = str(manifest.relative_to(store))
    assert "node1 is not running: only that node can write" in cli("repair", code=3).out
    beat(store, "node1", {name: ()})
    assert "LOST: .ckptsync/checkpoint-4/manifest-node1" in cli("repair", code=10).out


def test_a_damaged_model_record_is_written_again(store: Path, cli: Cli) -> None:
    (model_record,) = (store / "fsdp2/.ckptsync/checkpoint-4").glob("model-*")
    before = model_record.read_bytes()
    flip(model_record)
    cli("repair")
    assert model_record.read_bytes() == before


def test_a_damaged_tombstone_no_longer_hides_its_location(store: Path, cli: Cli) -> None:
    cli("keep", "fsdp2/checkpoint-4")
    bad = store / "fsdp2/.ckptsync/checkpoint-4/tombstone-0-0123456789abcdef.json"
    bad.write_text("{}")
    (kept,) = bad.parent.glob("keep-*")
    flip(kept)
    cli("repair", "fsdp2")
    assert not bad.exists()
    assert not kept.exists()
    assert word(store) == "VERIFIED"


def test_a_damaged_keep_that_is_the_last_record_is_replaced(store: Path, cli: Cli) -> None:
    cli("keep", "fsdp2/checkpoint-4")
    records = store / "fsdp2/.ckptsync/checkpoint-4"
    (kept,) = records.glob("keep-*")
    flip(kept)
    for record in (r for r in records.glob("*.json") if r != kept):
        record.unlink()
    cli("repair", "fsdp2")
    assert not kept.exists()
    assert len([*records.glob("keep-*")]) == 1


def test_a_file_that_was_sent_wrong_is_lost(tmp_path: Path, named: Path, cli: Cli) -> None:
    out = tmp_path / "out" / "checkpoint-4"
    out.mkdir(parents=True)
    (out / "tokenizer.json").write_text('{"a": ')
    head = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    content = len(head).to_bytes(8, "little") + head + bytes(4)
    (out / "model.safetensors").write_bytes(content)
    push_now(out.parent, create_store(str(named)), "node0", "run")
    consolidate_due(open_store(str(named)), HeadOptions())
    cli("verify", "--level", "parse", code=10)
    for _ in range(2):
        said = cli("repair", code=10).out
        assert said.count("it was wrong before the upload") == 2
    assert "LOST: consolidated/checkpoint-4/tokenizer.json: a model made again has the same" in said


def drop_first_shards(store: Path) -> Path:
    """Let retention delete checkpoint-1's shards; return its model record."""
    rules = Rules(keep_last=2, shards=1)
    for _ in range(2):
        apply_retention(open_store(str(store)), RetentionRequest(lambda _: rules, 0.0))
    (model_record,) = (store / "run/.ckptsync/checkpoint-1").glob("model-*")
    return model_record


def test_what_retention_has_marked_is_not_repaired(twice: Path, cli: Cli) -> None:
    cli("gc", "--keep-last", "1")
    (twice / "run/checkpoint-1/b.bin").unlink()
    assert "nothing is damaged" in cli("repair").out
    assert not (twice / "run/checkpoint-1/b.bin").exists()


def test_what_the_verification_after_it_finds_is_told_and_judged(twice: Path, cli: Cli) -> None:
    (twice / "run/checkpoint-1/b.bin").unlink()
    flip(twice / "run/checkpoint-1/a.bin")  # nobody knows of it yet
    cli("repair", code=3)
    assert (twice / "run/checkpoint-1/b.bin").exists()


def test_what_the_verification_after_it_finds_is_mended(store: Path, cli: Cli) -> None:
    before = (store / MODEL).read_bytes()
    cli("keep", "fsdp2/checkpoint-4")
    flip(next((store / "fsdp2/.ckptsync/checkpoint-4").glob("keep-*")))
    flip(store / MODEL)  # nobody knows of it yet
    cli("repair")
    assert (store / MODEL).read_bytes() == before
    assert word(store) == "VERIFIED"


def test_a_manifest_that_is_gone_is_for_its_own_node(store: Path, cli: Cli) -> None:
    for name in (store / "fsdp2/.ckptsync/checkpoint-4").glob("manifest-*"):
        name.unlink()
    said = cli("repair", "fsdp2/checkpoint-4", code=3).out
    assert "node1 is not running: only that node can write" in said
    assert "missing, although" in cli("verify", code=10).out
    assert "missing, although" in cli("status", "--check", code=10).out
    cli("ls", code=10)


def test_a_model_record_without_shards_is_lost(twice: Path, cli: Cli) -> None:
    record = drop_first_shards(twice)
    flip(record)
    assert "LOST: .ckptsync/checkpoint-1/model-0" in cli("repair", "--dry-run", code=10).out
    record.unlink()
    cli("verify", code=10)
    assert "LOST: consolidated/checkpoint-1" in cli("repair", code=10).out
