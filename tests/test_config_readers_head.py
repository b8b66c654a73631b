"""Readers of what a head keeps, whom it tells and where it is asked."""

from typing import Any

import pytest

from ckptsync.config.settings import SETTINGS
from ckptsync.head.rules import Best


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("retention.keep_last", 0),
        ("retention.keep_last", True),
        ("retention.keep_every", "-5"),
        ("retention.keep_best", "eval_loss"),
        ("retention.keep_best", "eval_loss:0"),
        ("retention.keep_best", "most:eval_loss:2"),
        ("retention.max_age", "0"),
        ("retention.max_age", 7),
        ("retention.max_size", "much"),
        ("retention.shards", "drop"),
        ("retention.shards", "drop-after:-1"),
        ("retention.runs", ["exp"]),
        ("retention.runs", {"exp": {"keep_lats": 2}}),
        ("retention.runs", {"exp": {"keep_last": -1}}),
        ("retention.runs", {"../exp": {}}),
        ("retention.runs", {"exp": {"grace": "1d"}}),
        ("alerts.webhook", "hooks.example/x"),
        ("alerts.command", ["page"]),
        ("alerts.command", {"a": 1}),
        ("alerts.on", ["doom"]),
        ("alerts.on", "damage, doom"),
        ("metrics.listen", "9464"),
        ("metrics.listen", "127.0.0.1:99999"),
        ("metrics.listen", True),
    ],
)
def test_a_value_of_the_wrong_kind_is_a_problem(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        SETTINGS[key].read(value)


@pytest.mark.parametrize(
    ("key", "value", "read"),
    [
        ("retention.keep_last", False, 0),
        ("retention.keep_last", "3", 3),
        ("retention.keep_best", "eval_loss:2", Best("eval_loss", 2)),
        ("retention.keep_best", "max:eval/acc@1:3", Best("eval/acc@1", 3, is_greatest=True)),
        ("retention.keep_best", "min:eval_loss:1", Best("eval_loss", 1)),
        ("retention.max_age", "30d", 2_592_000.0),
        ("retention.max_size", "2TB", 2 * 10**12),
        ("retention.shards", "keep", None),
        ("retention.shards", "drop-after:0", 0),
        ("retention.runs", {"exp-*": {"keep_last": 5, "shards": "keep"}}, {"exp-*": {"keep_last": 5, "shards": None}}),
        ("alerts.webhook", "https://hooks.example/x", "https://hooks.example/x"),
        ("alerts.command", "/usr/bin/page --to 'the team'", ("/usr/bin/page", "--to", "the team")),
        ("alerts.on", "full, damage", ("full", "damage")),
        ("metrics.listen", False, ""),
        ("metrics.listen", "[::]:9464", "[::]:9464"),
        ("metrics.listen", "head.example:80", "head.example:80"),
    ],
)
def test_files_and_variables_say_it_in_their_own_ways(key: str, value: object, read: Any) -> None:
    assert SETTINGS[key].read(value) == read


def test_a_problem_of_a_run_s_rule_names_the_run_and_the_rule() -> None:
    with pytest.raises(ValueError, match=r"exp: keep_best: 'eval_loss' is not a metric and a number"):
        SETTINGS["retention.runs"].read({"exp": {"keep_best": "eval_loss"}})


def test_a_problem_of_a_webhook_does_not_repeat_it() -> None:
    with pytest.raises(ValueError, match=r"\w") as caught:
        SETTINGS["alerts.webhook"].read("hooks.example/hunter2")
    assert "hunter2" not in str(caught.value)
