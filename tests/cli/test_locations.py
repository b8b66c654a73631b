"""What the commands that look at a store have in common."""

from argparse import Namespace
from pathlib import Path

import pytest

from ckptsync.cli.locations import first_of, reached
from ckptsync.cli.main import main
from ckptsync.errors import ConfigError
from ckptsync.stores.limits import TokenBucket, Unlimited
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


def test_limits_and_options_come_from_the_environment_or_the_configuration_and_the_flag_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPTSYNC_STORAGE_OPTIONS", '{"profile": "lab"}')
    monkeypatch.setenv("CKPTSYNC_LIMITS_THREADS", "7")
    access = reached(Namespace(bandwidth=None))
    assert (access.options, access.limits.threads) == ({"profile": "lab"}, 7)
    assert isinstance(access.limits.pace, Unlimited)
    assert isinstance(reached(Namespace(bandwidth="1MB/s")).limits.pace, TokenBucket)
    (tmp_path / "c.yaml").write_text("roles: [head]\nstore: {url: s3://b/x}\nlimits: {bandwidth: 1MB/s, threads: 3}\n")
    of_file = reached(Namespace(config=str(tmp_path / "c.yaml")))
    assert (of_file.options, of_file.limits.threads) == ({"profile": "lab"}, 7), "the environment overrides the file, as always"
    assert isinstance(of_file.limits.pace, TokenBucket)
    assert "lab" not in repr(of_file)
    with pytest.raises(ConfigError, match="--bandwidth: '50' is not a bandwidth"):
        reached(Namespace(bandwidth="50"))
    with pytest.raises(ConfigError, match="--bandwidth: an empty bandwidth: a rate such as"):
        reached(Namespace(bandwidth=""))


def test_options_of_the_environment_do_not_trouble_a_path(
    store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CKPTSYNC_STORAGE_OPTIONS", '{"secret": "hunter2"}')
    assert main(["ls", str(store)]) == 0
    monkeypatch.setenv("CKPTSYNC_STORAGE_OPTIONS", '{"secret": "hunter2"')
    assert main(["ls", str(store)]) == 2
    assert "CKPTSYNC_STORAGE_OPTIONS: not JSON" in (err := capsys.readouterr().err)
    assert "hunter2" not in err
