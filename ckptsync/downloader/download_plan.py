"""Plan a download: which stored files a machine needs, under which names, with which times.

Several nodes may have stored different contents under one path, and a node that resumes needs its
own, but not the optimizer states of others. So a plan is made from a location's records alone, and
says beforehand what is missing. Pure.
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
        """Return the bytes of all files."""
        return sum(f.size for f in self.files)

    @property
    def alike(self) -> list[tuple[str, str]]:
        """Return pairs of files that some file systems take for one; see `find_alike`."""
        return find_alike(f.under for f in self.files)

    @property
    def key(self) -> str:
        """Return 16 hex digits, the same for the same files with the same bytes in any order."""
        files = [f"{f.under}\0{f.size}\0{f.digest.digest if f.digest else ''}" for f in self.files]
        return digest("\n".join(sorted(files)).encode())[:16]


def plan_checkpoint(state: LocationState, node: str = "") -> PullPlan:
    """Return the plan of all files of a checkpoint, or of those that ``node`` needs to resume.

    ``missing`` names files that are not stored in their recorded size, or that metadata demands and
    no node uploaded. Of files with several contents the first is planned, and ``notes`` say how
    many differ. With ``node``, its own contents are planned, and there are no such notes.

    A node needs its own files, the files of no rank, and the shards of which any rank may need a
    part; not the optimizer shards and random states of other nodes. Raise ConfigError if ``node``
    uploaded no file, Corrupt for unsafe names.
    """
    if node and node not in (nodes := sorted({k.manifest.node for k in state.manifests})):
        raise ConfigError(
            f"{node}: this node uploaded no file of {state.run}/{state.location}",
            hint=f"nodes: {', '.join(nodes)}",
        )

    def is_needed(path: str) -> bool:
        """Return whether a file of another node is needed, too."""
        return not node or not _is_of_one_rank(path)

    chosen: dict[str, Located] = {}
    for path, copies in state.files.items():
        own_copy = next((copy for copy in copies if node in copy.nodes), None) if node else None
        if own_copy or is_needed(path):
            chosen[path] = own_copy or copies[0]
    present = {
        path: copy for path, copy in chosen.items() if state.sizes.get(copy.name) == copy.entry.size
    }
    _check_names(state.checkpoint, present)
    missing = [
        f"{path}: missing in the store, or not as {copy.nodes[0]} uploaded it"
        for path, copy in chosen.items()
        if path not in present
    ]
    unsent = sorted({**state.demands.model, **state.demands.resume}.keys() - state.files.keys())
    missing += [f"{path}: no node has uploaded it" for path in unsent if is_needed(path)]
    return PullPlan(
        state.checkpoint,
        tuple(_stored_file(path, copy) for path, copy in present.items()),
        {path: copy.entry.mtime for path, copy in present.items()},
        pointers(state.checkpoint, present),
        tuple(missing),
        () if node else tuple(_other_copies(state)),
    )


def _stored_file(path: str, copy: Located) -> StoredFile:
    """Return a stored copy as a file to download to ``path``."""
    entry = copy.entry
    recorded = FileDigest(entry.size, entry.digest, entry.block_size, entry.blocks)
    return StoredFile(copy.name, path, entry.size, recorded)


def _other_copies(state: LocationState) -> Iterator[str]:
    """Yield a note for each node with files that differ from the chosen ones, sorted by node."""
    differing = [
        copy
        for first, *further_copies in state.files.values()
        for copy in further_copies
        if copy.entry.digest != first.entry.digest
    ]
    for node in sorted({copy.nodes[0] for copy in differing}):
        count = sum(node in copy.nodes for copy in differing)
        yield (
            f"{count} files of {node} differ from the files of the same name that were chosen:"
            f" --node {node} chooses them"
        )


def plan_model(state: LocationState) -> PullPlan:
    """Return the plan of the consolidated model's files, without times and pointers.

    ``missing`` names those that the store lacks or has in another size. Raise Incomplete if there
    is no model record, Corrupt for unsafe names.
    """
    record = state.model_record
    if record is None:
        raise not_consolidated(f"{state.run}/{state.location}")
    prefix = consolidated_prefix(record.run, record.location)
    tensors: dict[str, list[ModelTensor]] = {}
    for tensor in record.tensors:
        tensors.setdefault(tensor.file, []).append(tensor)
    present = [file for file in record.files if state.sizes.get(prefix + file.path) == file.size]
    _check_names(state.checkpoint, {file.path for file in present})
    files = []
    for file in present:
        recorded = model_digests(file, tensors.get(file.path, ()))
        files.append(StoredFile(prefix + file.path, file.path, file.size, recorded))
    missing_paths = [file.path for file in record.files if file not in present]
    missing = tuple(f"{path}: missing in the store, or of another size" for path in missing_paths)
    return PullPlan(state.checkpoint, tuple(files), missing=missing)


def not_consolidated(name: str) -> Incomplete:
    """Return the error for a checkpoint that has no consolidated model."""
    return Incomplete(
        f"{name}: it has no consolidated model yet",
        hint=(
            "wait until a head has made it (`ckptsync status` says whether one runs), or run"
            f" `ckptsync merge STORE_URL/{name} DST`"
        ),
    )


def model_digests(file: ModelFile, tensors: Sequence[ModelTensor]) -> RangeDigests:
    """Return the digests by which ranges of a model's file can be checked separately.

    They are those of the safetensors header, computed from the tensors, and of each non-empty
    tensor, if these cover the file without gaps. Any other file is one range, with the file's
    digest.
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
    """Return name → content of the files that point trainers to ``checkpoint`` as the newest one.

    Each lies in an output directory. {} for trainers that read no such file. ``paths``: the
    checkpoint's files, by which SkyRL and DeepSpeed are recognised.

    Trainers write them anew with every save, so no store keeps them. DeepSpeed reads ``latest`` if
    it is given no tag (`deepspeed.runtime.engine`, load_checkpoint); verl and Megatron read
    ``latest_checkpointed_iteration.txt``, SkyRL ``latest_ckpt_global_step.txt``.
    """
    if match := _ITERATION.fullmatch(checkpoint):
        is_skyrl = any(path.startswith("policy/") for path in paths)
        name = "latest_ckpt_global_step.txt" if is_skyrl else "latest_checkpointed_iteration.txt"
        return {name: match[1].encode()}
    is_tag = family_of(checkpoint) == "deepspeed" and any(map(_DEEPSPEED_STATES.fullmatch, paths))
    return {"latest": checkpoint.encode()} if is_tag else {}


def _is_of_one_rank(path: str) -> bool:
    """Return whether only the rank in the file's name needs the file."""
    kind = file_names.file_kind(path)
    return file_names.rank(path) is not None and not (kind and kind.is_for_any_rank)


def _check_names(checkpoint: str, paths: Collection[str]) -> None:
    """Raise Corrupt for names that lead elsewhere, or that are both a file and a directory.

    Also for a checkpoint's name with a slash, or that begins with no letter or digit.
    """
    if not _CHECKPOINT_NAME.fullmatch(checked_path(checkpoint)):
        raise Corrupt(f"{checkpoint!r}: not a checkpoint's name")
    for path in paths:
        parts = checked_path(path).split("/")
        above = ("/".join(parts[:n]) for n in range(1, len(parts)))
        if file := next((name for name in above if name in paths), ""):
            raise Corrupt(f"{path}: lies in {file}, which is a file")
