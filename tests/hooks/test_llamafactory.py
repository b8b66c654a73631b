from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.hooks.training import commits
from tests.support.stand_in_programs import PINS, ROOT, STAND_IN, ran

MODULE = ("-m", "ckptsync.hooks.llamafactory")


def train(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    (folder / "x.yaml").write_text(f"stage: sft\noutput_dir: {folder}/out\n")
    told: Any = variables
    return ran(*MODULE, *words, "train", f"{folder}/x.yaml", "stage=rm", **told)


def test_one_process_trains_with_the_hook(tmp_path: Path) -> None:
    done = train(tmp_path)
    assert (done.returncode, done.stdout) == (0, f"trained with rm {tmp_path}/out\n"), done.stderr
    assert done.stderr.count("ckptsync: hook active: ") == 1
    assert set(commits(tmp_path / "out")) == PINS


def test_each_rank_that_llamafactory_starts_trains_with_the_hook(tmp_path: Path) -> None:
    # the directory in which one trains may have modules of any name, and so has the launcher's own
    (tmp_path / "transformers.py").write_text("raise ImportError('a file of the user')")
    done = train(tmp_path, FORCE_TORCHRUN="1")
    assert done.returncode == 0, done.stderr
    assert [set(commits(tmp_path / f"out{rank}")) for rank in (0, 1)] == [PINS, PINS]


def test_so_does_each_rank_of_a_launcher_of_ones_own(tmp_path: Path) -> None:
    told = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}
    done = train(tmp_path, "--local_rank=1", **told)
    assert (done.returncode, done.stdout) == (0, f"trained with rm {tmp_path}/out\n"), done.stderr
    assert set(commits(tmp_path / "out1")) == PINS


def test_with_autoload_beside_it_the_hook_is_there_once(tmp_path: Path) -> None:
    autoload = "from ckptsync.hooks.autoload import begin; begin()\n"
    (tmp_path / "sitecustomize.py").write_text(autoload)
    (tmp_path / "x.yaml").write_text(f"output_dir: {tmp_path}/out\n")
    path = (tmp_path, STAND_IN, ROOT)
    done = ran(*MODULE, "train", f"{tmp_path}/x.yaml", path=path, CKPTSYNC_AUTOLOAD="1")
    assert (done.returncode, done.stderr.count("ckptsync: hook active: ")) == (0, 1), done.stderr
    assert len(list((tmp_path / "out" / "_ckptsync" / "trains").iterdir())) == 1


def test_v1_is_refused_since_it_tells_nobody_of_its_saves(tmp_path: Path) -> None:
    done = train(tmp_path, USE_V1="1")
    assert (done.returncode, done.stdout) == (5, "")
    assert "USE_V1=1" in done.stderr
    assert not (tmp_path / "out").exists()


def test_an_environment_without_llamafactory_is_refused() -> None:
    if importlib.util.find_spec("llamafactory") is not None:
        pytest.skip("it is installed")
    done = ran(*MODULE, "train", "x.yaml", path=(ROOT,))
    assert (done.returncode, done.stdout) == (2, "")
    assert "LLaMA-Factory is not installed" in done.stderr
