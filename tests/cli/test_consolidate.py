"""``ckptsync consolidate`` as a transcript."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ckptsync.stores.contract import Store
from ckptsync.stores.opening import create_store
from tests.service.test_head import DATA, arrive, word
from tests.support.command_line import Cli
from tests.support.small_store import SHARD, flip
from tests.support.worker_in_process import push_now


@pytest.fixture
def store(named: Path) -> Store:
    made = create_store(str(named))
    arrive(made, "fsdp2", "zero3")
    return made


def test_a_dry_run_lists_what_is_due_and_writes_nothing(store: Store, cli: Cli) -> None:
    lines = cli("consolidate", "--dry-run").out.splitlines()
    assert sorted(lines) == ["due: fsdp2/checkpoint-4", "due: zero3/checkpoint-4"]
    said = cli("consolidate", "zero3/checkpoint-4", "--dry-run").out
    assert said == "due: zero3/checkpoint-4\n"
    assert word(store) == ["COMPLETE", "COMPLETE"]


def test_one_checkpoint_a_run_or_all_is_consolidated_once(store: Store, cli: Cli) -> None:
    said = cli("consolidate", "fsdp2/checkpoint-4").out
    assert "consolidated: fsdp2/checkpoint-4: 1 files" in said
    assert word(store) == ["CONSOLIDATED", "COMPLETE"]
    said = cli("consolidate", "fsdp2").out
    assert said == "nothing to do: every complete checkpoint of fsdp2 has its model\n"
    result = cli("consolidate", "--json").json
    assert (result["exit_code"], result["errors"]) == (0, [])
    assert [(m["run"], m["location"]) for m in result["models"]] == [("zero3", "checkpoint-4")]
    assert word(store) == ["CONSOLIDATED", "CONSOLIDATED"]


def test_options_count_before_the_configuration(store: Store, tmp_path: Path, cli: Cli) -> None:
    file = tmp_path / "head.yaml"
    file.write_text(f"roles: [head]\nstore: {{url: {store.url}}}\nhead: {{dtype: fp32}}\n")
    cli("consolidate", "-c", file, "zero3")
    words = ("--dtype", "bf16", "--config-from", DATA / "base")
    cli("consolidate", "-c", file, "fsdp2", *words)
    records = {
        path.parts[-4]: json.loads(path.read_text())["options"]
        for path in Path(store.url).glob("*/.ckptsync/*/model-*.json")
    }
    assert [records[run]["dtype"] for run in ("zero3", "fsdp2")] == ["fp32", "bf16"]
    assert "config.json=" in records["fsdp2"]["config"]


def test_what_is_not_complete_or_not_there_is_an_error(named: Path, cli: Cli) -> None:
    push_now(DATA / "fsdp2" / "node0", create_store(str(named)), "node0", "fsdp2")
    said = cli("consolidate", "fsdp2/checkpoint-4", code=3).err
    assert "not consolidated, it is INCOMPLETE" in said
    for words in ([], ["--only-configuration"]):
        cli("consolidate", "fsdp2", *words)  # nothing is due
    for missing in ("fsdp3/checkpoint-4", "fsdp3"):
        assert "not found" in cli("consolidate", missing, code=2).err
    said = cli("consolidate", "a/b", "--only-configuration", code=2).err
    assert "is for a whole run" in said


def test_damage_to_the_shards_stops_one_checkpoint_and_no_other(store: Store, cli: Cli) -> None:
    flip(Path(store.url) / "fsdp2" / SHARD)
    for words in ([], ["fsdp2/checkpoint-4"]):
        printed = cli("consolidate", *words, code=10)
        assert "fsdp2/checkpoint-4" in printed.out + printed.err
    assert word(store) == ["COMPLETE", "CONSOLIDATED"]


def test_a_damaged_model_is_made_again(store: Store, cli: Cli) -> None:
    cli("consolidate", "zero3/checkpoint-4")
    model = next(Path(store.url).glob("zero3/consolidated/*/model*.safetensors"))
    whole = model.read_bytes()
    flip(model)
    cli("verify", "zero3", code=10)
    said = cli("consolidate", "zero3/checkpoint-4").out
    assert "consolidated: zero3/checkpoint-4: 1 files" in said
    assert model.read_bytes() == whole
