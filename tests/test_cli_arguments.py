"""What the command line takes."""

import importlib

import pytest

from ckptsync.cli.arguments import parser


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (
            "merge a b out",
            {"sources": ["a", "b"], "destination": "out", "dtype": "auto", "max_shard_size": "5GB", "dry_run": False},
        ),
        ("merge a out --dtype keep --source zero:. --json", {"dtype": "keep", "source": "zero:.", "json": True}),
        ("push d url --run r --node n --dry-run", {"directory": "d", "url": "url", "run": "r", "node": "n", "dry_run": True}),
        ("verify a b", {"targets": ["a", "b"], "level": None}),
        ("inspect a --tensors", {"targets": ["a"], "tensors": True}),
        ("ls", {"url": None, "config": None}),
        ("status /s --watch", {"url": "/s", "watch": True}),
        ("run -c x.yaml", {"config": "x.yaml"}),
        ("demo --dir d", {"dir": "d"}),
        ("pull r out --node n --dry-run", {"what": "r", "destination": "out", "url": None, "node": "n", "consolidated": False}),
        ("push d --run a s3://b/c --send weights", {"directory": "d", "url": "s3://b/c", "run": "a", "send": "weights"}),
        ("push d -c x.yaml --exclude a --exclude b", {"url": None, "config": "x.yaml", "exclude": ["a", "b"]}),
        ("service install -c x.yaml --as ann --dry-run", {"config": "x.yaml", "train": "ann", "user": False, "dry_run": True}),
    ],
)
def test_each_command_takes_its_arguments_and_names_a_module_that_runs(words: str, found: dict[str, object]) -> None:
    args = vars(parser().parse_args(words.split()))
    assert {key: args[key] for key in found} == found
    assert args["command"] == f"ckptsync.cli.{words.split(maxsplit=1)[0]}"
    assert callable(importlib.import_module(args["command"]).run)


def test_options_are_not_guessed_from_their_beginnings(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["merge", "a", "b", "--dry"])
    assert "unrecognized arguments: --dry" in capsys.readouterr().err
