"""``ckptsync pull``: what it says, its exit codes, and what lies there afterwards; from a directory, S3 and SFTP."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from ckptsync.cli.main import main
from ckptsync.stores.contract import read_all
from ckptsync.stores.opening import create_store, open_store
from tests.cli_store import DATA, SHARD, flip, make
from tests.sshd import sshd
from tests.weed import weed


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("store"))


def trained(run: str) -> dict[str, bytes]:
    """What the trainers wrote, on all nodes."""
    roots = [*(DATA / run).glob("node*/checkpoint-4")]
    return {str(p.relative_to(root)): p.read_bytes() for root in roots for p in root.rglob("*") if p.is_file()}


def below(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def told(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    code = main(["pull", *words, "--json"])
    said: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert said["exit_code"] == code
    return code, said


def test_a_run_comes_back_as_it_was(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = told(capsys, "fsdp2", str(tmp_path), "--store", str(made), "--dry-run")
    assert (code, said["word"], said["files"], said["there"]["files"]) == (0, "VERIFIED", len(trained("fsdp2")), 0)
    assert not list(tmp_path.iterdir())
    assert main(["pull", "fsdp2", str(tmp_path), "--store", str(made)]) == 0
    assert "fsdp2/checkpoint-4 (VERIFIED)" in capsys.readouterr().out
    assert below(tmp_path / "checkpoint-4") == trained("fsdp2")
    assert told(capsys, str(made / "fsdp2"), str(tmp_path), "--dry-run")[1]["there"]["files"] == said["files"]


def test_a_model_comes_into_a_directory_of_its_own(made: Path, tmp_path: Path) -> None:
    assert main(["pull", str(made / "fsdp2/checkpoint-4"), str(tmp_path / "model"), "--consolidated"]) == 0
    assert below(tmp_path / "model") == below(made / "fsdp2/consolidated/checkpoint-4")
    assert main(["pull", str(made / "fsdp2"), str(tmp_path / "model/x/.."), "--consolidated"]) == 0  # the same, and so it is there
    assert main(["pull", str(made / "fsdp2"), "/", "--consolidated"]) == 2
    assert main(["pull", str(made / "fsdp2"), str(tmp_path), "--consolidated"]) == 2  # there is something else


def test_damage_is_not_given_and_says_what_is_missing(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = tmp_path / "store"
    shutil.copytree(made, store)
    flip(store / "fsdp2" / SHARD)
    code, said = told(capsys, "fsdp2/latest", str(tmp_path / "out"), "--store", str(store))
    assert code == 10
    assert list(said["failed"]) == ["pytorch_model_fsdp_0/__0_0.distcp"]
    assert not (tmp_path / "out/checkpoint-4").exists()
    assert main(["pull", "fsdp2/latest", str(tmp_path / "out"), "--store", str(store)]) == 10
    assert "not given: pytorch_model_fsdp_0/__0_0.distcp" in (out := capsys.readouterr().out)
    assert f"there already: {said['files'] - 1} files" in out


REFUSED = [
    (["zero3"], 3, "none of its 1 checkpoints is VERIFIED"),
    (["zero3/checkpoint-4"], 3, "no node has sent it"),
    (["nobody"], 2, "no node has told"),
    (["fsdp2/checkpoint-5"], 2, "there are: checkpoint-4"),
    (["fsdp2", "--node", "nodeX"], 2, "there are: node0, node1"),
]


@pytest.mark.parametrize("refused", REFUSED, ids=lambda r: " ".join(r[0]))
def test_what_cannot_be_had_is_said(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], refused: tuple[list[str], int, str]
) -> None:
    (run, *rest), code, wanted = refused
    assert main(["pull", run, str(tmp_path / "out"), "--store", str(made), *rest]) == code
    assert wanted in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_what_is_there_of_an_incomplete_one_is_the_users_own_word(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = told(capsys, "zero3/checkpoint-4", str(tmp_path), "--store", str(made), "--unverified")
    assert code == 0
    assert below(tmp_path / "checkpoint-4").items() <= trained("zero3").items()
    assert any("rng_state_1.pth: no node has sent it" in note for note in said["notes"])


@pytest.mark.parametrize("kind", ["s3", "sftp"])
def test_it_comes_from_stores_elsewhere_too(kind: str, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, options = (
        (f"s3://{weed().bucket()}/a", weed().options()) if kind == "s3" else (sshd().url(tmp_path / "far"), sshd().options)
    )
    store, source = create_store(url, options), open_store(str(made))
    for entry in source.names("fsdp2/"):
        store.write(entry.name, [read_all(source, entry.name)])
    monkeypatch.setenv("CKPTSYNC_STORAGE_OPTIONS", json.dumps(dict(options)))
    assert main(["pull", f"{url}/fsdp2", str(tmp_path / "out")]) == 0
    assert main(["pull", f"{url}/fsdp2", str(tmp_path / "model"), "--consolidated"]) == 0
    assert below(tmp_path / "out/checkpoint-4") == trained("fsdp2")
    assert below(tmp_path / "model") == below(made / "fsdp2/consolidated/checkpoint-4")
