import sys
from pathlib import Path

import pytest

from ckptsync.doctor.interpreters import ask, training_python
from ckptsync.errors import ConfigError
from tests.doctor_real import environment


def test_the_python_that_trains_is_the_given_one_or_the_active_one_or_the_first_in_path(tmp_path: Path) -> None:
    for name in ("venv", "conda", "bin"):
        (tmp_path / name / "bin").mkdir(parents=True)
        (tmp_path / name / "bin/python").touch()
    (tmp_path / "bin/python3").touch(0o755)
    both = {"VIRTUAL_ENV": str(tmp_path / "venv"), "CONDA_PREFIX": str(tmp_path / "conda"), "PATH": str(tmp_path / "bin")}
    assert training_python("/given", both) == "/given"
    assert training_python("", both) == str(tmp_path / "venv/bin/python")
    assert training_python("", {**both, "VIRTUAL_ENV": "/gone"}) == str(tmp_path / "conda/bin/python")
    assert training_python("", {"PATH": str(tmp_path / "bin")}) == str(tmp_path / "bin/python3")
    assert training_python("", {"PATH": "/nowhere"}) == sys.executable


def test_another_environment_is_asked_by_its_own_python(tmp_path: Path) -> None:
    told = ask(environment(tmp_path / "venv", {"transformers": "5.15.0", "peft": "0.17.1"}), node="n7")
    assert (told["node"], told["versions"]) == ("n7", {"transformers": "5.15.0", "peft": "0.17.1"})


def test_a_python_that_cannot_be_asked_is_named(tmp_path: Path) -> None:
    old = tmp_path / "python"
    old.write_text("#!/bin/sh\necho 'SyntaxError: invalid syntax' >&2; exit 1\n")
    old.chmod(0o755)
    for python, words in ((str(old), "SyntaxError"), ("/nowhere/python", "no such file"), ("/bin/true", "cannot tell of itself")):
        with pytest.raises(ConfigError, match=f"(?i){words}"):
            ask(python)
