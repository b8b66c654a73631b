"""The changes that a LoRA adapter makes in the tensors of its base, as plain values.  Pure.

They say which tensors are involved, not what their values are, so that the whole merge is planned
before a value is read.  A change covers a box of one tensor of the base.  Box and factors are
matrices: of a box of more axes (a convolution's), all but the first are flattened; leading axes of
size 1 (one expert of several) are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptsync.tensors import Shape, Tensor

IsEqual = Callable[[Tensor, Tensor, bool], bool]
"""Whether two stored matrices have the same elements, the second transposed if the bool is true."""


@dataclass(frozen=True, slots=True)
class Factor:
    """A part of one factor of a low-rank product: these rows and columns of a stored matrix.

    A factor of more axes (a convolution's) is flattened behind the first.
    """

    tensor: Tensor
    rows: range
    columns: range


@dataclass(frozen=True, slots=True)
class LowRank:
    """``W += scale * (b @ a)``, over ``sizes`` elements of the base's tensor from ``offsets``.

    ``module``: the adapted module, as messages name it.  ``is_transposed``: ``(b @ a).T`` is added.
    ``magnitude`` (DoRA): then ``W`` is set to ``magnitude / n * (W + scale * (b @ a))``, where
    ``n`` is the norm of each row of that sum, of each column with ``is_transposed``.
    """

    module: str
    a: Factor
    b: Factor
    scale: float
    offsets: Shape
    sizes: Shape
    is_transposed: bool = False
    magnitude: Tensor | None = None

    @property
    def is_per_column(self) -> bool:
        """Whether DoRA's norms are those of columns, not of rows."""
        return self.is_transposed


@dataclass(frozen=True, slots=True)
class Replacement:
    """The adapter's tensor instead of the base's, rounded to the written type.

    It may have more or fewer rows (a resized vocabulary).
    """

    module: str
    tensor: Tensor


@dataclass(frozen=True, slots=True)
class Rows:
    """These rows are replaced by the rows of ``tensor``, in this order."""

    module: str
    tensor: Tensor
    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BiasDelta:
    """``bias += scale * tensor``."""

    module: str
    tensor: Tensor
    scale: float


Change = LowRank | Replacement | Rows | BiasDelta


@dataclass(frozen=True, slots=True)
class Changes:
    """What becomes of the base.

    ``of``: by the name of a tensor that is written, its changes in order of application; a tensor
    without any is copied.  ``added``: tensors that the base's files do not have; their copies are
    the adapter's, or those of the base's tensor that they were tied to (then ``of`` has their
    changes).  ``shapes``: of the tensors whose shape changes.  ``config``: what to set in
    ``config.json``, nested as there.  ``removed``: tensors of the base that are not written (the
    head of a causal model that became a classifier).  ``modules``: how many modules the adapter
    adapts.
    """

    of: Mapping[str, tuple[Change, ...]]
    added: tuple[Tensor, ...] = ()
    shapes: Mapping[str, Shape] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    removed: frozenset[str] = frozenset()
    modules: int = 0
