"""YAML with the line of each key."""

import time

import pytest

from ckptsync.config.yaml_lines import parse
from ckptsync.errors import ConfigError


def test_every_key_has_its_line() -> None:
    document = parse(
        "# head\nstore:\n  url: /x\n\nworker:\n  quiet: 5s\n  runs:\n    - path: /a\n", "c"
    )
    assert document.lines == {
        "store": 2,
        "store.url": 3,
        "worker": 5,
        "worker.quiet": 6,
        "worker.runs": 7,
        "worker.runs.[].path": 8,
    }
    assert document.values == {
        "store": {"url": "/x"},
        "worker": {"quiet": "5s", "runs": [{"path": "/a"}]},
    }
    assert not document.twice


def test_a_key_given_twice_is_found_at_any_depth() -> None:
    assert parse("a:\n  b: 1\n  b: 2\na: 3\n", "c").twice.keys() == {"a.b", "a"}


def test_an_empty_file_is_no_value() -> None:
    assert parse("# nothing\n", "c").values is None


@pytest.mark.parametrize(
    "text", ["a: [", "a: b: c", "\t- x", "!!python/object/apply:os.system ['true']", "a: !odd x"]
)
def test_what_is_not_plain_yaml_is_refused_and_runs_nothing(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^c(:\d+)?: not (plain )?YAML: "):
        parse(text, "c")


def test_a_key_is_a_word_whatever_yaml_would_make_of_it() -> None:
    document = parse("alerts:\n  on: [damage]\n  off: no\nyes: 1\n", "c")
    assert document.values == {"alerts": {"on": ["damage"], "off": False}, "yes": 1}
    assert document.lines["alerts.on"] == 2


BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("0b_", "a value that cannot be read"),
        ("0x_", "a value that cannot be read"),
        ("9" * 5000, "a value that cannot be read"),
        ("!!int x", "a value that cannot be read"),
        ("!!float ''", "a value that cannot be read"),
        ("!!bool maybe", "a value that cannot be read"),
        ("!!binary aaaa", "a value that cannot be read"),
        ("!!set {a}", "a value that cannot be read"),
        ("!!str [1]", "a value that cannot be read"),
        ("!<%00> x", "a value that cannot be read"),
        ('"\\ud800"', "a value that cannot be read"),
        ("[" * 200_000, "more than 50 levels"),
        ("{a: " * 50_000, "more than 50 levels"),
        ("- " * 100, "sequence entries are not allowed here"),
        ("{[a]: 1}", "a key that is no word"),
        ("&x [*x]", "an alias"),
    ],
)
def test_what_is_more_than_plain_values_is_a_problem_with_its_line(value: str, why: str) -> None:
    with pytest.raises(ConfigError, match=rf"^c:2: not (plain )?YAML: .*{why}") as caught:
        parse(f"# head\na: {value}", "c")
    assert len(str(caught.value)) < 300
    assert value[:20] not in str(caught.value)  # it may be a secret


@pytest.mark.parametrize("text", ['"\\Uffffffff"', "a\0", "\ud800", BOMB, "%YAML 9.9\n--- a"])
def test_what_no_text_has_is_a_problem_too(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^c(:\d)?: not (plain )?YAML: "):
        parse(text, "c")


def test_dates_are_words_and_numbers_that_are_none_too() -> None:
    assert parse("a: 2001-99-99\nb: 2001-01-01\nc: 0o8\nd: 1e9\n<<: x\n", "c").values == {
        "a": "2001-99-99",
        "b": "2001-01-01",
        "c": "0o8",
        "d": "1e9",
        "<<": "x",
    }


def test_a_long_file_is_read_once_and_a_longer_one_not_at_all() -> None:
    started = time.process_time()
    assert len(parse("".join(f"key{i}: v\n" for i in range(5_000)), "c").lines) == 5_000
    assert time.process_time() - started < 10  # it takes half a second
    with pytest.raises(ConfigError, match=r"^c: \d+ characters, at most 262144"):
        parse("a: 1\n" * 100_000, "c")
