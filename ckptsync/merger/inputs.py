"""Open what the user named, check that it is one save, and plan its merge.  Nothing is written.

Several directories or URLs may hold one save, one a node, and a mixture of two saves would load
without an error.  So names, metadata, files that several of them have, and times are compared:
one model is never made of two saves.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ckptsync.errors import ConfigError, Corrupt, Incomplete, Unsupported
from ckptsync.layouts import registry
from ckptsync.layouts.file_names import BESIDE_WEIGHTS, metadata_files
from ckptsync.layouts.registry import WeightsSource, deepspeed_tags
from ckptsync.merger.file_times import check_times, notes_on_times
from ckptsync.merger.joined_files import FILL, JoinedFiles
from ckptsync.merger.model_files import DAMAGED, parse_file
from ckptsync.merger.plan import MergeOptions
from ckptsync.merger.prepare import MergeJob, prepare
from ckptsync.merger.readers import open_reader
from ckptsync.stores import path_or_url
from ckptsync.stores.checkpoint_files import FileTree, Overlay, TopFiles
from ckptsync.stores.opening import Access
from ckptsync.stores.path_or_url import PathOrUrl
from ckptsync.stores.stream import stored_digest
from ckptsync.stores.urls import Remote
from ckptsync.tensors import Extent, Files, read

# Directories whose parent is the checkpoint, or the run: configuration and tokenizer may lie there.
_INNER = re.compile(
    r"(checkpoint|step|epoch|iter|global_step|pytorch_model|pytorch_model_fsdp)([-_]?[0-9]+)*|checkpoints"
)
_STEP = re.compile(r"(?:checkpoint|step|global_step|iter|epoch)[-_]?([0-9]+)")
_LARGE_JSON = 1 << 20
MOST_THREADS = 8  # more than a disk takes in
FAR_THREADS = 4
_OPTIONS = {"base": "--base", "fill_from": "--fill-from", "names_of": "--names-of"}


@dataclass(frozen=True, slots=True)
class MergeRequest:
    """What the user wants merged: ``sources`` are of one checkpoint, one a node.

    ``base`` is compared with the model.  ``fill_from``: the model whose tensors stand for those
    that the checkpoint does not hold; ``names_of``: that under whose names all is written.
    ``into``: the sources are adapters, which are summed into this model; ``is_changed_base``: an
    initialisation such as PiSSA has left that for the training.
    """

    sources: Sequence[PathOrUrl]
    destination: PathOrUrl
    options: MergeOptions
    config_from: PathOrUrl | None = None
    base: PathOrUrl | None = None
    fill_from: PathOrUrl | None = None
    names_of: PathOrUrl | None = None
    into: PathOrUrl | None = None
    is_changed_base: bool = False


@dataclass(frozen=True, slots=True)
class PreparedMerge:
    """A merge that can be done.  ``files`` are those of all ``trees``, one tree a source.

    ``fill``: the directory of this machine that it is filled from.
    """

    request: MergeRequest
    job: MergeJob
    files: Files
    trees: tuple[FileTree, ...]
    fill: tuple[TopFiles, ...] = ()


def open_sources(
    request: MergeRequest,
    access: Access,
    *,
    use_times: bool = True,
    planner: Callable[[Files], MergeJob] | None = None,
) -> PreparedMerge:
    """Open the checkpoint and the models that the request names, and return the planned merge.

    Files that several sources have are read whole, to compare them.

    Args:
        request: What the user wants merged.
        access: How stores are opened.
        use_times: Compare the times of files.
        planner: Plans, from the checkpoint's files, something else than a merge into one model.

    Raises:
        ConfigError: A path is wrong.
        Incomplete: A part of the save is missing, or is being overwritten.
        Corrupt: Files are damaged, or of several saves.
        Unsupported: ckptsync does not know the format, or the user must choose a source.
        StoreError: A store cannot be read.

    """
    _check_paths(request)
    trees = tuple(path_or_url.list_tree(source, access) for source in request.sources)
    overlay = Overlay(trees)
    files = open_reader(overlay, trees)
    config_from = (
        path_or_url.top_files(request.config_from, access) if request.config_from else None
    )
    config: list[tuple[str, Files]] = []
    if request.config_from and config_from:
        config.append((show_path(request.config_from), config_from))
    # the checkpoint around an inner directory of shards, and the run around it
    for source in request.sources:
        path = path_or_url.without_links(source)
        while _INNER.fullmatch(path_or_url.pure_path(path).name) and (
            above := path_or_url.parent(path)
        ):
            path = above
            config.append((show_path(path), path_or_url.nearby_files(path, access, BESIDE_WEIGHTS)))
    models = _open_models(request, access)
    base, fill_from, names_of = (models.get(key) for key in (*_OPTIONS,))
    if planner:
        job = planner(files)
    else:
        job = prepare(
            files,
            request.options,
            [holder for _, holder in config],
            base,
            config_from,
            fill_from=fill_from,
            names_of=names_of,
        )
    named_models = {show_path(getattr(request, key)): holder for key, holder in models.items()}
    config += named_models.items()
    notes = list(job.notes)
    for label, holder in config:
        if names := [name for name, found_in in job.beside if found_in is holder]:
            notes.append(f"from {label}: {', '.join(names)}")
    notes += _notes_on_tags(request.sources, files, job.source)
    notes += notes_on_times({tree.root: tree.written() for tree in trees}, job.reads)
    for name in sorted(job.reads):
        _check_same(overlay.duplicates(name), name)
    check_one_save(trees, job, use_times=use_times)
    for name, holder in job.beside:
        _check_json(holder, name)
    reader = JoinedFiles(files, {FILL: fill_from}) if fill_from else files
    fill = (fill_from,) if isinstance(fill_from, TopFiles) else ()
    return PreparedMerge(request, replace(job, notes=tuple(notes)), reader, trees, fill)


def usual_threads(places: Iterable[PathOrUrl]) -> int:
    """Return how many threads a merge of these sources has by default.

    One for each core that this process may use, at most `MOST_THREADS`; `FAR_THREADS` if a source
    is a URL.
    """
    if any(isinstance(place, Remote) for place in places):
        return FAR_THREADS
    return min(MOST_THREADS, len(os.sched_getaffinity(0)))


def _open_models(request: MergeRequest, access: Access) -> dict[str, Files]:
    """Return the models that the request names, by the names of its fields.

    A directory that several fields name is opened once.  Raises ConfigError, StoreError, and
    Unsupported if a directory holds no weights.
    """
    opened: dict[PathOrUrl, Files] = {}
    models: dict[str, Files] = {}
    for key, option in _OPTIONS.items():
        place: PathOrUrl | None = getattr(request, key)
        if place is None:
            continue
        if place not in opened:
            opened[place] = path_or_url.top_files(place, access)
        models[key] = files = opened[place]
        if not registry.sources(files):
            raise Unsupported(
                f"{option} {show_path(place)}: no weights among its {len(files.sizes())} files",
                hint="give the directory of the model that was trained, with model*.safetensors",
            )
    return models


def _check_paths(request: MergeRequest) -> None:
    """Raise ConfigError if the destination lies in a source, or sources' names are of two steps."""
    destination = path_or_url.without_links(request.destination)
    steps: dict[str, str] = {}
    for source in request.sources:
        path = path_or_url.without_links(source)
        if path_or_url.is_inside(destination, path):
            raise ConfigError(
                f"{show_path(request.destination)}: inside the checkpoint {show_path(source)}",
                hint="ckptsync never writes to a trainer's directory: name one beside it",
            )
        if match := _STEP.fullmatch(path_or_url.pure_path(path).name):
            steps.setdefault(match[1].lstrip("0"), str(path_or_url.pure_path(path)))
    if len(steps) > 1:  # checkpoint-400 beside checkpoint-500
        raise ConfigError(
            f"{' and '.join(list(steps.values())[:2])}: two steps of a training",
            hint="give the directories of one step, one a node",
        )


def _notes_on_tags(sources: Sequence[PathOrUrl], files: Files, chosen: str) -> Iterator[str]:
    """Yield notes if DeepSpeed's tag is of another step than its directory, or not the only one.

    ``chosen``: the source that is read.
    """
    source = WeightsSource.named(chosen.partition("@")[0])
    root, unread_tags = deepspeed_tags(files, source)
    home, _, tag = root.rpartition("/")
    step = _STEP.fullmatch(tag)
    for name in {
        home or path_or_url.pure_path(path_or_url.without_links(source)).name for source in sources
    }:
        directory_step = _STEP.fullmatch(name.rpartition("/")[2])
        if step and directory_step and int(step[1]) != int(directory_step[1]):
            yield f"`latest` in {name} names {tag}, which is of another step"
    if unread_tags:
        yield f"DeepSpeed's {', '.join(unread_tags)} is there, too, and is left out"


def show_path(path: PathOrUrl) -> str:
    """Return a path or URL as messages name it."""
    return path.url if isinstance(path, Remote) else str(path)


def check_one_save(sources: Sequence[FileTree], job: MergeJob, *, use_times: bool = True) -> None:
    """Raise Incomplete or Corrupt if files beside the shards show that they are not of one save.

    Of a ``dcp`` source the metadata of all ``sources`` are read and must be equal, and none may
    have a ``.metadata.tmp``, with which torch begins another save.  ``use_times``: `check_times`.
    """
    if job.source.partition(":")[0] == "dcp":
        folders = {name.rpartition("/")[0] for name in job.reads}
        names = {
            n
            for tree in sources
            for folder in folders
            for n in metadata_files(tree.sizes(), folder)
        }
        for name in sorted(names):
            holders = [tree for tree in sources if name in tree.sizes()]
            _check_same(holders, name)
            for holder in holders:
                if holder.holds(f"{name}.tmp"):
                    raise Incomplete(
                        f"{holder.root}/{name}.tmp: a newer save overwrites this checkpoint and"
                        " is not finished",
                        hint=(
                            "wait for it; if it was killed, its shards lie over those of the older"
                            " save: use another checkpoint"
                        ),
                    )
    for tree in sources if use_times else ():
        check_times(tree.written(), tree.sizes(), job.reads)


def check_unchanged(sources: Sequence[FileTree | TopFiles]) -> None:
    """Raise Incomplete if a file was written to, replaced or deleted since it was opened."""
    changed = [f"{tree.root}/{name}" for tree in sources for name in tree.changed()]
    if changed:
        raise Incomplete(
            f"{changed[0]}: changed while it was read",
            hint="the checkpoint is still being written: merge again when it is finished",
        )


def _check_same(holders: Sequence[Files], name: str) -> None:
    """Read a file that several nodes have; raise Corrupt if it is not the same on all of them."""
    if (
        len(holders) > 1
        and len({stored_digest(holder, name, holder.sizes()[name]) for holder in holders}) > 1
    ):
        raise Corrupt(
            f"{name}: differs between the directories given",
            hint="they hold different saves: give only those of one save",
        )


def _check_json(holder: Files, name: str) -> None:
    """Raise Corrupt if a file whose name ends in ``.json`` is damaged.

    Of one of more than `_LARGE_JSON` bytes only the end is read.
    """
    if not name.endswith(".json"):
        return
    size = holder.sizes()[name]
    if size <= _LARGE_JSON:
        parse_file(name, read(holder, Extent(name, 0, size)))
    elif not read(holder, Extent(name, size - 64, 64)).rstrip().endswith((b"}", b"]")):
        raise Corrupt(f"{name}: not JSON: no end", hint=DAMAGED)
