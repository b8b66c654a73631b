"""The table of settings: readers, defaults and variables."""

from dataclasses import fields
from typing import Any

import pytest

from ckptsync.config.settings import SECTIONS, SETTINGS
from ckptsync.config.values import Config, HeadConfig, LogConfig, RunConfig, StoreConfig, VerifyConfig, WorkerConfig


def test_every_default_passes_its_own_reader() -> None:
    for setting in SETTINGS.values():
        setting.read(setting.default)


def test_the_table_and_the_frozen_values_have_the_same_keys() -> None:
    classes = {"store": StoreConfig, "worker": WorkerConfig, "head": HeadConfig, "verify": VerifyConfig, "log": LogConfig}
    assert set(classes) == set(SECTIONS)
    keys = {f"{section}.{f.name}" for section, cls in classes.items() for f in fields(cls)}
    keys |= {f.name for f in fields(Config)} - set(classes)
    assert keys == set(SETTINGS)


def test_no_two_settings_share_a_variable_and_each_is_named_after_its_key() -> None:
    variables = {setting.environment: key for key, setting in SETTINGS.items() if setting.environment}
    assert len(variables) == sum(bool(setting.environment) for setting in SETTINGS.values())
    for variable, key in variables.items():
        assert variable in (f"CKPTSYNC_{key.upper().replace('.', '_')}", "CKPTSYNC_STORE")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("node", "a/b"),
        ("node", 5),
        ("roles", []),
        ("roles", ["worker", "boss"]),
        ("roles", "nobody"),
        ("store.url", "relative/path"),
        ("store.options", ["a"]),
        ("store.options", {1: 2}),
        ("worker.runs", "/data"),
        ("worker.runs", [{"name": "x"}]),
        ("worker.runs", [{"path": "/data", "nmae": "x"}]),
        ("worker.runs", ["data/out"]),
        ("worker.runs", [{"path": "/data", "name": ".ckptsync"}]),
        ("worker.runs", [{"path": "/data", "name": "consolidated"}]),
        ("worker.runs", [{"path": "/data", "name": "../up"}]),
        ("worker.quiet", 10),
        ("worker.scan_every", "0"),
        ("worker.keep_pins", -1),
        ("worker.keep_pins", True),
        ("worker.keep_pins", "two"),
        ("head.dtype", "float32"),
        ("head.max_shard_size", 0),
        ("head.max_shard_size", True),
        ("head.config_from", {"run": 3}),
        ("verify.level", "model"),
        ("log.level", "loud"),
    ],
)
def test_a_value_of_the_wrong_kind_is_a_problem(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        SETTINGS[key].read(value)


@pytest.mark.parametrize(
    ("key", "value", "read"),
    [
        ("roles", "worker, head", ("worker", "head")),
        ("roles", ["head", "head"], ("head",)),
        ("worker.runs", ["/data/*"], (RunConfig("/data/*"),)),
        ("worker.runs", [{"path": "/data", "name": "x"}], (RunConfig("/data", "x"),)),
        ("worker.keep_pins", "3", 3),
        ("worker.quiet", 0, 0.0),
        ("head.max_shard_size", 1000, 1000),
        ("store.url", "s3://bucket/x", "s3://bucket/x"),
    ],
)
def test_files_and_variables_say_it_in_their_own_ways(key: str, value: object, read: Any) -> None:
    assert SETTINGS[key].read(value) == read
