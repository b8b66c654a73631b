"""YAML with the line of each key."""

import pytest

from ckptsync.config.yaml_lines import parse
from ckptsync.errors import ConfigError


def test_every_key_has_its_line() -> None:
    document = parse("# head\nstore:\n  url: /x\n\nworker:\n  quiet: 5s\n  runs:\n    - path: /a\n", "c")
    assert document.lines == {"store": 2, "store.url": 3, "worker": 5, "worker.quiet": 6, "worker.runs": 7}
    assert document.values == {"store": {"url": "/x"}, "worker": {"quiet": "5s", "runs": [{"path": "/a"}]}}
    assert document.twice == ()


def test_a_key_given_twice_is_found_at_any_depth() -> None:
    assert parse("a:\n  b: 1\n  b: 2\na: 3\n", "c").twice == ("a.b", "a")


def test_an_empty_file_is_no_value() -> None:
    assert parse("# nothing\n", "c").values is None


@pytest.mark.parametrize("text", ["a: [", "a: b: c", "\t- x", "!!python/object/apply:os.system ['true']", "a: !odd x"])
def test_what_is_not_plain_yaml_is_refused_and_runs_nothing(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^c(:\d+)?: not YAML: "):
        parse(text, "c")


def test_a_key_is_a_word_whatever_yaml_would_make_of_it() -> None:
    document = parse("alerts:\n  on: [damage]\n  off: no\nyes: 1\n", "c")
    assert document.values == {"alerts": {"on": ["damage"], "off": False}, "yes": 1}
    assert document.lines["alerts.on"] == 2
