"""``ckptsync consolidate`` as a transcript."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ckptsync.cli.main import main
from ckptsync.stores.contract import Store
from ckptsync.stores.opening import create_store
from tests.service.test_head import DATA, arrive, word
from tests.support.small_store import SHARD, flip
from tests.support.worker_in_process import push_now


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = create_store(str(tmp_path / "store"))
    arrive(made, "fsdp2", "zero3")
    return made


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """Exit code, and what was printed."""
    capsys.readouterr()
    code = main(["consolidate", *words])
    streams = capsys.readouterr()
    return code, streams.out + streams.err


def test_a_dry_run_lists_what_is_due_and_writes_nothing(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = said(capsys, "--store", store.url, "--dry-run")
    assert (code, sorted(text.split("\n"))) == (
        0,
        ["", "due: fsdp2/checkpoint-4", "due: zero3/checkpoint-4"],
    )
    words = ("zero3/checkpoint-4", "--store", store.url, "--dry-run")
    assert said(capsys, *words) == (0, "due: zero3/checkpoint-4\n")
    assert word(store) == ["COMPLETE", "COMPLETE"]


def test_one_checkpoint_a_run_or_all_that_is_due_is_consolidated_once(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = said(capsys, "fsdp2/checkpoint-4", "--store", store.url)
    assert (code, "consolidated: fsdp2/checkpoint-4: 1 files" in text) == (0, True)
    assert word(store) == ["CONSOLIDATED", "COMPLETE"]
    code, text = said(capsys, "fsdp2", "--store", store.url)
    assert (code, text) == (0, "nothing to do: every complete checkpoint of fsdp2 has its model\n")
    code, text = said(capsys, "--store", store.url, "--json")
    result = json.loads(text)
    assert (code, result["exit_code"], result["errors"]) == (0, 0, [])
    assert [(m["run"], m["location"]) for m in result["models"]] == [("zero3", "checkpoint-4")]
    assert word(store) == ["CONSOLIDATED", "CONSOLIDATED"]


def test_options_are_those_of_the_command_line_else_of_the_configuration(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "head.yaml"
    file.write_text(f"roles: [head]\nstore: {{url: {store.url}}}\nhead: {{dtype: fp32}}\n")
    assert said(capsys, "-c", str(file), "zero3")[0] == 0
    base = str(DATA / "base")
    assert said(capsys, "-c", str(file), "fsdp2", "--dtype", "bf16", "--config-from", base)[0] == 0
    records = {
        path.parts[-4]: json.loads(path.read_text())["options"]
        for path in Path(store.url).glob("*/.ckptsync/*/model-*.json")
    }
    assert {run: options["dtype"] for run, options in records.items()} == {
        "zero3": "fp32",
        "fsdp2": "bf16",
    }
    assert "config.json=" in records["fsdp2"]["config"]


def test_what_is_not_complete_is_an_error_that_says_why_and_what_is_not_there_is_not_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = create_store(str(tmp_path / "store"))
    push_now(DATA / "fsdp2" / "node0", store, "node0", "fsdp2")
    code, text = said(capsys, "fsdp2/checkpoint-4", "--store", store.url)
    assert (code, "not consolidated, it is INCOMPLETE" in text) == (3, True)
    assert said(capsys, "fsdp2", "--store", store.url)[0] == 0, "nothing is due"
    code, text = said(capsys, "fsdp3/checkpoint-4", "--store", store.url)
    assert (code, "not found" in text) == (2, True)
    code, text = said(capsys, "a/b", "--store", store.url, "--only-configuration")
    assert (code, "is for a whole run" in text) == (2, True)


def test_damage_to_the_shards_stops_one_checkpoint_and_no_other(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    flip(Path(store.url) / "fsdp2" / SHARD)
    code, text = said(capsys, "--store", store.url)
    assert (code, "fsdp2/checkpoint-4" in text) == (10, True)
    assert word(store) == ["COMPLETE", "CONSOLIDATED"]


def test_a_damaged_model_is_made_again(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "zero3/checkpoint-4", "--store", store.url)[0] == 0
    model = next(Path(store.url).glob("zero3/consolidated/*/model*.safetensors"))
    whole = model.read_bytes()
    flip(model)
    assert main(["verify", "zero3", "--store", store.url]) == 10
    code, text = said(capsys, "zero3/checkpoint-4", "--store", store.url)
    assert (code, "consolidated: zero3/checkpoint-4: 1 files" in text) == (0, True)
    assert model.read_bytes() == whole


def test_a_program_gets_lines_of_progress_and_one_result(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["consolidate", "fsdp2"], ["gc", "--keep-last", "1"], ["repair"]):
        capsys.readouterr()
        assert main([*words, "--store", store.url, "--progress", "json"]) == 0
        *progress, result = map(json.loads, capsys.readouterr().out.splitlines())
        assert all(line.keys() == {"done", "total"} for line in progress)
        assert result["exit_code"] == 0
    assert main(["consolidate", "--progress", "json", "-c", "/nowhere.yaml"]) == 2
    error = json.loads(capsys.readouterr().out)
    assert (error["format"], error["exit_code"], "/nowhere.yaml" in error["error"]) == (1, 2, True)
