"""The Python that trains, and the training's own file."""

import json
import os
import sys
from pathlib import Path

import pytest

from ckptsync.doctor import training_facts
from ckptsync.doctor.training_facts import ask_first, ask_python, find_pythons, read_training
from ckptsync.errors import ConfigError
from tests.doctor.real import environment


def test_the_python_that_trains_is_of_the_active_environment_or_the_first_in_path(
    tmp_path: Path,
) -> None:
    for name in ("venv", "conda", "bin"):
        (tmp_path / name / "bin").mkdir(parents=True)
        (tmp_path / name / "bin/python").touch()
    (tmp_path / "bin/python3").touch(0o755)
    both = {
        "VIRTUAL_ENV": str(tmp_path / "venv"),
        "CONDA_PREFIX": str(tmp_path / "conda"),
        "PATH": str(tmp_path / "bin"),
    }
    assert find_pythons(both) == (str(tmp_path / "venv/bin/python"),)
    assert find_pythons({**both, "VIRTUAL_ENV": "/gone"}) == (str(tmp_path / "conda/bin/python"),)
    assert find_pythons({"PATH": str(tmp_path / "bin")}) == (
        str(tmp_path / "bin/python3"),
        sys.executable,
    )
    assert find_pythons({"PATH": "/nowhere"}) == (sys.executable,)


def test_of_several_the_first_is_asked_that_has_torch(tmp_path: Path) -> None:
    without = environment(tmp_path / "without", {"ray": "2.55.0"})
    having = environment(tmp_path / "having", {"torch": "2.8.0"})
    assert ask_first([without, having], os.environ)["prefix"] == str(tmp_path / "having")
    assert ask_first([without, without], os.environ)["prefix"] == str(tmp_path / "without")


def test_a_python_that_cannot_be_asked_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, odd = tmp_path / "python", tmp_path / "python3"
    old.write_text("#!/bin/sh\necho 'SyntaxError: invalid syntax' >&2; exit 1\n")
    odd.write_text("#!/bin/sh\necho '[]'\n")
    old.chmod(0o755)
    odd.chmod(0o755)
    for python, words in (
        (str(old), "SyntaxError"),
        ("/nowhere/python", "no such file"),
        ("/bin/true", "something else than its facts"),
        (str(odd), "something else than its facts"),
    ):
        with pytest.raises(ConfigError, match=f"(?i){words}"):
            ask_python(python, os.environ)
    odd.write_text("#!/bin/sh\nexec sleep 600\n")
    monkeypatch.setattr(training_facts, "_PATIENCE", 0.5)
    with pytest.raises(ConfigError, match="did not answer within"):
        ask_python(str(odd), os.environ)


def test_what_an_environment_prints_when_it_starts_is_no_answer_and_no_module_here_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "json.py").write_text("raise SystemExit(3)")
    python = environment(tmp_path / "venv", {"torch": "2.8.0"})
    (packages,) = (tmp_path / "venv/lib").glob("python*/site-packages")
    (packages / "banner.pth").write_text("import sys; print('welcome'); print('{}')\n")
    assert ask_python(python, os.environ)["versions"] == {"torch": "2.8.0"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has other users' files")
@pytest.mark.parametrize(
    "theirs", ["bin/python", "pyvenv.cfg", "lib/python3.99/site-packages", "."]
)
def test_root_runs_no_python_that_another_user_may_change(theirs: str, tmp_path: Path) -> None:
    python = tmp_path / "venv/bin/python"
    (tmp_path / "venv/lib/python3.99/site-packages").mkdir(parents=True)
    python.parent.mkdir()
    (tmp_path / "venv/pyvenv.cfg").touch()
    python.write_text(
        f'#!/bin/sh\ntouch {tmp_path}/ran; echo \'{{"versions": {{}}, "output_dirs": {{}}}}\'\n'
    )
    python.chmod(0o755)
    (tmp_path / "venv").chmod(0o777)
    with pytest.raises(ConfigError, match="others may write to /"):
        ask_python(str(python), os.environ)
    (tmp_path / "venv").chmod(0o755)
    for own in ("bin/python", "lib/python3.99/site-packages/x.pth"):
        (tmp_path / "venv" / own).touch()
        (tmp_path / "venv" / own).chmod(0o777)
        with pytest.raises(ConfigError, match=f"others may write to /.*{own}"):
            ask_python(str(python), os.environ)
        (tmp_path / "venv" / own).chmod(0o755)
    os.chown(tmp_path / "venv" / theirs, 65534, 65534)
    with pytest.raises(ConfigError, match="root does not run it") as caught:
        ask_python(str(python), os.environ)
    assert "sudo -u USER" in caught.value.hint
    assert not (tmp_path / "ran").exists()
    os.chown(tmp_path / "venv" / theirs, 0, 0)
    ask_python(str(python), os.environ)
    assert (tmp_path / "ran").exists()


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_of_llama_factorys_file_only_known_keys_are_taken_and_no_secret(tmp_path: Path) -> None:
    known = "output_dir: saves/x\nsave_on_each_node: true\nfinetuning_type: full\n"
    secret = "hub_token: hf_1\nmodel_name_or_path: https://me:s3cret@host/x\n"
    told = read_training(write(tmp_path / "x.yaml", f"{known}{secret}"))
    assert told.pop("save_on_each_node") == "true"
    assert told == {"output_dir": "saves/x", "finetuning_type": "full"}


@pytest.mark.parametrize(
    ("zero", "gathers"),
    [
        ({"stage": 3}, "false"),
        ({"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}, "true"),
        ({"stage": 3, "stage3_gather_fp16_weights_on_model_save": False}, "false"),
    ],
)
def test_the_deepspeed_file_that_it_names_is_read(
    tmp_path: Path, zero: dict[str, object], gathers: str
) -> None:
    write(tmp_path / "ds.json", json.dumps({"zero_optimization": zero}, indent="\t"))
    told = read_training(write(tmp_path / "x.yaml", "deepspeed: ds.json\n"))
    assert told == {"zero_stage": "3", "gather_16bit": gathers}
    assert read_training(tmp_path / "ds.json") == told


def test_accelerates_own_words_are_understood(tmp_path: Path) -> None:
    own = "deepspeed_config:\n  zero_stage: 3\n  zero3_save_16bit_model: false\n"
    told = read_training(write(tmp_path / "a.yaml", f"distributed_type: DEEPSPEED\n{own}"))
    assert told == {"zero_stage": "3", "gather_16bit": "false"}


def test_a_deepspeed_file_that_is_not_there_is_the_trainings_to_say(tmp_path: Path) -> None:
    assert read_training(write(tmp_path / "x.yaml", "deepspeed: gone.json\n")) == {}


@pytest.mark.parametrize("text", ["- a\n", "a: [", "\x00"])
def test_what_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError):
        read_training(write(tmp_path / "x.yaml", text))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_training(tmp_path / "none.yaml")
