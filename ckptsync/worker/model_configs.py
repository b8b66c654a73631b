"""Finds the configuration and the tokenizer of a model that its checkpoint does not have.

A sharded save often holds weights alone, and nobody can load those.  This looks in the run's
directory, then in the local directory of the model that `adapter_config.json`, `config.json`,
`training_args.bin` or the hook names.  No link is followed, and nothing is fetched from a network.
The files are sent like the checkpoint's own; for a save that is stored already,
`send_missing_config` sends them later.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from ckptsync.checkpoint_dirs import FINAL, NESTED, CheckpointDir
from ckptsync.errors import CkptsyncError, Corrupt, Unsupported
from ckptsync.layouts import registry
from ckptsync.layouts.file_names import BESIDE_WEIGHTS, is_beside_weights, ranks
from ckptsync.plain_json import parse
from ckptsync.records import manifest_groups
from ckptsync.spool.markers import list_training_processes
from ckptsync.tensors import Demands, Extent, read, read_whole
from ckptsync.walk import SPOOL, walk
from ckptsync.worker.file_selection import Selection, select
from ckptsync.worker.local_save import LocalFile, LocalFiles, LocalSave, undigested_entry
from ckptsync.worker.upload import UploadContext, upload

YOUNG = 2.0  # seconds: whoever writes a configuration or a tokenizer may still be at it
_MOST = 64 << 20  # bytes of one file
_LARGE = 1 << 20  # bytes of JSON: a worker beside a training parses no more
_ARGUMENTS = "training_args.bin"
_NAMED_IN = ("adapter_config.json", "config.json", _ARGUMENTS)
_NAMING_KEYS = (
    "base_model_name_or_path",
    "model_name_or_path",
    "pretrained_model_name_or_path",
    "model_path",
    "_name_or_path",
)


@dataclass(frozen=True, slots=True)
class _Kind:
    """Files that belong together: all are of one directory.

    A directory has them if it has one of ``marks``. That file must have one of ``keys``, if there
    are any: scripts call a configuration of their own `config.json`, too. ``own``: names by which a
    checkpoint has files of this kind itself.
    """

    names: tuple[str, ...]
    marks: tuple[str, ...]
    own: tuple[str, ...]
    keys: tuple[str, ...] = ()


_CONFIG = _Kind(
    ("config.json", "generation_config.json"),
    ("config.json",),
    ("config.json",),
    ("model_type", "architectures"),
)
_ADAPTER = _Kind(
    ("adapter_config.json",), ("adapter_config.json",), ("adapter_config.json",), ("peft_type",)
)
_OF_PROCESSING = tuple(
    n
    for n in BESIDE_WEIGHTS
    if n not in (*_CONFIG.names, *_ADAPTER.names, "quantization_config.json")
)
_PROCESSING = _Kind(
    _OF_PROCESSING,
    (
        "tokenizer_config.json",
        "tokenizer.json",
        "processor_config.json",
        "preprocessor_config.json",
    ),
    _OF_PROCESSING,
)


def outgoing_save(
    local_save: LocalSave,
    selection: Selection,
    find_configs: Callable[[LocalFiles], Mapping[str, LocalFile]] | None = None,
) -> LocalSave:
    """Return the save with the files that open its model, and without those not sent by choice.

    Those files were added by the hook, or lie around the checkpoint: all of them, or what
    ``find_configs`` returns.  If ``selection`` may leave out files, the save's metadata is read,
    which raises Incomplete if it changes meanwhile, and StoreError.
    """
    files = local_save.files
    if local_save.pin is not None and local_save.pin.is_committed:
        files = files.with_added(
            local_save.pin.added_root,
            (s for s in local_save.pin.added if is_beside_weights(s.path.rpartition("/")[2])),
        )
    configs = (
        find_configs(files)
        if find_configs
        else find_model_configs(files, local_save.checkpoint_dir)
    )
    files = replace(files, by_path={**configs, **files.by_path})
    if not selection.is_everything:
        try:
            demands = registry.demands(files)
        except (Corrupt, Unsupported):
            # the draft of the manifest has a note of it; what names alone allow is sent
            demands = Demands()
        files = files.only(select(files.by_path, selection, demands))
    return replace(local_save, files=files)


def configs_to_send(
    files: LocalFiles,
    checkpoint_dir: CheckpointDir,
    node: str,
    manifests: Iterable[manifest_groups.StoredManifest],
) -> Mapping[str, LocalFile]:
    """Return the configuration and tokenizer files that may be sent with their checkpoint.

    Empty if rank 0 is on another node, which knows the checkpoint's own.  Empty, too, if a
    manifest of this node names one of the files with another size or time: that would make another
    save, so `send_missing_config` sends them.
    """
    ranks_here = ranks(files.by_path)
    configs = find_model_configs(files, checkpoint_dir) if not ranks_here or 0 in ranks_here else {}
    own_entries = (
        f
        for stored in manifest_groups.live_manifests(manifests)
        if stored.manifest.node == node
        for f in stored.manifest.files
        if f.path in configs
    )
    has_others_bytes = any(
        (f.size, f.mtime) != (configs[f.path].stat.size, configs[f.path].stat.mtime)
        for f in own_entries
    )
    return {} if has_others_bytes else configs


def send_missing_config(
    local_save: LocalSave,
    location: str,
    context: UploadContext,
    manifests: Sequence[manifest_groups.StoredManifest],
    *,
    young: float = YOUNG,
) -> tuple[str, ...]:
    """Send the configuration of a stored save in a further manifest, if the location has none.

    Return the paths sent; () if none is lacking, found or selected, or if this node has no manifest
    there.  Nothing is sent while the save is incomplete, since another node may still send its own,
    nor while a file is younger than ``young`` seconds.  ``manifests``: all of the checkpoint's
    name.  Raises as `upload` does.
    """
    manifests_there = manifest_groups.manifests_in(location, manifests)
    own_manifests = [m for m in manifests_there if m.node == context.node]
    named_paths = {f.path for m in manifests_there for f in m.files}
    configs = (
        drop_young(
            find_model_configs(local_save.files, local_save.checkpoint_dir, named_paths), young
        )
        if own_manifests
        else {}
    )
    if not configs:
        return ()
    demands = manifest_groups.merge_demands(manifests_there)
    if not demands.model or not demands.model.keys() <= named_paths:
        return ()
    configs = {name: configs[name] for name in select(configs, context.view.selection, demands)}
    if not configs:
        return ()
    files = {f.path: f for m in own_manifests for f in m.files} | {
        name: undigested_entry(file.stat) for name, file in configs.items()
    }
    draft = replace(
        own_manifests[-1],
        files=tuple(files[path] for path in sorted(files)),
        started=min(m.started for m in own_manifests),
        ended=max(m.ended for m in own_manifests),
        supersedes=(),
    )
    result = upload(
        draft, replace(local_save.files, by_path={**local_save.files.by_path, **configs}), context
    )
    return () if result.stored_before else tuple(sorted(configs))


def drop_young(configs: Mapping[str, LocalFile], young: float = YOUNG) -> Mapping[str, LocalFile]:
    """Return ``configs``, or {} if one file's mtime is less than ``young`` seconds from now."""
    now = time.time()
    return (
        {}
        if any(abs(now - file.stat.mtime / 1e9) < young for file in configs.values())
        else configs
    )


def find_model_configs(
    files: LocalFiles, checkpoint_dir: CheckpointDir, stored: Iterable[str] = ()
) -> dict[str, LocalFile]:
    """Return the files, by name, that a checkpoint lacks and that lie around it on this node.

    They are from the run's directory, else from the directory of the model that the training began
    with; for the final model from the latter only.  Nothing is added of a kind that the checkpoint
    has, at whatever depth, nor under a name that it has.  ``stored``: paths of it that are in the
    store.
    """
    names = {path.rpartition("/")[2] for path in (*files.by_path, *stored)}
    lacking = [kind for kind in (_CONFIG, _ADAPTER, _PROCESSING) if names.isdisjoint(kind.own)]
    configs: dict[str, LocalFile] = {}
    # the run's directory, nearest first; the final model is what lies there
    around: tuple[Path, ...] = ()
    if checkpoint_dir.name != FINAL:
        home = (
            checkpoint_dir.path if checkpoint_dir.only is not None else checkpoint_dir.path.parent
        )
        around = (home, home.parent) if home.name in NESTED else (home,)
    for folder in around if lacking else ():
        _add_kinds(configs, _list_configs(folder), lacking)
    if _ADAPTER not in lacking or _ADAPTER.marks[0] in configs:
        # its base model's configuration does not open an adapter
        lacking = [kind for kind in lacking if kind is not _CONFIG]
    lacking = [kind for kind in lacking if kind is not _ADAPTER]
    is_short = any(configs.keys().isdisjoint(kind.names) for kind in lacking)
    for folder in _named_models(files, configs, around) if is_short else ():
        folder_configs = _list_configs(folder)
        if _has_mark(folder_configs, _CONFIG):  # only of a directory that is a model's
            _add_kinds(configs, folder_configs, lacking)
    return {name: file for name, file in configs.items() if name not in names}


def _add_kinds(
    configs: dict[str, LocalFile], folder_configs: Mapping[str, LocalFile], kinds: Iterable[_Kind]
) -> None:
    """Add the files of each kind that ``configs`` lacks and ``folder_configs`` has.

    A kind is left out while one of its JSON files is torn.
    """
    for kind in kinds:
        if configs.keys().isdisjoint(kind.names) and _has_mark(folder_configs, kind):
            kind_files = {
                name: folder_configs[name] for name in kind.names if name in folder_configs
            }
            # half of a JSON file is being written
            if all(
                not name.endswith(".json") or _read_keys(file) is not None
                for name, file in kind_files.items()
            ):
                configs.update(kind_files)


def _list_configs(folder: Path) -> dict[str, LocalFile]:
    """Return the regular files of a directory that may lie beside a model, by name.

    Empty if it cannot be read.  Files of more than `_MOST` bytes are left out.
    """
    with contextlib.suppress(CkptsyncError):  # what cannot be looked at is as good as not there
        files = walk(folder, BESIDE_WEIGHTS).files
        return {
            f.path: LocalFile(f, folder, is_pinned=False, is_added=True)
            for f in files
            if f.size <= _MOST
        }
    return {}


def _has_mark(folder_configs: Mapping[str, LocalFile], kind: _Kind) -> bool:
    """Return whether one of the kind's ``marks`` is here, is not torn, and has one of its keys."""
    contents = (_read_keys(folder_configs[name]) for name in kind.marks if name in folder_configs)
    return any(
        each is not None and (not kind.keys or any(map(each.get, kind.keys))) for each in contents
    )


@lru_cache(maxsize=256)
def _read_keys(file: LocalFile) -> Mapping[str, Any] | None:
    """Return a file's values of the keys that tell its kind, or name the model.

    None if it is torn or cannot be read.  Of large JSON only the end is read, and nothing of large
    arguments, so there are no values.  A pickle is not executed.  Cached for the same stat.
    """
    files, name, size = _as_files(file), file.stat.path, file.stat.size
    content: Any = None
    with contextlib.suppress(CkptsyncError):
        if name == _ARGUMENTS:
            content = _read_arguments(files, Extent(name, 0, size)) if size <= _LARGE else None
        elif size <= _LARGE:
            content = parse(read_whole(files, name), name)
        elif not read(files, Extent(name, size - 64, 64)).rstrip().endswith((b"}", b"]")):
            return None
        wanted_keys = (*_CONFIG.keys, *_ADAPTER.keys, *_NAMING_KEYS)
        is_object = isinstance(content, dict)
        return {key: content[key] for key in wanted_keys if key in content} if is_object else {}
    return None


def _named_models(
    files: LocalFiles, configs: Mapping[str, LocalFile], around: Sequence[Path]
) -> Iterator[Path]:
    """Yield the local directories of the model with which a training says that it began; lazy.

    Names in the checkpoint's files and ``configs`` come first, then those of arguments in
    ``around``, then the hook's, newest training first.  Only absolute paths of directories that
    exist.
    """
    named_in = [
        file for name in _NAMED_IN if (file := files.by_path.get(name) or configs.get(name))
    ]
    for home in around:
        with contextlib.suppress(CkptsyncError):
            named_in += [
                LocalFile(f, home, is_pinned=False) for f in walk(home, (_ARGUMENTS,)).files
            ]
    names = [(_read_keys(file) or {}).get(key) for file in named_in for key in _NAMING_KEYS]
    names += [
        process.facts.get("base_model")
        for home in around
        for process in reversed(list_training_processes(home / SPOOL))
    ]
    for name in dict.fromkeys(name for name in names if isinstance(name, str)):
        if name.startswith("/") and os.path.isdir(name):  # noqa: PTH112  # Path.is_dir raises for a name that is too long
            yield Path(name)


def _read_arguments(files: LocalFiles, extent: Extent) -> Any:
    """Return the attributes of a Trainer's pickled arguments, of any class; execute nothing.

    A pickle that is no object is returned itself.  Raises as `torch_save.load`.
    """
    # most checkpoints need no pickle read here
    from ckptsync.formats import torch_pickle, torch_save  # noqa: PLC0415
    from ckptsync.formats.pickles import AnyClass, PickledObject  # noqa: PLC0415

    arguments, _ = torch_save.load(files, extent, AnyClass(torch_pickle.ALLOWED))
    return arguments.state if isinstance(arguments, PickledObject) else arguments


def _as_files(file: LocalFile) -> LocalFiles:
    """Return one file as the files of a save."""
    return LocalFiles("", "trainer", {file.stat.path: file})
