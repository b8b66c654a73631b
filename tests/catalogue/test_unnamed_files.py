"""Files that somebody put beside a VERIFIED model are told, and left where they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ckptsync.catalogue.cached import Cache, read_catalogue
from ckptsync.cli.main import main
from ckptsync.stores.contract import Store
from ckptsync.stores.memory import MemoryStore
from ckptsync.stores.opening import create_store
from tests.support.files_in_memory import MemoryFiles
from tests.support.filled_stores import put
from tests.support.verified_stores import WHOLE, arrive, model_record, verified

OWN, MODEL = "run/checkpoint-4", "run/consolidated/checkpoint-4"
CODE = {
    f"{MODEL}/modeling_evil.py": b"import os",
    f"{MODEL}/tokenizer_config.json": b'{"a": [1, {"auto_\\u006dap": {"AutoTokenizer": "x.Y"}}]}',
    f"{MODEL}/long/config.json": b'{"auto_map": {}}' + b" " * (4 << 20),
    f"{MODEL}/kernel.so": b"x",
    f"{MODEL}/pytorch_model.bin": b"x",
    f"{MODEL}/sub/x.pyc": b"x",
    f"{OWN}/evil.py": b"x",
    f"{OWN}/config.json~/generation_config.json": b'{"custom_pipelines": {}}',
}
HARMLESS = {
    f"{MODEL}/README.md": b"mine",
    f"{MODEL}/chat_template.jinja": b"{{ x }}",
    f"{MODEL}/generation_config.json": b'{"top_k": 1}',
    f"{OWN}/optimizer.pt": b"of an upload that was killed",
}


def fill(store: Store) -> None:
    record = arrive(store, WHOLE)
    model_record(store, MemoryFiles(WHOLE), [record])
    put(store, verified(store))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = create_store(str(tmp_path))
    fill(made)
    return made


def said(command: str, store: Store, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    main([command, "--store", store.url])
    return capsys.readouterr().out


@pytest.mark.parametrize("name", CODE)
def test_a_file_that_may_run_is_told_by_ls_status_and_verify(
    name: str, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = Cache()
    assert read_catalogue(store, cache).summaries[0].unnamed == ()
    store.write(name, [CODE[name]])
    shown = name.removeprefix("run/")
    (seen,) = read_catalogue(store, cache).summaries
    assert (seen.status, seen.unnamed_runs) == ("VERIFIED", True)
    for command in ("ls", "status", "verify"):
        told = said(command, store, capsys)
        assert shown in told
        assert "may run code" in told
        assert "VERIFIED" in told or command == "verify"
    assert "WARNING unnamed" in said("status", store, capsys)
    assert store.size(name) == len(CODE[name])
    store.delete(name)
    assert "no record names" not in said("ls", store, capsys)


@pytest.mark.parametrize("name", HARMLESS)
def test_other_files_are_named_and_raise_no_alarm(
    name: str, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    store.write(name, [HARMLESS[name]])
    for command in ("ls", "verify"):
        told = said(command, store, capsys)
        assert name.removeprefix("run/") in told
        assert "may run code" not in told
    assert "unnamed" not in said("status", store, capsys)


def test_of_many_files_the_first_are_told_and_how_many_there_are(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    for n in range(30):
        store.write(f"{MODEL}/{n:02}.txt", [b"x"])
    store.write(f"{MODEL}/z.py", [b"x"])
    line = said("ls", store, capsys)
    assert "31 files that no record names: consolidated/checkpoint-4/z.py (may run code" in line
    assert "06.txt, …" in line
    assert "07.txt" not in line
    assert "23 more files that no record names" in said("verify", store, capsys)
    main(["ls", "--store", store.url, "--json"])
    (found,) = json.loads(capsys.readouterr().out)["locations"]
    assert found["unnamed"]["files"] == 31
    assert len(found["unnamed"]["first"]) == 8


def test_a_link_is_told_too(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / MODEL / "modeling_x.py").symlink_to("/etc/passwd")
    (tmp_path / MODEL / "config.json~").symlink_to(tmp_path)
    for command in ("ls", "verify"):
        told = said(command, store, capsys)
        assert f"{MODEL.removeprefix('run/')}/modeling_x.py" in told
        assert "config.json~" in told


def test_what_a_node_is_sending_is_no_finding(store: Store) -> None:
    store.write(f"{OWN}/late.py", [b"x"])
    store.write("run/.ckptsync/checkpoint-4/sending/n0", [b"sending\n"])
    assert read_catalogue(store).summaries[0].unnamed == ()


def test_a_store_that_is_no_path_is_not_listed_once_more() -> None:
    far = MemoryStore()
    fill(far)
    far.write(f"{MODEL}/modeling_evil.py", [b"x"])
    assert read_catalogue(far).summaries[0].unnamed == ()
