"""Relate a checkpoint's names to those of a model's files; rename, split or fuse tensors.  Pure.

Checkpoints hold names of a model in memory, ``save_pretrained`` and hubs those of files: some are
renamed, fused or split on the way (`ckptsync.layouts.weight_renaming`).  `FileModel` proves that a
checkpoint's names are those in memory of the model whose files it has: each must be one of them.
Nothing is guessed from shapes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckptsync.errors import Corrupt, Incomplete, Unsupported
from ckptsync.layouts.weight_renaming import Place, places
from ckptsync.merger.completeness import first_names
from ckptsync.merger.tensor_names import EMBEDDINGS, HEADS, ends_in
from ckptsync.merger.tensor_pieces import Piece, assemble
from ckptsync.tensors import Shape, Tensor

MOST_HEADS = 4  # first components that are tried as the part one model is of the other
_PACKED = ("U8", "I8", "I32", "U32")
_QUANTIZED = (".weight_scale_inv", ".qweight", ".qzeros", ".absmax")
# What a training does not change in a configuration, and tensors follow from.
_STRUCTURE = (
    *("model_type", "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "moe_intermediate_size", "num_experts"),
    *("num_local_experts", "n_routed_experts", "n_layer", "n_embd", "n_head"),
)


@dataclass(frozen=True, slots=True)
class _Region:
    """What a file's tensor ``name`` has of a tensor in memory: a box of both.

    ``rows``: where it begins on the first axis of the file's tensor.  ``offsets``, ``sizes``: in
    memory.  ``has_expert``: the first axis in memory is not in the file.
    """

    name: str
    live: str
    rows: int
    offsets: Shape
    sizes: Shape
    has_expert: bool = False
    is_transposed: bool = False

    @property
    def axes(self) -> tuple[int, ...]:
        """Return, for each axis of the file's tensor, the axis of the tensor in memory."""
        axes = list(range(len(self.sizes)))[1 if self.has_expert else 0 :]
        if self.is_transposed:
            axes[-2:] = axes[:-3:-1]
        return tuple(axes)

    def from_memory(self, live: Tensor) -> Piece:
        """Return the region of the tensor in memory as a piece of the file's tensor."""
        axes = self.axes
        return Piece(live, self.offsets, self.sizes, _row_offsets(self.rows, len(axes)), axes)

    def from_file(self, tensor: Tensor) -> Piece:
        """Return the region of the file's tensor as a piece of the tensor in memory."""
        axes = self.axes
        back = tuple(axes.index(a) if a in axes else None for a in range(len(self.sizes)))
        sizes = tuple(self.sizes[a] for a in axes)
        return Piece(tensor, _row_offsets(self.rows, len(axes)), sizes, self.offsets, back)


class FileModel:
    """A model's files, and where a checkpoint's tensors are in them.

    ``tensors``: of the files.  ``live``: the shapes in memory, by name.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        config: Mapping[str, Any],
        checkpoint: Mapping[str, Tensor],
    ) -> None:
        """Find the relation to ``checkpoint``, a checkpoint's tensors.

        Raises Unsupported if there is none or the model is quantised, Corrupt if a shape differs.
        """
        check_not_quantized(tensors, config)
        self.tensors = tensors
        shapes = {name: t.shape for name, t in checkpoint.items()}
        self._converted: tuple[_Region, ...] = ()
        file_places = places(tensors, config)
        candidates = [file_places]
        if not checkpoint.keys() <= _names_in_memory(file_places):
            candidates += _shifted_places(file_places, checkpoint)
        fitting = [c for c in candidates if checkpoint.keys() <= _names_in_memory(c)]
        if not fitting and checkpoint.keys() <= tensors.keys():
            fitting = [{name: (Place(name),) for name in tensors}]
        if not fitting:
            # the checkpoint may have names of files, too, of an older model or another layout
            of_files = places(checkpoint, config)
            if checkpoint and _names_in_memory(of_files) <= _names_in_memory(file_places):
                live_shapes, regions = _map_regions(shapes, of_files, {})
                self._converted, shapes, fitting = tuple(regions), live_shapes, [file_places]
        if not fitting:
            best = min(candidates, key=lambda c: len(checkpoint.keys() - _names_in_memory(c)))
            unknown = [name for name in checkpoint if name not in _names_in_memory(best)]
            raise Unsupported(
                f"{len(unknown)} of {len(checkpoint)} tensors have no place in the model of the"
                " given files, nor does the table of names say how they would get there:"
                f" {first_names(unknown)}",
                hint="give the model that was trained; or merge without --names-of and --fill-from",
            )
        self.live, regions = _map_regions(
            {n: t.shape for n, t in tensors.items()}, fitting[0], shapes
        )
        self._of_file: defaultdict[str, list[_Region]] = defaultdict(list)
        self._of_live: defaultdict[str, list[_Region]] = defaultdict(list)
        for region in regions:
            self._of_file[region.name].append(region)
            self._of_live[region.live].append(region)
        for name, shape in shapes.items():
            if shape != self.live[name] and not self._is_resized(name, shape):
                raise Corrupt(
                    f"{name} is {list(shape)}, {list(self.live[name])} in the given model",
                    hint="give the model that was trained",
                )

    def _is_resized(self, name: str, shape: Shape) -> bool:
        """Return whether a shape may be that of a resized vocabulary."""
        return shape[1:] == self.live[name][1:] and is_vocabulary(name)

    def in_memory(self, checkpoint: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the tensors of the constructor's checkpoint as in memory; raise as `assemble`."""
        if not self._converted:
            return tuple(checkpoint)
        tensors_by_name = {t.name: t for t in checkpoint}
        groups: defaultdict[str, list[_Region]] = defaultdict(list)
        for region in self._converted:
            groups[region.live].append(region)
        return tuple(
            assemble(
                live, _common_shape(group), [r.from_file(tensors_by_name[r.name]) for r in group]
            )
            for live, group in groups.items()
        )

    def missing(self, checkpoint: Collection[Tensor], tied: Collection[str]) -> tuple[Tensor, ...]:
        """Return the files' tensors, as in memory, that neither ``checkpoint`` nor ``tied`` has.

        ``checkpoint``: under the names of `live`, else KeyError.  Raises Unsupported if one would
        have another vocabulary than ``checkpoint``, and as `assemble`.
        """
        checkpoint_names = {t.name for t in checkpoint}
        missing_names = [
            live for live in self.live if live not in checkpoint_names and live not in tied
        ]
        resized = [t for t in checkpoint if t.shape != self.live[t.name]]
        if resized and (vocabulary := [live for live in missing_names if is_vocabulary(live)]):
            raise Unsupported(
                f"{resized[0].name} has {resized[0].shape[0]} rows, {self.live[resized[0].name][0]}"
                f" in the given model: {vocabulary[0]} cannot be taken from there",
                hint="save it with the checkpoint",
            )
        return tuple(
            assemble(
                live,
                self.live[live],
                [r.from_file(self.tensors[r.name]) for r in self._of_live[live]],
            )
            for live in missing_names
        )

    def under_file_names(
        self, live_tensors: Sequence[Tensor], tied: Collection[str]
    ) -> tuple[Tensor, ...]:
        """Return tensors in memory as those of the files, in their order.

        ``tied``: names that another tensor stands for; the files' tensors of those that are missing
        are left out.  Raises Incomplete if any other is missing, and as `assemble`.
        """
        tensors_by_name = {t.name: t for t in live_tensors}
        absent = [live for live in self.live if live not in tensors_by_name]
        missing_names = [live for live in absent if live not in tied]
        if missing_names:
            raise Incomplete(
                f"{len(missing_names)} of the {len(self.live)} tensors of the model whose names are"
                f" to be written are missing ({len(self.live) - len(missing_names)} are there):"
                f" {first_names(missing_names)}",
                hint="was all of the model saved? --fill-from takes what was left out on purpose",
            )
        unavailable = set(absent)
        return tuple(
            self._file_tensor(name, tensors_by_name)
            for name in self.tensors
            if not any(region.live in unavailable for region in self._of_file[name])
        )

    def _file_tensor(self, name: str, tensors_by_name: Mapping[str, Tensor]) -> Tensor:
        """Return a tensor of the files, made of tensors in memory.

        One of a resized vocabulary keeps its size.  Raises as `assemble`.
        """
        regions, shape = self._of_file[name], self.tensors[name].shape
        if (
            len(regions) == 1
            and (live := tensors_by_name[regions[0].live]).shape != self.live[live.name]
        ):
            return replace(live, name=name, tied=None)  # of a resized vocabulary
        return assemble(name, shape, [r.from_memory(tensors_by_name[r.live]) for r in regions])


def tensors_in_memory(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Return the files' tensors that are single tensors in memory, under the names there."""
    file_places = places(tensors, config)
    return {
        tensor_places[0].live: replace(tensors[name], name=tensor_places[0].live)
        for name, tensor_places in file_places.items()
        if tensor_places[0].is_whole
    }


def is_vocabulary(name: str) -> bool:
    """Return whether a tensor has a row for each token."""
    return ends_in(name, (*EMBEDDINGS, *HEADS))


def check_not_quantized(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    """Raise Unsupported if names, dtypes or ``config`` show a model with quantised weights."""
    packed = [
        t.name
        for t in tensors.values()
        if t.name.endswith(_QUANTIZED)
        or (
            len(t.shape) > 1
            and (t.dtype in _PACKED or t.dtype.startswith("F8"))
            and not t.name.endswith("bias")  # GPT-2's causal mask
        )
    ]
    if packed or isinstance(config.get("quantization_config"), dict):
        raise Unsupported(
            f"the given model is quantised ({first_names(packed) or 'quantization_config'}): its"
            " tensors are not those that were trained",
            hint="give the unquantised model",
        )


def check_same_structure(
    first: Mapping[str, Any], second: Mapping[str, Any], filled: Iterable[str]
) -> None:
    """Raise Unsupported if two ``config.json`` differ in a key of `_STRUCTURE` that both have.

    Sections ``…_config`` are compared, too.  ``first``: the checkpoint's.  ``second``: the given
    model's.  ``filled``: tensors taken from it; with a vocabulary's, ``vocab_size`` must agree.
    """
    keys = (*_STRUCTURE, "vocab_size") if any(map(is_vocabulary, filled)) else _STRUCTURE
    sections = [k for k in first if k.endswith("_config")]
    for section in ("", *sections):
        first_section, second_section = (c.get(section) if section else c for c in (first, second))
        if not (isinstance(first_section, dict) and isinstance(second_section, dict)):
            continue
        for key in keys:
            values = first_section.get(key), second_section.get(key)
            if None not in values and values[0] != values[1]:
                name = f"{section}.{key}" if section else key
                raise Unsupported(
                    f"--fill-from: another model: {name} is {values[1]} in its config.json,"
                    f" {values[0]} in the checkpoint's",
                    hint="give the model that was trained, or correct the config.json that is"
                    " wrong",
                )


def _row_offsets(rows: int, rank: int) -> Shape:
    """Return the offsets of row ``rows`` in a tensor of ``rank`` axes; none for a scalar."""
    return (rows, *(0,) * (rank - 1)) if rank else ()


def _names_in_memory(file_places: Mapping[str, tuple[Place, ...]]) -> set[str]:
    """Return all names in memory."""
    return {place.live for tensor_places in file_places.values() for place in tensor_places}


def _shifted_places(
    file_places: Mapping[str, tuple[Place, ...]], checkpoint_names: Collection[str]
) -> Iterator[dict[str, tuple[Place, ...]]]:
    """Yield the places with each of `MOST_HEADS` usual first components added, then taken away."""
    heads = Counter(
        name.partition(".")[0] for name in (*checkpoint_names, *_names_in_memory(file_places))
    )
    for head, _ in heads.most_common(MOST_HEADS):
        for change in (f"{head}.{{}}".format, lambda live, h=f"{head}.": live.removeprefix(h)):
            yield {
                name: tuple(replace(place, live=change(place.live)) for place in tensor_places)
                for name, tensor_places in file_places.items()
            }


def _map_regions(
    shapes: Mapping[str, Shape],
    file_places: Mapping[str, tuple[Place, ...]],
    live_shapes: Mapping[str, Shape],
) -> tuple[dict[str, Shape], list[_Region]]:
    """Return the shapes in memory, and what each tensor of the files has of them.

    ``live_shapes``: known shapes in memory.  Raises Unsupported if the files make up no whole
    tensors.
    """
    groups: defaultdict[str, list[tuple[str, Place]]] = defaultdict(list)
    for name, tensor_places in file_places.items():
        for place in tensor_places:
            groups[place.live].append((name, place))
    swapped = {
        shapes[name] != live_shapes[tensor_places[0].live]
        for name, tensor_places in file_places.items()
        if tensor_places[0].may_transpose and tensor_places[0].live in live_shapes
    }
    live: dict[str, Shape] = {}
    regions: list[_Region] = []
    for target, members in groups.items():
        (name, place), *more_members = members
        if place.is_whole and not more_members:
            is_swapped = place.may_transpose and _is_swapped(
                name, shapes[name], live_shapes.get(target), swapped
            )
            live_regions = [_whole_region(name, shapes[name], target, is_transposed=is_swapped)]
        elif place.parts > 1 and not more_members:
            live_regions = [
                _part_region(name, shapes[name], file_places[name], place.part, live_shapes)
            ]
        else:
            live_regions = list(_piece_regions(target, members, shapes))
        live[target] = _common_shape(live_regions)
        regions += live_regions
    return live, regions


def _common_shape(regions: Iterable[_Region]) -> Shape:
    """Return the shape of a tensor in memory, of which these are all regions."""
    ends = [tuple(o + n for o, n in zip(r.offsets, r.sizes, strict=True)) for r in regions]
    return tuple(map(max, *ends)) if len(ends) > 1 else ends[0]


def _is_swapped(
    name: str, shape: Shape, live_shape: Shape | None, siblings: Collection[bool]
) -> bool:
    """Return whether a file has the last two axes swapped: by the shape in memory, or as siblings.

    Raises Unsupported if neither is known.
    """
    if live_shape is not None:
        return shape != live_shape
    if len(siblings) != 1:
        raise Unsupported(
            f"{name}: nothing tells whether the file has its last two axes swapped: the checkpoint"
            " holds no tensor of its kind",
            hint="save one of them with the checkpoint",
        )
    return next(iter(siblings))


def _whole_region(name: str, shape: Shape, live: str, *, is_transposed: bool) -> _Region:
    """Return all of a file's tensor as a region of the tensor in memory."""
    sizes = (*shape[:-2], *shape[:-3:-1]) if is_transposed else shape
    return _Region(name, live, 0, (0,) * len(sizes), sizes, is_transposed=is_transposed)


def _part_region(
    name: str,
    shape: Shape,
    tensor_places: Sequence[Place],
    part: int,
    live_shapes: Mapping[str, Shape],
) -> _Region:
    """Return one of several tensors in memory that are one in the file.

    Raises Unsupported if nothing says how many of its rows are whose.
    """
    live_names = [place.live for place in tensor_places]
    rows = [live_shapes[live][0] if live_shapes.get(live) else None for live in live_names]
    known_rows = sum(count for count in rows if count is not None)
    absent = rows.count(None)
    if absent == len(rows) == 2:  # halves: gate and up, or keys and values
        rows = [shape[0] // 2] * 2
    elif absent == 1:  # it has what the others leave
        rows = [shape[0] - known_rows if count is None else count for count in rows]
    sizes = [count for count in rows if count is not None]
    if len(sizes) < len(rows) or sum(sizes) != shape[0] or min(sizes) < 0:
        raise Unsupported(
            f"{name}: its {shape[0]} rows are {', '.join(live_names)} in memory, and nothing says"
            " how many are whose",
            hint="merge a checkpoint that holds all of them",
        )
    box = (sizes[part], *shape[1:])
    return _Region(name, live_names[part], sum(sizes[:part]), (0,) * len(box), box)


def _piece_regions(
    live: str, members: Iterable[tuple[str, Place]], shapes: Mapping[str, Shape]
) -> Iterator[_Region]:
    """Yield what makes up a tensor in memory that is several in the files.

    Raises Unsupported if pieces are missing, given twice, or of several shapes.
    """
    names: dict[tuple[int | None, int], str] = {}
    counts: set[int] = set()
    for name, place in members:
        counts.add(place.pieces if place.parts == 1 and not place.may_transpose else 0)
        if names.setdefault((place.expert, place.piece), name) != name:
            raise Unsupported(
                f"{name} and {names[place.expert, place.piece]}: both would be {live}"
            )
    experts = {expert for expert, _ in names}
    count = next(iter(counts))
    has_experts = None not in experts
    order: list[int | None] = [*range(len(experts))] if has_experts else [None]
    if (
        len(counts) > 1
        or not count
        or {(e, n) for e in order for n in range(count)} != names.keys()
    ):
        raise Unsupported(
            f"{live}: {len(names)} tensors of the given files make up no whole one, such as"
            f" {next(iter(names.values()))}",
            hint="give all files of the model",
        )
    for expert in order:
        rows = 0
        for number in range(count):
            name = names[expert, number]
            shape, first = shapes[name], shapes[names[order[0], number]]
            if shape != first or not shape or shape[1:] != shapes[names[order[0], 0]][1:]:
                raise Unsupported(f"{name}: {list(shape)}, which is unlike its siblings")
            expert_axis = (expert,) if expert is not None else ()
            sizes = (*(1,) * len(expert_axis), *shape)
            offsets = (*expert_axis, rows, *(0,) * (len(shape) - 1))
            yield _Region(name, live, 0, offsets, sizes, has_expert=has_experts)
            rows += shape[0]
