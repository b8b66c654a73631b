"""Plan a download: which stored files a machine needs, under which names, with which times.

Pure.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ckptsync.checkpoint_dirs import family_of
from ckptsync.digest import FileDigest, RangeDigests, digest
from ckptsync.errors import ConfigError, Corrupt, Incomplete
from ckptsync.formats.dtypes import ITEMSIZE
from ckptsync.formats.safetensors import encode_header
from ckptsync.layouts import file_names
from ckptsync.records.location_status import LocationState
from ckptsync.records.manifest_groups import Located
from ckptsync.records.model_record import ModelFile, ModelTensor
from ckptsync.records.store_paths import consolidated_prefix
from ckptsync.safe_names import checked_path, find_alike
from ckptsync.stores.parallel_download import StoredFile

_CHECKPOINT_NAME = re.compile(r"[A-Za-z0-9][^/]*")
_DEEPSPEED_STATES = re.compile(
    r"(bf16_|fp16_)?(zero_pp_rank_[0-9]+_)?mp_rank_[0-9]+_(model|optim)_states\.pt"
)
_ITERATION = re.compile(r"(?:global_step_|iter_)0*([0-9]+)")


@dataclass(frozen=True, slots=True)
class PullPlan:
    """The files to download into a directory ``name``.

    ``times``: path → mtime in ns, where known.  ``pointers``: name → content of files beside the
    directory that name the newest checkpoint. ``missing``: files of the checkpoint that are not in
    the store, and why.  ``notes``: what else the user should know.
    """

    name: str
    files: tuple[StoredFile, ...]
    times: Mapping[str, int] = field(default_factory=dict)
    pointers: Mapping[str, bytes] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(f.size for f in self.files)

    @property
    def alike(self) -> list[tuple[str, str]]:
        """Return pairs of files that some file systems take for one."""
        return find_alike(f.under for f in self.files)

    @property
    def key(self) -> str:
        """Return 16 hex digits that are the same for the same files with the same bytes."""
        files = [f"{f.under}\0{f.size}\0{f.digest.digest if f.digest else ''}" for f in self.files]
        return digest("\n".join(sorted(files)).encode())[:16]


def plan_checkpoint(seen: LocationState, node: str = "") -> PullPlan:
    """Plan all files of a checkpoint, or those that ``node`` needs to resume.

    A node needs its own files (with its own bytes), the files of no rank, and the shards of which
    any rank may need a part.  It does not need the optimizer shards and random states of other
    nodes.  Raises ConfigError if ``node`` sent no file, Corrupt for unsafe names.
    """
    if node and node not in (nodes := sorted({k.manifest.node for k in seen.manifests})):
        raise ConfigError(
            f"{node}: this node uploaded no file of {seen.run}/{seen.location}",
            hint=f"nodes: {', '.join(nodes)}",
        )

    def is_needed(path: str) -> bool:
        return not node or not _is_of_one_rank(path)

    chosen: dict[str, Located] = {}
    for path, copies in seen.files.items():
        own = next((at for at in copies if node in at.nodes), None) if node else None
        if own or is_needed(path):
            chosen[path] = own or copies[0]
    there = {path: at for path, at in chosen.items() if seen.sizes.get(at.name) == at.entry.size}
    _check_names(seen.checkpoint, there)
    missing = [
        f"{path}: missing in the store, or not as {at.nodes[0]} uploaded it"
        for path, at in chosen.items()
        if path not in there
    ]
    absent = sorted({**seen.demands.model, **seen.demands.resume}.keys() - seen.files.keys())
    missing += [f"{path}: no node has uploaded it" for path in absent if is_needed(path)]
    return PullPlan(
        seen.checkpoint,
        tuple(_stored_file(path, at) for path, at in there.items()),
        {path: at.entry.mtime for path, at in there.items()},
        pointers(seen.checkpoint, there),
        tuple(missing),
        () if node else tuple(_other_copies(seen)),
    )


def _stored_file(path: str, at: Located) -> StoredFile:
    entry = at.entry
    recorded = FileDigest(entry.size, entry.digest, entry.block_size, entry.blocks)
    return StoredFile(at.name, path, entry.size, recorded)


def _other_copies(seen: LocationState) -> Iterator[str]:
    others = [
        at
        for first, *more in seen.files.values()
        for at in more
        if at.entry.digest != first.entry.digest
    ]
    for other in sorted({at.nodes[0] for at in others}):
        count = sum(other in at.nodes for at in others)
        yield (
            f"{count} files of {other} differ from the files of the same name that were chosen:"
            f" --node {other} chooses them"
        )


def plan_model(seen: LocationState) -> PullPlan:
    """Plan the consolidated model's files.

    Raises Incomplete if there is none, Corrupt for unsafe names.
    """
    record = seen.model_record
    if record is None:
        name = f"{seen.run}/{seen.location}"
        raise Incomplete(
            f"{name}: it has not been consolidated",
            hint=f"wait for a head, or run `ckptsync merge STORE_URL/{name} DST`",
        )
    prefix = consolidated_prefix(record.run, record.location)
    tensors: dict[str, list[ModelTensor]] = {}
    for tensor in record.tensors:
        tensors.setdefault(tensor.file, []).append(tensor)
    there = [f for f in record.files if seen.sizes.get(prefix + f.path) == f.size]
    _check_names(seen.checkpoint, {f.path for f in there})
    files = []
    for f in there:
        recorded = model_digests(f, tensors.get(f.path, ()))
        files.append(StoredFile(prefix + f.path, f.path, f.size, recorded))
    absent = [f.path for f in record.files if f not in there]
    missing = tuple(f"{path}: missing in the store, or of another size" for path in absent)
    return PullPlan(seen.checkpoint, tuple(files), missing=missing)


def model_digests(file: ModelFile, tensors: Sequence[ModelTensor]) -> RangeDigests:
    """Return the digests by which ranges of a model's file can be checked separately.

    A safetensors header follows from the tensors, and each tensor has a digest; so header and
    tensors are checked each by itself.  Any other file is checked as a whole.
    """
    ordered = sorted((t for t in tensors if t.size), key=lambda t: t.start)
    header = b""
    if all(t.dtype in ITEMSIZE for t in tensors):
        header = encode_header((t.name, t.dtype, t.shape) for t in tensors)
    ends = (len(header), *(t.start + t.size for t in ordered))
    starts = zip(ends, ordered, strict=False)
    is_gapless = ends[-1] == file.size and all(a == t.start and t.digest for a, t in starts)
    if not (ordered and is_gapless):
        return RangeDigests(file.size, file.digest, (file.size,), (file.digest,))
    digests = (digest(header), *(t.digest for t in ordered))
    return RangeDigests(file.size, file.digest, ends, digests)


def pointers(checkpoint: str, paths: Collection[str]) -> Mapping[str, bytes]:
    """Return name → content of the files that point trainers to the newest checkpoint.

    Each lies in an output directory.

    Trainers write them anew with every save, so no store keeps them.  DeepSpeed reads ``latest`` if
    it is given no tag (`deepspeed.runtime.engine`, load_checkpoint); verl and Megatron read
    ``latest_checkpointed_iteration.txt``; the Hugging Face Trainer looks at names and times of
    directories.
    """
    if found := _ITERATION.fullmatch(checkpoint):
        return {"latest_checkpointed_iteration.txt": found[1].encode()}
    is_tag = family_of(checkpoint) == "deepspeed" and any(map(_DEEPSPEED_STATES.fullmatch, paths))
    return {"latest": checkpoint.encode()} if is_tag else {}


def _is_of_one_rank(path: str) -> bool:
    """Return whether only the rank in the file's name needs it."""
    kind = file_names.file_kind(path)
    return file_names.rank(path) is not None and not (kind and kind.is_for_any_rank)


def _check_names(checkpoint: str, paths: Collection[str]) -> None:
    """Raise Corrupt for names that lead elsewhere, or that are a file and a directory."""
    if not _CHECKPOINT_NAME.fullmatch(checked_path(checkpoint)):
        raise Corrupt(f"{checkpoint!r}: not a checkpoint's name")
    for path in paths:
        parts = checked_path(path).split("/")
        above = ("/".join(parts[:n]) for n in range(1, len(parts)))
        if file := next((name for name in above if name in paths), ""):
            raise Corrupt(f"{path}: lies in {file}, which is a file")
