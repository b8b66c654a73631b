"""What file names say: the kind of a file (`KINDS`), its rank, its directory.

Uploads, downloads, manifests and verification have one table of the frameworks' files, and need not
open them. A root is a directory of the checkpoint; the root ``""`` is the checkpoint itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from ckptsync.errors import Incomplete
from ckptsync.tensors import Files

HOMES = ("", "checkpoint", "model", "hf_model")
"""Where a whole model may lie in a checkpoint: Ray Train reports Trainer's in ``checkpoint``
(``RayTrainReportCallback``); LLaMA-Factory v1 has its own two.
"""
# Files that `from_pretrained` and inference servers read beside the weights.
_STEMS = (
    *("config", "generation_config", "adapter_config", "quantization_config"),
    *("tokenizer", "tokenizer_config", "special_tokens_map", "added_tokens"),
    *("vocab", "chat_template"),
    *("preprocessor_config", "processor_config", "video_preprocessor_config"),
    *("image_processor_config", "feature_extractor_config"),
)
_OTHERS = (
    *("chat_template.jinja", "merges.txt", "vocab.txt"),
    *("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "tekken.json"),
)
BESIDE_WEIGHTS = (*(f"{stem}.json" for stem in _STEMS), *_OTHERS)
_CODE = re.compile(
    r"(configuration|modeling|tokenization|processing|image_processing)_\w+\.py", re.ASCII
)
METADATA = ".metadata"  # of torch's distributed checkpoints
PICKLED_METADATA = "metadata.pkl"  # torch_checkpointing's
SAFETENSORS, DCP_SHARD = ".safetensors", ".distcp"
TORCH = (".pt", ".pth", ".bin", ".ckpt", ".pkl")  # what torch.save writes, or pickle
_CODE_SUFFIXES = (".py", ".pyc", ".pyd", ".so", ".pickle", ".dill", ".joblib")
_OPTIMIZER_FOLDER = re.compile(r"(?:.*/)?(?:optimizer(_[0-9]+)?|optim)/.*", re.DOTALL)

MOST_RANKS = 1 << 20  # no training has so many ranks: a higher number in a name is something else


def may_run(name: str, *, pickles: bool = True) -> bool:
    """Return whether other programs may run code when they open a file: code, and pickles.

    ``pickles``: whether torch's files count, which a checkpoint has and a model in safetensors has
    not.
    """
    suffixes = (*_CODE_SUFFIXES, *(TORCH if pickles else ()))
    return name.lower().endswith(suffixes) or (pickles and name.endswith(METADATA))


@dataclass(frozen=True, slots=True)
class FileKind:
    """What is known of files by their names: a row of `KINDS`.

    ``pattern`` is of the last component, or with a slash of the last two; its group is the number
    of the rank whose own file it is, counted from ``first``. ``use``: what a file is needed for
    besides the model, as ``ckptsync push --send`` distinguishes; ``describing`` files describe
    others, and are always stored. ``is_for_any_rank``: another rank may read it, too, when a
    training resumes. ``is_shard``: ranks write such files side by side, and each before its random
    state.
    """

    pattern: str
    use: Literal["", "optimizer", "resuming", "describing"] = ""
    first: int = 0
    is_for_any_rank: bool = False
    is_shard: bool = False


# The first row that matches counts. A file without a row may be weights, and belongs to no rank.
KINDS = (
    # torch's distributed checkpoints
    FileKind(r"__([0-9]+)_[0-9]+\.distcp", is_for_any_rank=True, is_shard=True),
    FileKind(r"__([0-9]+)\.metadata", is_for_any_rank=True),
    FileKind(r"\.metadata", "describing"),
    FileKind(
        r"shard-([0-9]{5,})-model-[0-9]{5,}-of-[0-9]{5,}\.safetensors",
        first=1,
        is_for_any_rank=True,
    ),
    # DeepSpeed
    FileKind(r".*zero_pp_rank_([0-9]+)_mp_rank_.*_optim_states\.pt", "optimizer", is_shard=True),
    FileKind(r".*zero_pp_rank_([0-9]+)_mp_rank_.*", is_shard=True),
    FileKind(r".*_optim_states\.pt", "optimizer", is_shard=True),  # of experts
    FileKind(r"latest", "describing"),
    # torch_checkpointing
    FileKind(r"metadata\.pkl", "describing"),
    FileKind(r"model_([0-9]+)\.pt"),
    FileKind(r"optimizer_([0-9]+)\.pt", "optimizer"),
    FileKind(r"(?:train_state|dataloader|lr_scheduler)_([0-9]+)\.pt", "resuming"),
    # verl, and accelerate without DCP
    FileKind(r"optim_world_size_[0-9]+_rank_([0-9]+)\.pt", "optimizer"),
    FileKind(r"extra_state_world_size_[0-9]+_rank_([0-9]+)\.pt", "resuming"),
    FileKind(r"optimizer(?:_[0-9]+)?_rank([0-9]+)\.bin", "optimizer"),
    FileKind(r".*_rank_([0-9]+)\.pt|.*_rank([0-9]+)\.bin"),
    # the Trainer and accelerate
    FileKind(r"rng_state_([0-9]+)\.pth|random_states_([0-9]+)\.pkl", "resuming"),
    FileKind(r"optimizer(?:_[0-9]+)?\.(?:pt|bin)", "optimizer"),
    FileKind(r"(?:sampler|dl_state_dict)(?:_[0-9]+)?\.bin", "resuming"),
    FileKind(r"scheduler(?:_[0-9]+)?\.(?:pt|bin)", "resuming"),
    FileKind(r"scaler\.pt|rng_state\.pth|training_args\.bin", "resuming"),
    FileKind(r"custom_checkpoint_[0-9]+\.pkl", "resuming"),
    # LLaMA-Factory v1
    FileKind(r"(?:rng_state|dataloader)/rank_([0-9]+)\.pt", "resuming"),
    FileKind(r".*\.index\.json|trainer_state\.json", "describing"),
)


def is_beside_weights(name: str) -> bool:
    """Return whether a file at the top of a checkpoint is a configuration, tokenizer or code."""
    return name in BESIDE_WEIGHTS or bool(_CODE.fullmatch(name))


def join(root: str, name: str) -> str:
    """Return ``root/name``, or ``name`` alone at the top."""
    return f"{root}/{name}" if root else name


def inside(names: Iterable[str], root: str) -> dict[str, str]:
    """Return the names directly in ``root``, by their last component."""
    return {name.rpartition("/")[2]: name for name in names if name.rpartition("/")[0] == root}


def home(names: Iterable[str], holds: Callable[[Collection[str]], object]) -> tuple[str, ...]:
    """Return the first of `HOMES` whose names ``holds`` accepts, in a tuple; () if none."""
    names_by_home: dict[str, set[str]] = {name: set() for name in HOMES}
    for name in names:
        above, _, last = name.rpartition("/")
        if above in names_by_home:
            names_by_home[above].add(last)
    return next(((name,) for name, home_names in names_by_home.items() if holds(home_names)), ())


def file_kind(name: str) -> FileKind | None:
    """Return the row of `KINDS` for a file, or None."""
    return _kind_and_rank(_end(name))[0]


def use_of(name: str) -> str:
    """Return what a file is needed for besides the model; empty if its name does not say."""
    kind = file_kind(name)
    return kind.use if kind else ""


def is_of_optimizer(path: str) -> bool:
    """Return whether a file holds optimizer states only, by its name or its directory's."""
    return use_of(path) == "optimizer" or _OPTIMIZER_FOLDER.fullmatch(path) is not None


def rank(name: str) -> int | None:
    """Return the rank whose own file this is; None if the name does not say."""
    return _kind_and_rank(_end(name))[1]


def _end(name: str) -> str:
    """Return the last two components of a name."""
    return "/".join(name.rsplit("/", 2)[-2:])


@lru_cache(maxsize=1 << 14)  # the files of all checkpoints of a run have the same names
def _kind_and_rank(end: str) -> tuple[FileKind | None, int | None]:
    """Return the first of `KINDS` that a path matches, and the rank in the path.

    Either is None if there is none; a rank of `MOST_RANKS` or more is none.
    """
    base = end.rpartition("/")[2]
    for kind in KINDS:
        if match := re.fullmatch(kind.pattern, end if "/" in kind.pattern else base):
            number = next((max(0, int(n) - kind.first) for n in match.groups() if n), MOST_RANKS)
            return kind, number if number < MOST_RANKS else None
    return None, None


def ranks(names: Iterable[str]) -> tuple[int, ...]:
    """Return the ranks whose own files are among ``names``, in order."""
    return tuple(sorted({number for number in map(rank, names) if number is not None}))


def is_of_one_rank(base: str) -> bool:
    """Return whether this is one rank's own metadata of a distributed checkpoint."""
    return base.startswith("__") and base.endswith(METADATA) and rank(base) is not None


def metadata_files(names: Collection[str], root: str) -> tuple[str, ...]:
    """Return ``.metadata`` in ``root`` alone if it exists, else those of ranks in order; or ()."""
    name = join(root, METADATA)
    if name in names:
        return (name,)
    rank_files = (full for base, full in inside(names, root).items() if is_of_one_rank(base))
    return tuple(sorted(rank_files, key=lambda full: rank(full) or 0))


def holds_weights(root: str) -> bool:
    """Return False for a root whose name frameworks give to optimizers and other states.

    These are accelerate's and the Trainer's ``optimizer_0``, NeMo Automodel's ``optim`` and verl's
    ``extra_state``. A root of one file, ``optimizer.ckpt``, is judged by its content.
    """
    base = root.rpartition("/")[2]
    is_optimizer = base.startswith("optimizer") and not base.endswith(".ckpt")
    return not (is_optimizer or base in ("optim", "extra_state"))


class Within:
    """The files directly in one directory, under their last components."""

    def __init__(self, files: Files, directory: str) -> None:
        self._files, self._names = files, inside(files.sizes(), directory)

    def sizes(self) -> Mapping[str, int]:
        """See `Files`."""
        sizes = self._files.sizes()
        return {name: sizes[stored] for name, stored in self._names.items()}

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """See `Files`; raise Incomplete for a file that is not directly in the directory."""
        if name not in self._names:
            raise Incomplete(f"{name}: not found")
        self._files.read_into(self._names[name], start, out)
