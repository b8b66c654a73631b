import sys
from pathlib import Path

import pytest

from ckptsync.doctor.interpreters import ask, ask_one, candidates
from ckptsync.errors import ConfigError
from tests.doctor_real import environment


def test_the_python_that_trains_is_of_the_active_environment_or_the_first_in_path(tmp_path: Path) -> None:
    for name in ("venv", "conda", "bin"):
        (tmp_path / name / "bin").mkdir(parents=True)
        (tmp_path / name / "bin/python").touch()
    (tmp_path / "bin/python3").touch(0o755)
    both = {"VIRTUAL_ENV": str(tmp_path / "venv"), "CONDA_PREFIX": str(tmp_path / "conda"), "PATH": str(tmp_path / "bin")}
    assert candidates(both) == (str(tmp_path / "venv/bin/python"),)
    assert candidates({**both, "VIRTUAL_ENV": "/gone"}) == (str(tmp_path / "conda/bin/python"),)
    assert candidates({"PATH": str(tmp_path / "bin")}) == (str(tmp_path / "bin/python3"), sys.executable)
    assert candidates({"PATH": "/nowhere"}) == (sys.executable,)


def test_of_several_the_first_is_asked_that_has_torch(tmp_path: Path) -> None:
    without = environment(tmp_path / "without", {"ray": "2.55.0"})
    having = environment(tmp_path / "having", {"torch": "2.8.0"})
    assert ask_one([without, having])["prefix"] == str(tmp_path / "having")
    assert ask_one([without, without])["prefix"] == str(tmp_path / "without")


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


def test_what_an_environment_prints_when_it_starts_is_no_answer(tmp_path: Path) -> None:
    python = environment(tmp_path / "venv", {"torch": "2.8.0"})
    (packages,) = (tmp_path / "venv/lib").glob("python*/site-packages")
    (packages / "banner.pth").write_text("import sys; print('welcome'); print('{}')\n")
    assert ask(python)["versions"] == {"torch": "2.8.0"}
