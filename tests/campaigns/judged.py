"""What a store and the disks hold of a real training, beside the same one that nobody disturbs.

Trainings on a CPU are the same to the last bit, so every file that tells no time or identity must
be the same, too.  The undisturbed training keeps every checkpoint.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ckptsync.catalogue.uncached import read_state
from ckptsync.errors import CkptsyncError
from ckptsync.layouts.file_names import is_beside_weights
from ckptsync.merger.plan import MergeOptions
from ckptsync.records.location_status import LocationState
from ckptsync.stores.contract import Store, read_all
from tests.support.files_in_memory import file_paths
from tests.support.merge_on_disk import merge_local
from tests.support.vector import bits

FINAL = "final"
STATE = "trainer_state.json"
OTHERS = (".metadata", "training_args.bin", "trainer_log.jsonl", "train_results.json",
    "all_results.json", "README.md")  # fmt: skip
"""Files that tell a time, or name a directory or a save."""


def is_weights(path: str) -> bool:
    """Return whether a file holds weights, as a final model must."""
    return path.endswith(".safetensors")


def truths(outs: Sequence[Path], is_final: Callable[[str], bool]) -> dict[str, dict[str, Path]]:
    """Return the files of each location, by its name, out of a training's directories on all nodes.

    ``is_final``: whether the final model needs a file beside the checkpoints; it is the first
    node's.
    """
    locations: dict[str, dict[str, Path]] = {}
    for out in outs:
        for path in sorted([*out.glob("checkpoint-*"), *out.glob("global_step*")]):
            locations.setdefault(path.name, {}).update(file_paths(path))
    final = {n: p for n, p in file_paths(outs[0]).items() if n.split("/")[0] not in locations}
    if any(map(is_final, final)):
        locations[FINAL] = final
    return locations


def locations(store: Store, run: str) -> dict[str, LocationState]:
    """Return what a store holds of a run, by location."""
    return {s.location: s for s in read_state(store, run).readable}


def missing(
    states: Mapping[str, LocationState], nodes: Mapping[str, Collection[str]]
) -> Iterator[str]:
    """Yield the locations that lack a manifest of one of their nodes."""
    for name in sorted(nodes):
        manifests = states[name].manifests if name in states else ()
        absent = set(nodes[name]) - {stored.manifest.node for stored in manifests}
        if absent:
            yield f"{name}: not in the store of {', '.join(sorted(absent))}"


def differences(
    store: Store,
    state: LocationState,
    written: Mapping[str, Path],
    *,
    is_needed: Callable[[str], bool] = lambda _: True,
    is_same: Callable[[str, bytes, bytes], bool] = lambda _, stored, own: stored == own,
) -> Iterator[tuple[str, str]]:
    """Compare a location with the files that were written; yield each path that differs, and how.

    ``is_same``: of a path, and of its stored and its written bytes.
    """
    for path in sorted(written.keys() - state.files.keys()):
        if is_needed(path):
            yield path, "not in the store"
    for path in sorted(state.files.keys() - written.keys()):
        if not is_beside_weights(path):  # a worker adds what describes the model
            yield path, "nobody wrote that"
    for path in sorted(state.files.keys() & written.keys()):
        own = written[path].read_bytes()
        if not all(is_same(path, read_all(store, at.name), own) for at in state.files[path]):
            yield path, "not the bytes that the trainer wrote"


def is_same(path: str, ours: bytes, reference: bytes) -> bool:
    """Return whether two files are the same but for what tells a time."""
    name = path.rpartition("/")[2]
    if name == STATE:
        return _history(ours) == _history(reference)
    return ours == reference or (name in OTHERS and bool(ours))


def _history(state: bytes) -> object:
    document: dict[str, Any] = json.loads(state)
    kept = ("step", "loss", "grad_norm", "learning_rate")
    steps = [{key: entry[key] for key in kept if key in entry} for entry in document["log_history"]]
    return document["global_step"], document["max_steps"], steps


def in_store(
    store: Store,
    run: str,
    reference: Mapping[str, Mapping[str, Path]],
    is_final: Callable[[str], bool],
) -> Iterator[str]:
    """Yield what of a run that ended is not in the store, or not as the reference has it."""
    states = locations(store, run)
    for name in sorted(reference.keys() ^ states.keys()):
        yield f"{name}: {'nobody wrote that' if name in states else 'not in the store'}"
    for name in sorted(reference.keys() & states.keys()):
        is_needed = is_final if name == FINAL else lambda _: True
        wrong = differences(
            store, states[name], reference[name], is_needed=is_needed, is_same=is_same
        )
        yield from (f"{name}/{path}: {how}" for path, how in wrong)


def on_disk(
    outs: Sequence[Path], references: Sequence[Path], rotated: Collection[str]
) -> Iterator[str]:
    """Yield what all nodes have, and is not what is left where nobody hooks in.

    ``rotated``: checkpoints that the training deletes and its reference keeps.
    """

    def left(directories: Sequence[Path]) -> dict[str, Path]:
        return {
            name: path
            for directory in directories
            for name, path in file_paths(directory).items()
            if "_ckptsync" not in name.split("/") and name.partition("/")[0] not in rotated
        }

    ours, theirs = left(outs), left(references)
    for path in sorted(ours.keys() ^ theirs.keys()):
        yield f"{path}: {'not on the disk' if path in theirs else 'only there with us'}"
    for path in sorted(ours.keys() & theirs.keys()):
        if not is_same(path, ours[path].read_bytes(), theirs[path].read_bytes()):
            yield f"{path}: on the disk it is another one than without us"


def merged_otherwise(
    store: Store, state: LocationState, directory: Path, model: Path, base: Path
) -> str:
    """Merge what a store holds of a location; return what is wrong with the model, if anything.

    ``model``: the weights as the framework gathered them; without them nothing is judged.
    ``base``: where the configuration comes from if the location has none.
    """
    if not model.is_file():
        return ""
    shutil.rmtree(directory, ignore_errors=True)
    for path, (first, *_) in state.files.items():
        copy = directory / "stored" / path
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(read_all(store, first.name))
        # a merge asks which file was written before which
        os.utime(copy, ns=(first.entry.mtime, first.entry.mtime))
    config = None if "config.json" in state.files else base
    try:
        merge_local([directory / "stored"], directory / "merged", MergeOptions(), config)
    except CkptsyncError as e:
        return f"cannot be merged: {e}"
    is_equal = bits(*(directory / "merged").glob("*.safetensors")) == bits(model)
    return "" if is_equal else "merged, it has not the weights that the trainer held"
