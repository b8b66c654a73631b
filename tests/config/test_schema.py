"""The keys of the configuration: how each is read, and what is hidden."""

from typing import Any

import pytest

from ckptsync.config.schema import KEYS, AlertsConfig, RetentionConfig, StoreConfig
from ckptsync.config.value_parsers import RunConfig
from ckptsync.head.retention_rules import Best, Rules
from ckptsync.stores.limits import Schedule

WRONG: dict[str, list[object]] = {
    "node": ["a/b", 5],
    "roles": [[], ["worker", "boss"], "nobody"],
    "store.url": ["relative/path"],
    "store.options": [["a"], {1: 2}, "[1]", "{", '{"a":' * 5000],
    "limits.bandwidth": ["50", 50, True, "08:00"],
    "limits.threads": [0, "0", 10**9 + 1],
    "limits.memory": [0, 2**63],
    "limits.patience": ["soon"],
    "limits.stall": ["0"],
    "worker.runs": [
        "/data",
        [{"name": "x"}],
        [{"path": "/data", "nmae": "x"}],
        ["data/out"],
        [{"path": "/data", "name": ".ckptsync"}],
        [{"path": "/data", "name": "consolidated"}],
        [{"path": "/data", "name": "../up"}],
    ],
    "worker.quiet": [10],
    "worker.scan_every": ["0"],
    "worker.keep_pins": [-1, True, "two"],
    "worker.order": ["random"],
    "worker.send": ["model"],
    "worker.include": ["/etc/*,", [1]],
    "worker.exclude": [{"a": 1}],
    "worker.spool_budget": [0, True],
    "worker.spool_full": ["every:0", "every", "newest"],
    "worker.clean": [True, "always"],
    "worker.keep_local": [0],
    "worker.logs": ["no", 0],
    "head.dtype": ["float32"],
    "head.max_shard_size": [0, True],
    "head.config_from": [{"run": 3}],
    "verify.level": ["deep", "model"],
    "head.jobs": [0],
    "head.engine": ["spark"],
    "head.allow_code": ["yes", 1],
    "head.patience_node": ["0"],
    "head.adapters": [{"onto": "/b"}, {"into": "relative"}, {"into": {"run": 3}}],
    "head.norm_jump": [1, True, "much", "1e9", "nan"],
    "verify.period": ["0"],
    "log.level": ["loud"],
    "retention.keep_last": [0, True],
    "retention.keep_every": ["-5"],
    "retention.keep_best": ["eval_loss", "eval_loss:0", "most:eval_loss:2"],
    "retention.max_age": ["0", 7],
    "retention.max_size": ["much"],
    "retention.shards": ["drop", "drop-after:-1"],
    "retention.runs": [
        ["exp"],
        {"exp": {"keep_lats": 2}},
        {"exp": {"keep_last": -1}},
        {"../exp": {}},
        {"exp": {"grace": "1d"}},
    ],
    "alerts.urls": [
        "hooks.example/x",
        3,
        [3],
        ["json://h", "HTTPS://hooks.example/x"],
        ["a b://c"],
    ],
    "alerts.command": [["page"], {"a": 1}, ["/page\0"]],
    "alerts.on": [["doom"], "damage, doom"],
    "metrics.listen": ["9464", "127.0.0.1:65536", True],
    "web.listen": ["unix:run/web", "9464"],
    "web.token": ["x" * 15, "x" * 201, "a space is in this one"],
}


@pytest.mark.parametrize(("key", "value"), [(k, v) for k, values in WRONG.items() for v in values])
def test_a_value_of_the_wrong_kind_is_a_problem(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        KEYS[key].read(value)


@pytest.mark.parametrize(
    ("key", "value", "read"),
    [
        ("roles", "worker, head", ("worker", "head")),
        ("head.allow_code", "True", True),
        ("head.allow_code", False, False),
        ("head.norm_jump", "off", 0),
        ("head.norm_jump", 3, 3.0),
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
        ("limits.memory", 2**63 - 1, 2**63 - 1),
        ("limits.memory", 1, 1),
        ("head.every", "500ms", 0.5),
        ("limits.patience", "0", 0.0),
        ("head.max_shard_size", 1000, 1000),
        ("store.url", "s3://bucket/x", "s3://bucket/x"),
        ("retention.keep_last", False, 0),
        ("retention.keep_last", "3", 3),
        ("retention.keep_best", "eval_loss:2", Best("eval_loss", 2)),
        ("retention.keep_best", "max:eval/acc@1:3", Best("eval/acc@1", 3, is_greatest=True)),
        ("retention.keep_best", "min:eval_loss:1", Best("eval_loss", 1)),
        ("retention.max_age", "30d", 2_592_000.0),
        ("retention.max_size", "2TB", 2 * 10**12),
        ("retention.shards", "keep", None),
        ("retention.shards", "drop-after:0", 0),
        (
            "retention.runs",
            {"exp-*": {"keep_last": 5, "shards": "keep"}},
            {"exp-*": {"keep_last": 5, "shards": None}},
        ),
        (
            "alerts.urls",
            "json://h/x mailto://u:p@h?to=a,b",
            ("json://h/x", "mailto://u:p@h?to=a,b"),
        ),
        ("alerts.urls", ["slack://a/b/c"], ("slack://a/b/c",)),
        ("alerts.command", "/usr/bin/page --to 'the team'", ("/usr/bin/page", "--to", "the team")),
        ("alerts.on", "full, damage", ("full", "damage")),
        ("metrics.listen", False, ""),
        ("metrics.listen", "[::]:9464", "[::]:9464"),
        ("metrics.listen", "head.example:65535", "head.example:65535"),
        ("web.listen", "unix:/run/web", "unix:/run/web"),
        ("web.token", "x" * 16, "x" * 16),
        ("web.token", "!" * 200, "!" * 200),
        ("head.adapters", {"into": "s3://b/base"}, {"*": "s3://b/base"}),
        ("head.adapters", {"into": {"run": "/base"}}, {"run": "/base"}),
    ],
)
def test_files_and_variables_say_it_in_their_own_ways(key: str, value: object, read: Any) -> None:
    assert KEYS[key].read(value) == read


@pytest.mark.parametrize(
    "value", ['{"secret": "hunter2"', '"hunter2"', ["hunter2"], {1: "hunter2"}]
)
def test_a_problem_of_the_stores_options_repeats_no_value(value: object) -> None:
    with pytest.raises(ValueError, match=r"\w") as caught:
        KEYS["store.options"].read(value)
    assert "hunter2" not in str(caught.value)


def test_options_are_not_shown_where_a_configuration_is() -> None:
    assert "hunter2" not in repr(StoreConfig("s3://b", {"secret": "hunter2"}))


def test_a_problem_of_a_run_s_rule_names_the_run_and_the_rule() -> None:
    with pytest.raises(
        ValueError, match=r"exp: keep_best: 'eval_loss' is not a metric and a number"
    ):
        KEYS["retention.runs"].read({"exp": {"keep_best": "eval_loss"}})


@pytest.mark.parametrize("url", ["hooks.example/hunter2", "https://hooks.example/hunter2"])
def test_a_problem_of_an_alert_url_does_not_repeat_it_and_names_the_form(url: str) -> None:
    with pytest.raises(ValueError, match="jsons://") as caught:
        KEYS["alerts.urls"].read(url)
    assert "hunter2" not in str(caught.value)


def test_what_is_said_of_a_run_stands_before_what_is_said_of_all() -> None:
    said = RetentionConfig(
        keep_last=2, keep_every=100, runs={"exp-*": {"keep_last": 5}, "exp-1": {"keep_every": 0}}
    )
    assert said.of("other") == Rules(keep_last=2, keep_every=100)
    assert said.of("exp-2") == Rules(keep_last=5, keep_every=100)
    assert said.of("exp-1") == Rules(keep_last=2), "a name counts before a glob"


def test_an_alert_url_is_not_shown_where_a_configuration_is() -> None:
    assert "hunter2" not in repr(AlertsConfig(("jsons://hooks.example/hunter2",)))


def test_every_default_passes_its_own_reader_and_no_two_keys_share_a_variable() -> None:
    for key in KEYS.values():
        key.read(key.default)
    variables = [key.variable for key in KEYS.values() if key.variable]
    assert len(set(variables)) == len(variables)
    assert KEYS["worker.keep_pins"].variable == "CKPTSYNC_WORKER_KEEP_PINS"
    assert KEYS["worker.runs"].variable == ""
