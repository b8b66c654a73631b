"""What the commands that look at a store have in common."""

from pathlib import Path

import pytest

from ckptsync.cli.main import main
from ckptsync.cli.places import first_of
from tests.cli_store import flip, make


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return make(tmp_path / "store")


def test_the_first_of_many_lines_says_how_many_there_are() -> None:
    assert [first_of([]), first_of(["a"]), first_of(["a", "b", "c"])] == ["", "a", "a (and 2 more)"]


def test_the_store_is_named_by_the_command_the_environment_or_a_configuration(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("CKPTSYNC_STORE", raising=False)
    assert main(["ls"]) == 2
    (tmp_path / "c.yaml").write_text(f"roles: [head]\nstore: {{url: {store}}}\n")
    assert main(["ls", "-c", str(tmp_path / "c.yaml")]) == 0
    assert main(["ls", str(store), "-c", str(tmp_path / "c.yaml")]) == 2
    monkeypatch.setenv("CKPTSYNC_STORE", str(store))
    assert main(["ls"]) == 0
    assert capsys.readouterr().out.count("VERIFIED") == 2


def test_a_record_that_cannot_be_read_is_told_and_not_rounded_down(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = next((store / "zero3" / ".ckptsync").rglob("manifest-*"))
    flip(manifest)
    for command in ("ls", "status"):
        assert main([command, str(store)]) == 10
        assert f"unreadable: zero3/.ckptsync/checkpoint-4/{manifest.name}" in capsys.readouterr().out
