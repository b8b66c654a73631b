"""Which parameters are trained, as each kind of checkpoint tells it."""

from __future__ import annotations

import pytest

from ckptsync.layouts import zero_trained
from ckptsync.layouts.zero_files import StateFile, load
from ckptsync.layouts.zero_rank import Rank, own_of
from tests.deepspeed_files import TAG, held
from tests.plain_files import MemoryFiles


def rank(name: str, **more: object) -> Rank:
    files = held(name)
    model = load(files, f"{TAG}/mp_rank_00_model_states.pt")
    model = StateFile(model.name, model.archive, {**model.content, **more})
    optim = [load(files, n) for n in sorted(n for n in files.content if "optim" in n)]
    return Rank(files, 1, [model], optim, own_of(model))


@pytest.mark.parametrize("name", ["raw-ds-zero1-bf16-fp32acc", "raw-ds-zero2-dealt"])
def test_shapes_that_are_told_and_slices_give_the_same_masters(name: str) -> None:
    told, sliced = rank(name), rank(name, param_shapes=None)
    groups = [zero_trained.groups(r) for r in (told, sliced)]
    assert [[*g.items()] for g in groups[0]] == [[*g.items()] for g in groups[1]]
    assert zero_trained.masters(told, groups[0]) == zero_trained.masters(sliced, groups[1])


def test_without_optimizer_files_or_shapes_every_parameter_may_have_a_master() -> None:
    of = rank("raw-ds-zero2-odd", param_shapes=None)
    absent = Rank(of.files, 1, of.models, [], of.own, "o1")
    (group,) = zero_trained.groups(absent)
    assert group.keys() == of.own.keys() - set(of.first.content["buffer_names"])
    assert zero_trained.masters(absent, [group]) == {}


def test_without_an_optimizer_nothing_is_trained() -> None:
    of = rank("raw-ds-zero2-odd")
    assert zero_trained.groups(Rank(of.files, 0, of.models, [], of.own)) == []
    assert isinstance(of.files, MemoryFiles)


def test_masters_are_not_read_where_parameters_may_have_been_dealt_and_no_file_says_so() -> None:
    of = rank("raw-ds-zero2-dealt", param_shapes=None, ds_config=None)
    assert zero_trained.masters(of, zero_trained.groups(of)) == {}
    assert "no file tells the order" in zero_trained.unordered(of)
    assert not zero_trained.unordered(rank("raw-ds-zero2-dealt", param_shapes=None))
