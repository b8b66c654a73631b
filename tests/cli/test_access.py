"""Which store a command line names, and with which options and limits it is opened."""

import json
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest

from ckptsync.cli.arguments import access_of, run_and_location
from ckptsync.config.loading import limits_of
from ckptsync.config.schema import LimitsConfig
from ckptsync.errors import ConfigError
from ckptsync.stores.limits import TokenBucket, Unlimited
from ckptsync.stores.opening import create_store
from tests.support.command_line import Cli
from tests.support.seaweedfs import weed
from tests.support.small_store import make


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return make(tmp_path / "store")


def test_the_store_is_named_by_the_command_the_environment_or_a_configuration(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    monkeypatch.delenv("CKPTSYNC_STORE", raising=False)
    cli("ls", code=2)
    (tmp_path / "c.yaml").write_text(f"roles: [head]\nstore: {{url: {store}}}\n")
    for words in ([], ["--store", store]):
        assert "VERIFIED" in cli("ls", *words, "-c", tmp_path / "c.yaml").out
    monkeypatch.setenv("CKPTSYNC_STORE", str(store))
    told = cli("ls")
    assert "VERIFIED" in told.out
    assert told.err.splitlines()[-1] == f"ckptsync: store {store} ($CKPTSYNC_STORE)"
    assert cli("ls", "--json").err == ""


def test_where_limits_and_options_are_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    child = access_of(Namespace(config=str(tmp_path / "c.yaml"), progress="json"))
    assert child.limits.memory < of_file.limits.memory, "other children of the head have the rest"
    assert "lab" not in repr(of_file)
    with pytest.raises(ConfigError, match="--bandwidth: '50' is not a bandwidth"):
        access_of(Namespace(bandwidth="50"))
    with pytest.raises(ConfigError, match="--bandwidth: an empty bandwidth: expected a rate"):
        access_of(Namespace(bandwidth=""))


def test_options_of_the_environment_do_not_trouble_a_path(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    monkeypatch.setenv("CKPTSYNC_STORAGE_OPTIONS", '{"secret": "hunter2"}')
    cli("ls", "--store", store)
    config = tmp_path / "c.yaml"
    config.write_text(f"roles: [head]\nstore: {{url: {store}}}\n")
    assert "a path has none" in cli("ls", "-c", config, code=2).err
    cli("ls", "-c", config, "--store", store)
    monkeypatch.setenv("CKPTSYNC_STORAGE_OPTIONS", '{"secret": "hunter2"')
    assert "CKPTSYNC_STORAGE_OPTIONS: not JSON" in (err := cli("ls", "--store", store, code=2).err)
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


@pytest.mark.parametrize(
    "words",
    [
        ["ls", "store/fsdp2"],
        ["status", "./store/fsdp2"],
        ["repair", "store/fsdp2", "--dry-run"],
        ["repair", "./store/fsdp2/checkpoint-4", "--dry-run"],
        ["keep", "store/fsdp2/checkpoint-4"],
        ["keep", "./store/fsdp2/consolidated/checkpoint-4"],
        ["pull", "store/fsdp2/checkpoint-4", "out"],
        ["pull", "store/fsdp2", "out"],
    ],
)
def test_a_path_in_a_store_names_the_store_and_what_is_in_it(
    words: list[str], store: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    monkeypatch.delenv("CKPTSYNC_STORE", raising=False)
    monkeypatch.chdir(store.parent)
    cli(*words)
    monkeypatch.chdir("/")
    cli(*words, code=2)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["pull", "store", "out"], "ckptsync pull out --store store"),
        (["ls", "./store", "--json"], "ckptsync ls --json --store ./store"),
        (["status", "./store"], "ckptsync status --store ./store"),
        (["gc", "./store", "--keep-last", "1"], "ckptsync gc --keep-last 1 --store ./store"),
        (["repair", "./store", "fsdp2"], "ckptsync repair fsdp2 --store ./store"),
        (["verify", "./store"], "ckptsync verify --store ./store"),
        (["doctor", "./store"], "ckptsync doctor --store ./store"),
        (["gc", "fsdp2"], "one run is --run fsdp2"),
        (["keep", "fsdp2/checkpoint-4"], "no store is named, and this lies in none"),
        (["keep", "./store/fsdp2/checkpoint-4", "--store", "store"], "--store names another store"),
        (["pull", "./fsdp2", "out"], "./fsdp2: not inside a store"),
        (["repair"], "no store is named"),
        (["join", "store/fsdp2/checkpoint-4"], "expected two of RUN/CHECKPOINT, not 1"),
        (["join", "store/fsdp2/checkpoint-4", "store/zero3/checkpoint-4"], "are of two runs"),
    ],
)
def test_why_a_name_names_nothing_is_said(
    words: list[str], reason: str, store: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    monkeypatch.delenv("CKPTSYNC_STORE", raising=False)
    monkeypatch.chdir(store.parent)
    assert reason in cli(*words, code=2).err


def test_a_run_of_the_named_store_wins_over_a_path_of_its_name(
    store: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    monkeypatch.setenv("CKPTSYNC_STORE", str(store))
    monkeypatch.chdir(store.parent)
    cli("repair", "fsdp2", "--dry-run")
    assert "run 'store' not found" in cli("repair", "store", "--dry-run", code=2).err


def test_a_url_of_a_checkpoint_names_its_store(monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    url = f"s3://{weed().bucket()}/deep"
    create_store(url, weed().options())
    monkeypatch.setenv("CKPTSYNC_STORAGE_OPTIONS", json.dumps(weed().options()))
    assert "run 'a' not found in" in cli("repair", f"{url}/a/b/checkpoint-4", code=2).err
    cli("repair", "--store", url)
