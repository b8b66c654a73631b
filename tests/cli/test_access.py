"""Which store a command line names, and with which options and limits it is opened."""

from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest

from ckptsync.cli.arguments import access_of, run_and_location
from ckptsync.cli.main import main
from ckptsync.config.loading import limits_of
from ckptsync.config.schema import LimitsConfig
from ckptsync.errors import ConfigError
from ckptsync.stores.limits import TokenBucket, Unlimited
from tests.support.small_store import flip, make


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return make(tmp_path / "store")


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


def test_a_record_that_cannot_be_read_is_told_and_not_rounded_down(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = next((store / "zero3" / ".ckptsync").rglob("manifest-*"))
    flip(manifest)
    for command in ("ls", "status"):
        assert main([command, str(store)]) == 10
        assert (
            f"unreadable: zero3/.ckptsync/checkpoint-4/{manifest.name}" in capsys.readouterr().out
        )


def test_limits_and_options_come_from_the_environment_or_the_configuration_and_the_flag_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPTSYNC_STORAGE_OPTIONS", '{"profile": "lab"}')
    monkeypatch.setenv("CKPTSYNC_LIMITS_THREADS", "7")
    access = access_of(Namespace(bandwidth=None))
    assert (access.options, access.limits.threads) == ({"profile": "lab"}, 7)
    assert isinstance(access.limits.pace, Unlimited)
    assert isinstance(access_of(Namespace(bandwidth="1MB/s")).limits.pace, TokenBucket)
    (tmp_path / "c.yaml").write_text(
        "roles: [head]\nstore: {url: s3://b/x}\nlimits: {bandwidth: 1MB/s, threads: 3}\n"
    )
    of_file = access_of(Namespace(config=str(tmp_path / "c.yaml")))
    assert (of_file.options, of_file.limits.threads) == ({"profile": "lab"}, 7), (
        "the environment overrides the file, as always"
    )
    assert isinstance(of_file.limits.pace, TokenBucket)
    assert "lab" not in repr(of_file)
    with pytest.raises(ConfigError, match="--bandwidth: '50' is not a bandwidth"):
        access_of(Namespace(bandwidth="50"))
    with pytest.raises(ConfigError, match="--bandwidth: an empty bandwidth: expected a rate"):
        access_of(Namespace(bandwidth=""))


def test_options_of_the_environment_do_not_trouble_a_path(
    store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CKPTSYNC_STORAGE_OPTIONS", '{"secret": "hunter2"}')
    assert main(["ls", str(store)]) == 0
    monkeypatch.setenv("CKPTSYNC_STORAGE_OPTIONS", '{"secret": "hunter2"')
    assert main(["ls", str(store)]) == 2
    assert "CKPTSYNC_STORAGE_OPTIONS: not JSON" in (err := capsys.readouterr().err)
    assert "hunter2" not in err


@pytest.mark.parametrize(
    "what", ["checkpoint-1", "../x/checkpoint-1", "a//checkpoint-1", "run/..", "a/b\x00", "/", ""]
)
def test_a_name_that_no_checkpoint_can_have_is_refused(what: str) -> None:
    assert run_and_location("/team/run/checkpoint-1/") == ("team/run", "checkpoint-1")
    with pytest.raises(ConfigError):
        run_and_location(what)


def test_a_store_that_a_url_names_has_the_limits_that_an_empty_configuration_has() -> None:
    """Without a configuration and variables the configuration's modules are not loaded: the
    defaults stand twice.
    """
    plain, configured = access_of(Namespace()).limits, limits_of(LimitsConfig())
    assert replace(plain, pace=configured.pace) == configured
    assert isinstance(plain.pace, Unlimited)
    assert isinstance(configured.pace, Unlimited)
