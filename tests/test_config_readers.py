"""Readers of the configuration's values, by the keys that they are for."""

from typing import Any

import pytest

from ckptsync.config.settings import SETTINGS
from ckptsync.config.values import RunConfig, StoreConfig
from ckptsync.stores.limits import Schedule


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
        ("store.options", "[1]"),
        ("store.options", "{"),
        ("store.options", '{"a":' * 5000),
        ("limits.bandwidth", "50"),
        ("limits.bandwidth", 50),
        ("limits.bandwidth", True),
        ("limits.bandwidth", "08:00"),
        ("limits.threads", 0),
        ("limits.threads", "0"),
        ("limits.memory", 0),
        ("limits.patience", "soon"),
        ("limits.stall", "0"),
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
        ("worker.order", "random"),
        ("worker.send", "model"),
        ("worker.include", "/etc/*,"),
        ("worker.include", [1]),
        ("worker.exclude", {"a": 1}),
        ("worker.spool_budget", 0),
        ("worker.spool_budget", True),
        ("worker.spool_full", "every:0"),
        ("worker.spool_full", "every"),
        ("worker.spool_full", "newest"),
        ("worker.clean", True),
        ("worker.clean", "always"),
        ("worker.keep_local", 0),
        ("head.dtype", "float32"),
        ("head.max_shard_size", 0),
        ("head.max_shard_size", True),
        ("head.config_from", {"run": 3}),
        ("verify.level", "deep"),
        ("head.jobs", 0),
        ("head.engine", "spark"),
        ("head.allow_code", "yes"),
        ("head.allow_code", 1),
        ("head.patience_node", "0"),
        ("verify.period", "0"),
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
        ("head.allow_code", "True", True),
        ("head.allow_code", False, False),
        ("roles", ["head", "head"], ("head",)),
        ("worker.runs", ["/data/*"], (RunConfig("/data/*"),)),
        ("worker.runs", [{"path": "/data", "name": "x"}], (RunConfig("/data", "x"),)),
        ("worker.keep_pins", "3", 3),
        ("worker.quiet", 0, 0.0),
        ("worker.include", "*.json, model*", ("*.json", "model*")),
        ("worker.exclude", ["rng*"], ("rng*",)),
        ("worker.spool_budget", False, 0),
        ("worker.spool_budget", "off", 0),
        ("worker.spool_budget", "2GB", 2_000_000_000),
        ("worker.spool_full", "every:010", "every:10"),
        ("worker.clean", False, "off"),
        (
            "store.options",
            '{"endpoint_url": "http://x", "client_kwargs": {"a": 1}}',
            {"endpoint_url": "http://x", "client_kwargs": {"a": 1}},
        ),
        ("limits.bandwidth", "off", None),
        ("limits.bandwidth", "1KB/s", Schedule((0,), (1000.0,))),
        ("limits.threads", "8", 8),
        ("limits.memory", "1GiB", 1 << 30),
        ("limits.patience", "0", 0.0),
        ("head.max_shard_size", 1000, 1000),
        ("store.url", "s3://bucket/x", "s3://bucket/x"),
    ],
)
def test_files_and_variables_say_it_in_their_own_ways(key: str, value: object, read: Any) -> None:
    assert SETTINGS[key].read(value) == read


@pytest.mark.parametrize("value", ['{"secret": "hunter2"', '"hunter2"', ["hunter2"], {1: "hunter2"}])
def test_a_problem_of_the_stores_options_repeats_no_value(value: object) -> None:
    with pytest.raises(ValueError, match=r"\w") as caught:
        SETTINGS["store.options"].read(value)
    assert "hunter2" not in str(caught.value)


def test_options_are_not_shown_where_a_configuration_is() -> None:
    assert "hunter2" not in repr(StoreConfig("s3://b", {"secret": "hunter2"}))
