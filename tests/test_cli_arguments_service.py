"""What ``service`` takes."""

import pytest

from ckptsync.cli.arguments import parser


@pytest.mark.parametrize(
    ("words", "module", "found"),
    [
        ("install -c x.yaml --as ann --dry-run", "service", {"config": "x.yaml", "train": "ann", "user": False, "dry_run": True}),
        ("install --user", "service", {"config": None, "train": None, "user": True, "dry_run": False}),
        ("uninstall --head", "uninstall", {"head": True, "train": None, "user": False, "dry_run": False}),
    ],
)
def test_each_action_takes_its_arguments_and_names_its_module(words: str, module: str, found: dict[str, object]) -> None:
    args = vars(parser().parse_args(["service", *words.split()]))
    assert {key: args[key] for key in found} == found
    assert args["command"] == f"ckptsync.cli.{module}"


def test_an_action_must_be_named() -> None:
    for command in ("service", "hook"):
        with pytest.raises(SystemExit):
            parser().parse_args([command])
