"""Ranks of a training, and what their trainer does, all in one process."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from ckptsync.hooks.hf_saves import TrainerRank, TrainerSaves
from ckptsync.spool.marks import Commit, commit_of

STEPS = 2  # of `tests/hooks/trainer_events.py`, and what it writes in each
FILES = ("model.safetensors", "optimizer.pt", "rng_state.pth", "trainer_state.json")


@pytest.fixture
def other_disk(tmp_path: Path) -> Iterator[Path]:
    """A directory on another file system than the test's own."""
    shared = Path("/dev/shm")
    if not shared.is_dir() or shared.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("no second file system here that anybody may write to")
    with tempfile.TemporaryDirectory(dir=shared, prefix="ckptsync-test-") as folder:
        yield Path(folder)


class Table:
    """Where the ranks leave their words, as the store of a rendezvous does."""

    def __init__(self) -> None:
        self.words: dict[int, str] = {}

    def meet(self, rank: int, world: int, word: str) -> Callable[[], tuple[str, ...] | None]:
        self.words[rank] = word
        return lambda: tuple(self.words[r] for r in range(world)) if len(self.words) == world else None


class Said(list[str]):
    """What a hook had to say."""

    def __call__(self, text: str) -> None:
        self.append(text)


def here(output_dir: Path, rank: int = 0, world: int = 1) -> TrainerRank:
    output_dir.mkdir(parents=True, exist_ok=True)
    return TrainerRank(output_dir, rank, world, has_state=rank == 0, only_model=False, trainer="transformers 5")


def ranks(table: Table, said: Said, *folders: Path) -> list[TrainerSaves]:
    """A rank in each of these output directories."""
    return [TrainerSaves(here(folder, r, len(folders)), {}, said, table.meet) for r, folder in enumerate(folders)]


def write_part(saver: TrainerSaves, step: int, text: str = "", trial: str = "") -> None:
    """A rank's part of a checkpoint: rank 0 has its ``trainer_state.json``."""
    folder = saver.me.output_dir / trial / f"checkpoint-{step}"
    folder.mkdir(exist_ok=True)
    world, rank = saver.me.world, saver.me.rank
    (folder / ("rng_state.pth" if world == 1 else f"rng_state_{rank}.pth")).write_text(f"random {rank} {text}")
    if saver.me.has_state:
        (folder / "model.safetensors").write_text(f"weights {step} {text}")
        (folder / "trainer_state.json").write_text(f'{{"global_step": {step}}}')


def commits(output_dir: Path) -> dict[str, Commit]:
    """Every pin that a hook has made, by its name."""
    found = {path.name: commit_of(path) for path in sorted((output_dir / "_ckptsync" / "pins").glob("[!.]*"))}
    return {name: commit for name, commit in found.items() if commit is not None}


def state(step: int, *, is_search: bool = False) -> SimpleNamespace:
    """The Trainer's state, as far as the hook reads it."""
    return SimpleNamespace(global_step=step, is_hyper_param_search=is_search, trial_params=None)
