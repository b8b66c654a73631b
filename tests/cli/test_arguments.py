"""Each command's arguments, and what the parser refuses."""

from pathlib import Path

import pytest

from ckptsync.cli.main import main, parser
from ckptsync.config.value_parsers import RULES as KEYS
from ckptsync.errors import ConfigError
from ckptsync.stores.opening import create_store


def parsed(line: str) -> dict[str, object]:
    words = line.split()
    return vars(parser(words[0]).parse_args(words[1:]))


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("merge a b out", {"sources": ["a", "b"], "destination": "out", "dtype": "auto"}),
        ("merge a out", {"max_shard_size": None, "engine": "local", "jobs": None}),
        (
            "merge a b --into c out",
            {"sources": ["a", "b"], "into": "c", "destination": "out"},
        ),
        ("merge a --dtype bf16 b out", {"sources": ["a", "b"], "destination": "out"}),
        (
            "merge a out --dtype keep --source zero:. --json",
            {"dtype": "keep", "source": "zero:.", "json": True},
        ),
        (
            "push d --store url --run r --node n --dry-run",
            {"directories": ["d"], "url": "url", "run": "r", "node": "n", "dry_run": True},
        ),
        (
            "push d --run a e --store s3://b/c --send weights",
            {"directories": ["d", "e"], "url": "s3://b/c", "run": "a", "send": "weights"},
        ),
        (
            "push d -c x.yaml --exclude a --exclude b",
            {"url": None, "config": "x.yaml", "exclude": ["a", "b"]},
        ),
        ("verify a b", {"targets": ["a", "b"], "level": None, "json": False}),
        (
            "verify a --level load --sample 10% --baseline f --record g",
            {"level": "load", "sample": "10%", "record": "g"},
        ),
        ("inspect a --tensors", {"targets": ["a"], "tensors": True}),
        ("ls", {"url": None, "config": None, "targets": []}),
        ("ls --json r/c --store /s", {"url": "/s", "targets": ["r/c"]}),
        ("status r --store /s --watch", {"url": "/s", "targets": ["r"], "watch": True}),
        ("run -c x.yaml", {"config": "x.yaml"}),
        ("demo --dir d", {"dir": "d"}),
        (
            "pull r out --node n --dry-run",
            {"target": "r", "destination": "out", "url": None, "node": "n", "consolidated": False},
        ),
        (
            "gc --store /store --keep-last 3 --dry-run",
            {"url": "/store", "keep_last": "3", "dry_run": True},
        ),
        ("keep a/b --release", {"targets": ["a/b"], "release": True}),
        ("join a/b a/c", {"targets": ["a/b", "a/c"]}),
        ("repair a/b --wait --store /s", {"targets": ["a/b"], "url": "/s", "wait": True}),
        (
            "service install -c x.yaml --as ann --dry-run",
            {"config": "x.yaml", "train": "ann", "user": False, "dry_run": True},
        ),
        (
            "service uninstall --head",
            {"head": True, "train": None, "user": False, "dry_run": False},
        ),
        ("hook install --python p", {"action": "install", "python": "p"}),
        ("config example worker --json", {"name": "worker", "json": True}),
        ("config --json example", {"name": "", "json": True}),
        ("help", {"name": "", "json": False}),
        ("doctor", {"output_dir": [], "python": "", "publish": False, "nodes": False, "url": None}),
        (
            "doctor --publish -c x.yaml --output-dir /a --output-dir /b",
            {"output_dir": ["/a", "/b"], "publish": True},
        ),
        ("doctor --strict --store /store", {"strict": True, "url": "/store"}),
    ],
)
def test_each_command_reads_its_arguments(
    line: str, found: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    args = parsed(line)
    assert {key: args[key] for key in found} == found
    assert callable(args["command"])


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("merge a b --dry", "--dry: no such option"),
        ("merge a out --dtype int8", "none of auto"),
        ("service", "ACTION"),
        ("hook", "ACTION"),
    ],
)
def test_what_is_not_an_argument_is_refused(line: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        parsed(line)


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("gc st", "ckptsync gc --store st"),
        ("gc sft", "one run is --run sft"),
        ("keep st sft/final", "ckptsync keep sft/final --store st"),
        ("pull st sft out", "--store URL names the store"),
        ("help exit-cods", "did you mean exit-codes?"),
    ],
)
def test_an_old_form_or_a_typo_is_told_the_new_one(
    line: str,
    hint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CKPTSYNC_STORE", raising=False)
    create_store("st")
    assert main(line.split()) == 2
    assert hint in capsys.readouterr().err


def test_every_rule_of_a_configuration_has_a_flag() -> None:
    assert set(KEYS) <= set(parsed("gc"))
