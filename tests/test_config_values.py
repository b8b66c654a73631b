"""The frozen values that answer a question."""

from ckptsync.config.values import AlertsConfig, RetentionConfig
from ckptsync.head.rules import Rules


def test_what_is_said_of_a_run_stands_before_what_is_said_of_all() -> None:
    said = RetentionConfig(keep_last=2, keep_every=100, runs={"exp-*": {"keep_last": 5}, "exp-1": {"keep_every": 0}})
    assert said.of("other") == Rules(keep_last=2, keep_every=100)
    assert said.of("exp-2") == Rules(keep_last=5, keep_every=100)
    assert said.of("exp-1") == Rules(keep_last=2), "a name counts before a glob"


def test_a_webhook_is_not_shown_where_a_configuration_is() -> None:
    assert "hunter2" not in repr(AlertsConfig("https://hooks.example/hunter2", (), (), 1.0))
