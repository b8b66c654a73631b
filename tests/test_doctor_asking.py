"""Who asks about a path, and what is told of it."""

import errno
import os
import pwd
from pathlib import Path

from ckptsync.doctor.asking import Asked, fail, is_directory, user, warn, words


def test_a_fault_of_a_path_names_the_node_and_the_path() -> None:
    one = fail("kind", Asked("n0", 0), Path("/out"), "what", "why", "hint", code=4)
    assert (one.level, one.where, one.why, one.exit_code) == ("fail", "n0: /out", "why", 4)
    assert warn("kind", Asked("n0", 0), Path("/out"), "what", "why", "hint").level == "warn"


def test_a_user_without_a_name_is_a_number() -> None:
    assert user(os.geteuid()) == pwd.getpwuid(os.geteuid()).pw_name
    assert user(4_000_123_456) == "uid 4000123456"


def test_errors_are_told_in_the_systems_own_words() -> None:
    assert words(OSError(errno.EACCES, "Permission denied")) == "permission denied"
    assert words(OSError("odd")) == "odd"


def test_what_cannot_be_a_directory_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert is_directory(tmp_path)
    assert not is_directory(tmp_path / "file" / "x")
    assert not is_directory(tmp_path / ("x" * 300)), "the system refuses to look"
