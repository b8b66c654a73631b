"""What a model file says beside its masters, which parameters are trained, and experts. Whole checkpoints: ``test_zero``, ``test_merge_vectors``."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ckptsync.errors import CkptsyncError, Corrupt, Incomplete, Unsupported
from ckptsync.layouts import table, zero
from ckptsync.layouts.zero_files import StateFile, load
from ckptsync.layouts.zero_rank import (
    Rank,
    expert_counts,
    expert_names,
    expert_weights,
    groups_of,
    own_of,
    tensors_of,
    trained_groups,
    trained_masters,
    unordered,
)
from ckptsync.model import Copy
from tests.deepspeed_files import TAG, changed, held, without
from tests.plain_files import MemoryFiles
from tests.torch_files import saved
from tests.zero_checkpoint import merged

TOLD = {"module": {"w": torch.ones(2, 3).bfloat16(), "n": torch.arange(4), "text": "x"}, "param_shapes": [{"w": (2, 3)}]}
MASTER = Copy("F32", (6,), ())


def rank(stage: int = 2, absent: str = "", **more: object) -> Rank:
    files = MemoryFiles({"m": saved(TOLD | more)})
    file = load(files, "m")
    return Rank(files, stage, [file], [], own_of(file), absent)


def test_the_model_itself_has_tensors_alone() -> None:
    assert rank().own.keys() == {"w", "n"}


def test_groups_are_told_or_not() -> None:
    assert groups_of(rank().first) == [{"w": (2, 3)}]
    assert groups_of(rank(param_shapes=None).first) is None


def test_a_trained_parameter_has_its_master_and_the_models_own_copy() -> None:
    found = {t.name: t for t in tensors_of(rank(), {"w": (2, 3)}, {"w": MASTER})}
    assert [c.dtype for c in found["w"].copies] == ["F32", "BF16"]
    assert (found["w"].dtype, found["n"].dtype) == ("BF16", "I64")


def test_a_master_whose_file_is_absent_is_named_and_the_models_own_remains() -> None:
    (found, _) = tensors_of(rank(absent="o1"), {"w": (2, 3)}, {})
    assert [(c.dtype, c.absent) for c in found.copies] == [("F32", "o1"), ("BF16", "")]
    with pytest.raises(Incomplete, match="o1: not there; it holds some of v"):
        tensors_of(rank(absent="o1"), {"v": (2,)}, {})


def test_a_model_of_another_shape_than_the_optimizers_is_corrupt() -> None:
    with pytest.raises(Corrupt, match="w has the shape"):
        tensors_of(rank(), {"w": (3, 2)}, {"w": MASTER})
    assert tensors_of(replace(rank(3, buffer_names=["n"]), own={}), {"w": (3, 2)}, {"w": MASTER})


def real_rank(name: str, **more: object) -> Rank:
    files = held(name)
    model = load(files, f"{TAG}/mp_rank_00_model_states.pt")
    model = StateFile(model.name, model.archive, {**model.content, **more})
    optim = [load(files, n) for n in sorted(n for n in files.content if "optim" in n)]
    return Rank(files, 1, [model], optim, own_of(model))


@pytest.mark.parametrize("name", ["raw-ds-zero1-bf16-fp32acc", "raw-ds-zero2-dealt"])
def test_shapes_that_are_told_and_slices_give_the_same_masters(name: str) -> None:
    told, sliced = real_rank(name), real_rank(name, param_shapes=None)
    groups = [trained_groups(r) for r in (told, sliced)]
    assert [[*g.items()] for g in groups[0]] == [[*g.items()] for g in groups[1]]
    assert trained_masters(told, groups[0]) == trained_masters(sliced, groups[1])


def test_without_optimizer_files_or_shapes_every_parameter_may_have_a_master() -> None:
    of = real_rank("raw-ds-zero2-odd", param_shapes=None)
    absent = Rank(of.files, 1, of.models, [], of.own, "o1")
    (group,) = trained_groups(absent)
    assert group.keys() == of.own.keys() - set(of.first.content["buffer_names"])
    assert trained_masters(absent, [group]) == {}


def test_without_an_optimizer_nothing_is_trained() -> None:
    of = real_rank("raw-ds-zero2-odd")
    assert trained_groups(Rank(of.files, 0, of.models, [], of.own)) == []
    assert isinstance(of.files, MemoryFiles)


def test_masters_are_not_read_where_parameters_may_have_been_dealt_and_no_file_says_so() -> None:
    of = real_rank("raw-ds-zero2-dealt", param_shapes=None, ds_config=None)
    assert trained_masters(of, trained_groups(of)) == {}
    assert "no file tells the order" in unordered(of)
    assert not unordered(real_rank("raw-ds-zero2-dealt", param_shapes=None))


MODEL = f"{TAG}/mp_rank_00_model_states.pt"
EXPERT = f"{TAG}/layer_1_expert_3_mp_rank_00_model_states.pt"
KEY = "b1.moe.deepspeed_moe.experts.deepspeed_experts.{}.up.bias"


def files() -> MemoryFiles:
    return held("raw-ds-experts")


def test_every_expert_has_its_own_master() -> None:
    keep, auto = merged(files(), "keep"), merged(files(), "auto")
    assert keep.keys() == auto.keys()
    for name in (KEY.format(e) for e in range(4)):
        assert (keep[name].dtype, auto[name].dtype) == (torch.float32, torch.bfloat16)
        assert torch.equal(keep[name].bfloat16(), auto[name])
    assert len({tuple(keep[KEY.format(e)].tolist()) for e in range(4)}) == 4


def test_the_files_of_all_experts_are_demanded_and_each_is_named_when_it_is_missing() -> None:
    demanded = table.demands(files()).model
    assert demanded.keys() == files().sizes().keys() - {"latest"}
    for name in demanded:
        if "expert" in name:
            with pytest.raises(Incomplete, match=name):
                merged(without(files(), name), "auto")


def test_experts_that_ranks_order_otherwise_than_they_say_are_corrupt() -> None:
    other = changed(files(), MODEL, lambda m: m["ds_config"].update(use_data_before_expert_parallelism=True))
    with pytest.raises(Corrupt, match="its slice of"):
        merged(other, "keep")


@pytest.mark.parametrize(("told", "error"), [([4, 4, 4], Incomplete), ([4], Corrupt), ([4, 3], CkptsyncError), (None, Corrupt)])
def test_a_number_of_experts_that_the_files_do_not_have_is_refused(told: object, error: type[CkptsyncError]) -> None:
    with pytest.raises(error):
        merged(changed(files(), MODEL, lambda m: m.update(num_experts=told)), "keep")


@pytest.mark.parametrize("junk", ["4", [0], [-1], [None], [1 << 40], {}, 0, 2.5])
def test_numbers_of_experts_that_are_none_are_corrupt(junk: object) -> None:
    with pytest.raises(Corrupt, match="num_experts"):
        expert_counts(load(MemoryFiles({"m": saved({"num_experts": junk})}), "m"))


def test_autoep_is_refused_by_name() -> None:
    for key in ("ds_autoep_layers", "autoep_layers"):
        with pytest.raises(Unsupported, match="AutoEP"):
            merged(changed(files(), MODEL, lambda m, key=key: m.update({key: [{"num_experts": 4}]})), "keep")  # type: ignore[misc]


def test_an_expert_under_anothers_name_is_corrupt() -> None:
    other = {**files().content, EXPERT: files().content[EXPERT.replace("expert_3", "expert_2")]}
    with pytest.raises(Corrupt, match="no weight of expert 3"):
        merged(MemoryFiles(other), "auto")


def test_an_expert_with_fewer_weights_than_the_others_is_corrupt() -> None:
    with pytest.raises(Corrupt, match="not all experts"):
        merged(changed(files(), EXPERT, lambda e: e.pop(KEY.format(3))), "auto")


def test_old_files_without_layers_in_their_names_are_read() -> None:
    content = {n: d for n, d in files().content.items() if "layer_0" not in n}
    old = MemoryFiles({n.replace("layer_1_expert", "expert"): d for n, d in content.items()})
    names = expert_names(TAG, 4)
    assert set(names) < old.sizes().keys()
    assert len(expert_weights(old, TAG, 4)) == 16
    with pytest.raises(Incomplete, match="expert_4_mp_rank"):
        expert_weights(old, TAG, 5)


def test_experts_beside_a_model_that_tells_of_none_are_never_passed_over() -> None:
    plain = held("raw-ds-zero2-odd")
    for name in ("layer_0_expert_0_mp_rank_00_model_states.pt", "expp_rank_0_mp_rank_00_optim_states.pt"):
        with pytest.raises(Corrupt, match="tells of no experts"):
            zero.tensors(MemoryFiles({**plain.content, f"{TAG}/{name}": b""}), TAG)
