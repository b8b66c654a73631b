import os
import shutil
import sys
from pathlib import Path

import pytest

from ckptsync.doctor.interpreters import ask, ask_one, candidates
from ckptsync.errors import ConfigError
from tests.doctor_real import environment, open_to_all


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


@pytest.mark.parametrize("theirs", ["bin/python", "pyvenv.cfg", "lib/python3.99/site-packages", "."])
@pytest.mark.skipif(os.geteuid() != 0, reason="only root asks for others")
def test_root_lets_another_users_python_be_asked_by_that_user_without_its_own_secrets(theirs: str, tmp_path: Path) -> None:
    python, said = tmp_path / "venv/bin/python", tmp_path / "said"
    (tmp_path / "venv/lib/python3.99/site-packages").mkdir(parents=True)
    python.parent.mkdir()
    (tmp_path / "venv/pyvenv.cfg").touch()
    said.mkdir(0o777)
    said.chmod(0o777)
    python.write_text(f'#!/bin/sh\nid -u > {said}/uid; env > {said}/env; echo \'{{"versions": {{}}, "places": {{}}}}\'\n')
    python.chmod(0o755)
    open_to_all(tmp_path / "any")
    environment = {"PATH": os.environ["PATH"], "AWS_SECRET_ACCESS_KEY": "s3cr3t", "NCCL_DEBUG": "INFO"}
    ask(str(python), environment)
    assert (said / "uid").read_text() == "0\n"
    shutil.rmtree(said)
    said.mkdir(0o777)
    said.chmod(0o777)
    os.chown(tmp_path / "venv" / theirs, 65534, 65534)
    ask(str(python), environment)
    assert (said / "uid").read_text() == "65534\n"
    assert "s3cr3t" not in (said / "env").read_text()
    assert "NCCL_DEBUG=INFO" in (said / "env").read_text()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root asks for others")
def test_root_asks_no_python_that_anybody_or_several_users_may_change(tmp_path: Path) -> None:
    python = Path(environment(tmp_path / "venv", {"torch": "2.8.0"}))
    (tmp_path / "venv").chmod(0o777)
    with pytest.raises(ConfigError, match="others may write to /"):
        ask(str(python))
    (tmp_path / "venv").chmod(0o755)
    os.chown(tmp_path / "venv", 12345, 12345)
    os.chown(tmp_path / "venv/pyvenv.cfg", 65534, 65534)
    with pytest.raises(ConfigError, match="asked by root, and /"):
        ask(str(python))


def test_an_answer_that_is_none_is_said(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho '[]'\n")
    python.chmod(0o755)
    with pytest.raises(ConfigError, match="its answer is none"):
        ask(str(python))
