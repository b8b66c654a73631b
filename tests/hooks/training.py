"""Ranks of a training, and what their trainer does, all in one process."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckptsync.hooks.trainer_saves import TrainerSaves
from ckptsync.spool.markers import COMMIT, Commit, read_marker

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
        return lambda: (
            tuple(self.words[r] for r in range(world)) if len(self.words) == world else None
        )


class Said(list[str]):
    """What a hook had to say."""

    def __call__(self, text: str) -> None:
        self.append(text)


def trains(
    output_dir: Path,
    rank: int = 0,
    world: int = 1,
    *,
    table: Table | None = None,
    said: Said | None = None,
    only_model: bool = False,
) -> TrainerSaves:
    """One rank of a training that begins."""
    output_dir.mkdir(parents=True, exist_ok=True)
    return TrainerSaves(
        output_dir,
        rank,
        world,
        trainer="transformers 5",
        facts={},
        log=Said() if said is None else said,
        only_model=only_model,
        exchange=(table or Table()).meet,
    )


def ranks(*folders: Path, said: Said | None = None) -> list[TrainerSaves]:
    """A rank in each of these output directories."""
    table = Table()
    return [
        trains(folder, r, len(folders), table=table, said=said) for r, folder in enumerate(folders)
    ]


def write_part(saver: TrainerSaves, step: int, text: str = "") -> None:
    """A rank's part of a checkpoint: rank 0 has its ``trainer_state.json``."""
    folder = saver.output_dir / f"checkpoint-{step}"
    folder.mkdir(exist_ok=True)
    world, rank = saver.begun.world, saver.begun.rank
    (folder / ("rng_state.pth" if world == 1 else f"rng_state_{rank}.pth")).write_text(
        f"random {rank} {text}"
    )
    if rank == 0:
        (folder / "model.safetensors").write_text(f"weights {step} {text}")
        (folder / "trainer_state.json").write_text(f'{{"global_step": {step}}}')


def save(*savers: TrainerSaves, step: int) -> None:
    """Each rank writes its part, and its ``on_save`` comes."""
    for saver in savers:
        write_part(saver, step)
        saver.remember(step)


def commits(output_dir: Path) -> dict[str, Commit]:
    """Every pin that a hook has made, by its name."""
    found = {
        path.name: read_marker(path / COMMIT, Commit)
        for path in sorted((output_dir / "_ckptsync" / "pins").glob("[!.]*"))
    }
    return {name: commit for name, commit in found.items() if commit is not None}
