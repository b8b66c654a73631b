"""The words of ``verify``."""

import pytest

from ckptsync.cli.arguments import parser


def test_all_of_its_options_are_read() -> None:
    said = ["verify", "a", "b", "--level", "model", "--sample", "10%", "--baseline", "f", "--record", "g", "--json"]
    args = parser().parse_args(said)
    assert (args.targets, args.level, args.sample) == (["a", "b"], "model", "10%")
    assert (args.baseline, args.record, args.json) == ("f", "g", True)


def test_a_level_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["verify", "a", "--level", "deep"])
    assert "model" in capsys.readouterr().err


def test_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["verify", "--help"])
    assert "such as 10%," in capsys.readouterr().out
