"""What every command prints with ``--json``: one schema, docs/json-schema.json."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from ckptsync.cli.commands import COMMANDS
from ckptsync.cli.main import main
from ckptsync.records.location_status import STATUSES
from tests.support.command_line import Cli
from tests.support.exhaustive import sampled
from tests.support.small_store import DATA, SHARD, flip, make
from tests.support.stand_in_programs import ROOT

SCHEMA = json.loads((ROOT / "docs/json-schema.json").read_text())
HERE, MODEL = ("--store", "{store}"), "fsdp2/checkpoint-4"
LINES = [
    ("ls", HERE),
    ("ls", ("zero3/checkpoint-4", *HERE)),
    ("status", HERE),
    ("status", ("fsdp2", "--check", *HERE)),
    ("verify", HERE),
    ("verify", ("{data}/fsdp2/node0/checkpoint-4", "{home}/absent")),
    ("repair", ("--dry-run", *HERE)),
    ("repair", (MODEL, *HERE)),
    ("consolidate", ("--dry-run", *HERE)),
    ("consolidate", HERE),
    ("consolidate", (MODEL, *HERE)),
    ("events", (MODEL, *HERE)),
    ("gc", ("--keep-last", "1", "--orphans", *HERE)),
    ("gc", ("--keep-last", "1", "--dry-run", *HERE)),
    ("keep", (MODEL, *HERE)),
    ("keep", ("--list", *HERE)),
    ("pull", ("fsdp2", "{home}/out", *HERE)),
    ("pull", ("fsdp2", "{home}/model", "--consolidated", "--dry-run", *HERE)),
    ("push", ("{data}/fsdp2/node0", "--dry-run", *HERE)),
    ("push", ("{data}/fsdp2/node0", *HERE)),
    ("drain", ("{data}/fsdp2/node0", "--wait", "0", *HERE)),
    ("drain", ("{home}/absent", "--wait", "0", *HERE)),
    ("merge", ("{data}/fsdp2/node0/checkpoint-4", "{data}/fsdp2/node1/checkpoint-4", "{home}/m",
               "--statistics")),
    ("merge", ("{data}/fsdp2/node0/checkpoint-4", "{data}/fsdp2/node1/checkpoint-4", "{home}/m",
               "--dry-run")),
    ("convert", ("{data}/zero3/node0/checkpoint-4", "{data}/zero3/node1/checkpoint-4", "{home}/u",
                 "--to", "universal")),
    ("convert", ("{data}/zero3/node0/checkpoint-4", "{data}/zero3/node1/checkpoint-4", "{home}/u",
                 "--to", "universal", "--dry-run")),
    ("diff", (MODEL, "zero3/checkpoint-4", *HERE)),
    ("diff", (MODEL, "{store}/fsdp2/checkpoint-4", "--source", "", "--source",
              "dcp:pytorch_model_fsdp_0", *HERE)),
    ("inspect", ("{data}/fsdp2/node0/checkpoint-4",)),
    ("doctor", ("--output-dir", "{home}")),
    ("config", ("example",)),
    ("config", ("example", "head")),
    ("config", ("check", f"{ROOT}/configs/head.yaml")),
    ("config", ("show", f"{ROOT}/configs/both.yaml")),
    ("init", ("{home}/new.yaml", "--role", "head", "--store", "{store}")),
    ("help", ()),
    ("help", ("ls",)),
    ("completion", ("bash",)),
    ("version", ()),
    ("rm", (MODEL, "--yes", *HERE)),
    ("rm", ("{store}/zero3/checkpoint-4", "--dry-run", "--yes")),
]  # fmt: skip
# what needs more than this store is held by its own tests: they print through the same function
ELSEWHERE = {"alert", "run", "demo", "service", "hook", "join", "resume", "uninstall", "web"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("store"))


def check(command: str, printed: dict[str, Any]) -> None:
    """Hold a document against the schema, which names each of its keys."""
    of_command = {"$ref": f"#/$defs/{command}", "$defs": SCHEMA["$defs"]}
    jsonschema.Draft202012Validator(of_command).validate(printed)
    entry = SCHEMA["$defs"][command]
    keys = {key for one in [entry, *entry.get("oneOf", ())] for key in one.get("properties", ())}
    assert printed.keys() <= keys | {"format", "exit_code"}, command


@pytest.mark.parametrize(
    ("command", "words", "is_damaged"),
    [(*line, False) for line in LINES]
    + sampled([(*line, True) for line in LINES if "{store}" in " ".join(line[1])], 3),
    ids=lambda part: str(part)[:40],
)
def test_every_result_is_a_document_of_the_schema(
    command: str,
    words: tuple[str, ...],
    *,
    is_damaged: bool,
    made: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CKPTSYNC_STORE", raising=False)
    store = shutil.copytree(made, tmp_path / "store")
    if is_damaged:
        flip(store / "fsdp2" / SHARD)
    given = [word.format(store=store, data=DATA, home=tmp_path) for word in words]
    before = set(tmp_path.rglob("*"))
    code = main([command, *given, "--json"])
    told = capsys.readouterr()
    assert "--dry-run" not in given or set(tmp_path.rglob("*")) == before
    (line,) = told.out.splitlines() or told.err.splitlines()
    printed = json.loads(line)
    assert (printed["format"], printed["exit_code"]) == (1, code)
    check(command if told.out else "error", printed)
    for line in told.err.splitlines():
        check("error", json.loads(line))


@pytest.mark.parametrize("command", ["consolidate", "gc", "repair", "verify"])
def test_the_last_line_of_progress_is_a_document_of_the_schema(
    command: str, made: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CKPTSYNC_STORE", raising=False)
    words = ("--progress=json",) if command == "gc" else ("--progress", "json")
    rules = ("--keep-last", "1", "--dry-run") if command == "gc" else ()
    printed = cli(command, *rules, "--store", made, *words).out.splitlines()
    *progress, result = map(json.loads, printed)
    assert all(line.keys() == {"done", "total"} for line in progress)
    check(command, result)
    check("error", cli(command, *rules, *words, code=2).json)  # no store
    check("error", json.loads(cli(command, "--bad", *words, code=2).err))


def test_the_lines_above_are_of_every_command() -> None:
    assert {command for command, _ in LINES} | ELSEWHERE >= COMMANDS.keys()
    assert COMMANDS.keys() - {"run", "resume"} <= SCHEMA["$defs"].keys()


def test_the_schema_is_one_and_has_the_statuses_of_the_code() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert SCHEMA["$defs"]["location"]["properties"]["status"]["enum"] == list(STATUSES)
