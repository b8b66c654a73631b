"""``ckptsync ls`` as a transcript."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckptsync.catalogue.location_summary import Catalogue
from ckptsync.cli.ls import exit_code, list_rows, select
from ckptsync.errors import Corrupt, Unsupported
from ckptsync.head.consolidate import HeadOptions, consolidate_location
from ckptsync.records.io import Fault
from ckptsync.records.store_paths import parse_record_name
from ckptsync.stores.memory import MemoryStore
from ckptsync.stores.posix.store import PosixStore
from tests.support.command_line import Cli
from tests.support.filled_stores import DEMO, send
from tests.support.reads import names_read
from tests.support.small_store import make
from tests.support.status_examples import heart, job, location, shown, waiting
from tests.support.vector import vector


@pytest.fixture
def store(named: Path) -> Path:
    return make(named)


def test_ls_has_a_line_a_checkpoint_and_json_the_conditions(store: Path, cli: Cli) -> None:
    heading, fsdp, zero = (line.split() for line in cli("ls").out.splitlines())
    assert heading == ["RUN", "CHECKPOINT", "STATUS", "SIZE", "NODES", "DETAIL"]
    assert fsdp[:6] == ["fsdp2", "checkpoint-4", "VERIFIED", "458", "KB", "2"]
    assert fsdp[6] == f"{store}/fsdp2/consolidated/checkpoint-4"
    assert Path(fsdp[6], "model.safetensors").exists()
    assert zero[:3] == ["zero3", "checkpoint-4", "INCOMPLETE"]
    lacks = "rank 1: global_step4/zero_pp_rank_1_mp_rank_00_model_states.pt and 2 more, which no"
    assert " ".join(zero[6:]) == f"{lacks} node has uploaded"
    whole, half = cli("ls", "--json").json["locations"]
    expected = {"status": "VERIFIED", "nodes": ["node0", "node1"]}
    assert whole.items() >= (expected | {"model_complete": True, "resume_complete": True}).items()
    assert whole["proof"]["level"] == "digest"
    assert (half["status"], half["model"], len(half["evidence"])) == ("INCOMPLETE", None, 2)


def test_ls_says_which_code_a_model_does_not_have(tmp_path: Path, named: Path, cli: Cli) -> None:
    made = PosixStore(str(make(named)))
    source = Path(shutil.copytree(DEMO / "fsdp2" / "node0" / "checkpoint-4", tmp_path / "source"))
    (source / "config.json").write_text(
        json.dumps(json.loads((DEMO / "base/config.json").read_text()) | {"auto_map": {"A": "b.C"}})
    )
    (source / "modeling_x.py").write_text("")
    send(made, source, "node0", "checkpoint-8", run="coded")
    send(made, DEMO / "fsdp2" / "node1" / "checkpoint-4", "node1", "checkpoint-8", run="coded")
    consolidate_location(made, "coded", "checkpoint-8", HeadOptions())
    [line] = [line for line in cli("ls").out.splitlines() if "coded" in line]
    assert line.endswith(
        "/coded/consolidated/checkpoint-8; no tokenizer; code left out: config.json: auto_map,"
        " modeling_x.py"
    )
    left = {
        location["run"]: location["left_out"] for location in cli("ls", "--json").json["locations"]
    }
    assert left == {"coded": ["config.json: auto_map", "modeling_x.py"], "fsdp2": [], "zero3": []}


def test_an_empty_store_and_no_store_at_all(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "s" / ".ckptsync").mkdir(parents=True)
    (tmp_path / "s" / ".ckptsync" / "store.json").write_text('{"format":1}\n')
    assert "no checkpoints yet" in cli("ls", "--store", tmp_path / "s").out
    cli("status", "--store", tmp_path, code=2)


@pytest.mark.parametrize("command", ["ls", "status"])
def test_one_run_is_read_alone_and_the_cache_keeps_the_others(
    command: str, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    read = names_read(monkeypatch)

    def runs_read(*words: str) -> set[str]:
        read.clear()
        cli(*words)
        return {name.partition("/")[0] for name in read if "manifest-" in name}

    assert runs_read(command, "zero3") == {"zero3"}
    assert runs_read("ls") == {"fsdp2"}, "zero3 is known"
    assert runs_read(command, "zero3") == set()
    assert runs_read("ls") == set(), "fsdp2 is still known"


def test_a_run_or_a_checkpoint_is_selected_with_all_that_is_known_of_it() -> None:
    names = [("a", "checkpoint-2"), ("b", "checkpoint-1")]
    records = [f"{run}/.ckptsync/{where}/manifest-n0-1-{'0' * 16}.json" for run, where in names]
    parsed = [record for name in records if (record := parse_record_name(name))]
    errors = Unsupported("newer"), Corrupt("bad")
    faults = tuple(map(Fault, records, parsed, errors))
    saves = tuple(map(location, ("a/checkpoint-1", "a/checkpoint-1~x", "b/checkpoint-1")))
    begun = (replace(location("a/checkpoint-3"), manifests=()),)
    catalogue = Catalogue(saves, faults, begun=begun)
    assert (exit_code(catalogue), exit_code(Catalogue())) == (10, 0)
    for run, where, expected in (
        ("a", "", (saves[:2], faults[:1], begun)),
        ("a", "checkpoint-1", (saves[:2], (), ())),
        ("a", "checkpoint-2", ((), faults[:1], ())),
        ("a", "checkpoint-3", ((), (), begun)),
        ("b", "", (saves[2:], faults[1:], ())),
    ):
        selected = select(MemoryStore(), catalogue, run, where)
        assert (selected.summaries, selected.faults, selected.begun) == expected


def test_what_a_node_does_with_a_location_is_not_said_to_be_undone_beside_it() -> None:
    sent = waiting("run/checkpoint-1", state="uploading", total=100, done=50)
    merges = (job("consolidate", "run/checkpoint-2", done=50, total=100),)
    half = location(
        "run/checkpoint-1",
        "INCOMPLETE",
        missing_lines=("rank 1",),
        awaited_nodes=("n0",),
        nodes=("n9",),
    )
    whole = location("run/checkpoint-2", "COMPLETE", evidence=("no head has merged it yet",))
    seen = shown(
        heart(running=sent), heart("h", ("head",), running=merges), locations=[half, whole]
    )
    rows = list_rows(MemoryStore(), seen.catalogue.shown, seen.running, seen.at)
    assert [row[-1] for row in rows] == [
        "n0 uploads, 50 % of 100 B",
        "h consolidates, 50 % of 100 B",
    ]


def test_of_two_saves_the_older_says_which_is_newer(tmp_path: Path, named: Path, cli: Cli) -> None:
    out = tmp_path / "out"
    out.mkdir()
    for at, weights in (
        (1_700_000_000, b"\2\0\0\0\0\0\0\0{}"),
        (1_700_090_000, b"\4\0\0\0\0\0\0\0{  }"),
    ):
        (out / "model.safetensors").write_bytes(weights)
        os.utime(out / "model.safetensors", (at, at))
        cli("push", out)
    newer = next(path.name for path in (named / "out").glob("final~*"))
    told = {
        location["location"]: location["newer"]
        for location in cli("ls", "--json").json["locations"]
    }
    assert told == {"final": newer, newer: None}
    lines = {line.split()[1]: line for line in cli("ls").out.splitlines()}
    assert lines["final"].endswith(f"; {newer} is newer")
    assert "is newer" not in lines[newer]


def test_a_model_that_lacks_tensors_is_incomplete_or_doubtful(tmp_path: Path, cli: Cli) -> None:
    (source,) = vector("hf-ddp").sources
    checkpoint = Path(shutil.copytree(source, tmp_path / "run" / "checkpoint-4"))
    store, config = str(tmp_path / "store"), json.loads((checkpoint / "config.json").read_text())

    def push(**changes: object) -> dict[str, Any]:
        (checkpoint / "config.json").write_text(json.dumps(config | changes))
        cli("push", checkpoint, "--store", store)
        row: dict[str, Any] = cli("ls", "--store", store, "--json").json["locations"][-1]
        return row

    layers = config["num_hidden_layers"]
    lacking = push(num_hidden_layers=layers + 1)
    assert lacking["status"] == "INCOMPLETE"
    assert "tensors that config.json implies are missing" in lacking["evidence"][0]
    assert cli("ls", "--store", store).out.count("config.json implies") == 1

    store = str(tmp_path / "another")
    doubtful = push(num_hidden_layers=layers + 1, architectures=["OfMyOwn"])
    assert doubtful["status"] == "COMPLETE"
    assert doubtful["doubts"] == [
        f"may be incomplete: {layers} layers, config.json says num_hidden_layers {layers + 1}"
    ]
    assert "may be incomplete" in cli("ls", "--store", store).out
    assert [a["code"] for a in cli("status", "--store", store, "--json").json["alarms"]] == [
        "doubtful"
    ]
    last = push()
    assert (last["status"], last["doubts"]) == ("COMPLETE", [])
