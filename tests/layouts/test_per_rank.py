"""A file a rank: names, what may lie in them.

Real ones, and everything that can be missing, mixed or renamed.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptsync.errors import Corrupt, Incomplete, Unsupported
from ckptsync.layouts import per_rank, registry
from ckptsync.layouts.per_rank import load, of_stem
from ckptsync.layouts.registry import WeightsSource
from ckptsync.merger import copy_consistency
from tests.support.files_in_memory import MemoryFiles, torch_zip_file, tree
from tests.support.torch_bytes import saved
from tests.support.vector import vector


@pytest.mark.parametrize(
    ("value", "error", "said"),
    [
        ({"a._flat_param": torch.ones(3)}, Unsupported, "LOCAL_STATE_DICT"),
        ({"model": {"w": torch.ones(3)}}, Unsupported, "is a dictionary"),
        ({3: torch.ones(3)}, Unsupported, "keys that are no names"),
        ([torch.ones(3)], Corrupt, "a state dict expected"),
        ({"p": Path("x")}, Unsupported, "pathlib"),
    ],
)
def test_what_is_no_state_dict_of_a_sharded_model_is_refused(
    value: object, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        load(MemoryFiles({"m": saved(value)}), "m", 0)


REAL = {
    "acc-ranks-fsdp2-tied": "pytorch_model_fsdp_0",
    "acc-ranks-fsdp1": "pytorch_model_fsdp_0",
    "verl-fsdp2": "actor/model",
    "verl-mesh": "actor/model",
    "verl-parallel": "actor/model",
    "verl-hsdp-parallel": "actor/model",
}
VERL = "actor/model_world_size_4_rank_{}.pt"


def of(name: str) -> MemoryFiles:
    return tree(*vector(name).sources)


def read(files: MemoryFiles, root: str) -> object:
    return registry.tensors(files, WeightsSource("per_rank", root))


def test_names_that_share_elements_on_every_rank_are_tied() -> None:
    tied = {
        t.name: t.tied
        for t in per_rank.tensors(of("acc-ranks-fsdp2-tied"), "pytorch_model_fsdp_0")
        if t.tied
    }
    assert tied == {"lm_head.weight": "model.embed_tokens.weight"}
    assert {t.name for t in per_rank.tensors(of("verl-mesh"), "actor/model") if t.tied} == {
        "tied.two.weight"
    }


def test_names_are_tied_that_view_the_same_elements_on_every_rank_and_no_others() -> None:
    shared = torch.zeros(2, 2)
    state = {"a": shared[0], "b": shared[1], "c": shared[1], "whole": shared, "t": shared.t()}
    for other, tied in [(state, "b"), (state | {"c": shared[1].clone()}, None)]:
        assert {t.name: t.tied for t in per_rank.tensors(plain(state, other), "model")} == {
            **dict.fromkeys(state),
            "c": tied,
        }


@pytest.mark.parametrize("name", REAL)
def test_two_ranks_files_that_were_exchanged_are_noticed(name: str) -> None:
    files, root = of(name), REAL[name]
    first, second, *_ = per_rank.demands(files, root)
    files.content[first], files.content[second] = files.content[second], files.content[first]
    with pytest.raises(Corrupt, match="rank 1 wrote it"):
        read(files, root)


def test_files_of_two_worlds_are_not_mixed() -> None:
    files = of("verl-mesh")
    files.content["actor/model_world_size_2_rank_0.pt"] = files.content[VERL.format(0)]
    with pytest.raises(Corrupt, match="worlds of 2 and 4 ranks"):
        read(files, "actor/model")
    files = of("acc-ranks-fsdp1")
    files.content["pytorch_model_fsdp_0_rank2.bin"] = files.content[
        "pytorch_model_fsdp_0_rank1.bin"
    ]
    with pytest.raises(Corrupt, match="does not fit a world size of 2"):
        read(files, "pytorch_model_fsdp_0")
    whole = {f"pytorch_model_fsdp_rank{n}.bin": saved({"w": torch.ones(3)}) for n in (0, 2)}
    with pytest.raises(Incomplete, match="rank1"):  # nothing but the names tells of this world
        read(MemoryFiles(whole), "pytorch_model_fsdp")


def test_ranks_whose_groups_have_other_sizes_are_not_joined() -> None:
    files, name = of("acc-ranks-fsdp1"), "pytorch_model_fsdp_0_rank1.bin"
    with zipfile.ZipFile(io.BytesIO(files.content[name])) as archive:
        records = {path.partition("/")[2]: archive.read(path) for path in archive.namelist()}
    two, one = (b"local_world_sizeqcK" + bytes([n]) for n in (2, 1))
    records["data.pkl"] = records["data.pkl"].replace(two, one)
    files.content[name] = torch_zip_file(records)
    with pytest.raises(Corrupt, match="is sharded differently"):
        read(files, "pytorch_model_fsdp_0")


def test_a_name_that_tells_another_world_than_the_tensors_is_noticed() -> None:
    files = MemoryFiles(
        {
            f"model_world_size_2_rank_{rank}.pt": of("verl-mesh").content[VERL.format(rank)]
            for rank in range(2)
        }
    )
    with pytest.raises(Corrupt, match="is sharded differently"):
        read(files, "model")


def plain(*states: dict[str, torch.Tensor]) -> MemoryFiles:
    return MemoryFiles(
        {
            f"model_world_size_{len(states)}_rank_{rank}.pt": saved(state)
            for rank, state in enumerate(states)
        }
    )


def test_plain_tensors_are_rank_0s_whatever_their_values() -> None:
    ones = {"w": torch.ones(3), "n": torch.tensor(7)}
    files = plain(ones, ones)
    assert [(t.name, t.shape, t.remark) for t in per_rank.tensors(files, "model")] == [
        ("w", (3,), ""),
        ("n", (), ""),
    ]
    one, other = ({"w": torch.tensor([7, unused])[:1]} for unused in (1, 2))
    assert not per_rank.tensors(plain(one, other), "model")[0].remark


def test_plain_tensors_that_differ_where_nothing_is_sharded_are_refused() -> None:
    ones = {"w": torch.ones(3)}
    with pytest.raises(Unsupported, match="nothing says how they go together"):
        read(plain(ones, ones, {"w": torch.zeros(3)}), "model")
    with pytest.raises(Unsupported, match="no tensors"):
        read(plain({}, {}), "model")


@pytest.mark.parametrize(
    "other", [{"w": torch.ones(4)}, {"w": torch.ones(3).bfloat16()}, {"v": torch.ones(3)}, {}]
)
def test_ranks_that_disagree_about_a_tensor_are_corrupt(other: dict[str, torch.Tensor]) -> None:
    ones = {"w": torch.ones(3)}
    with pytest.raises(Corrupt, match="rank_2"):
        read(plain(ones, ones, other), "model")


def test_what_is_for_resuming_is_demanded_for_that_alone() -> None:
    assert per_rank.roots(["a/model_world_size_2_rank_0.pt", "a/optim_world_size_2_rank_1.pt"]) == (
        "a/model",
        "a/optim",
    )
    files = of("acc-ranks-fsdp1")
    files.content["optimizer_0_rank1.bin"] = b""
    found = registry.demands(files)
    assert set(found.resume) == {"optimizer_0_rank0.bin", "optimizer_0_rank1.bin"}
    assert set(found.model) == {"pytorch_model_fsdp_0_rank0.bin", "pytorch_model_fsdp_0_rank1.bin"}
    with pytest.raises(Incomplete, match="the model's own files"):
        per_rank.demands(MemoryFiles({"optimizer_0_rank1.bin": b""}), "optimizer_0")
    with pytest.raises(Incomplete, match="no file of any rank"):
        per_rank.demands(MemoryFiles({}), "model")


def test_configuration_lies_where_verl_puts_it() -> None:
    files = of("verl-fsdp2")
    inner = MemoryFiles({name.removeprefix("actor/"): data for name, data in files.content.items()})
    for held, root in ((files, "actor/model"), (inner, "model")):
        place, *_ = registry.around(held, WeightsSource("per_rank", root))
        assert "config.json" in place.sizes()


def of_a_slice(rank: int, local: torch.Tensor) -> bytes:
    """What rank ``rank`` of four saves of a tensor on one axis of a mesh of two, and of one on
    both axes.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=4, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        on_both = DTensor.from_local(torch.ones(1), mesh, [Shard(0)] * 2, run_check=False)
        w = DTensor.from_local(local, mesh["dp"], [Shard(0)], run_check=False)
        return saved({"w": w, "on both": on_both})
    finally:
        dist.destroy_process_group()


def slices(*values: int) -> MemoryFiles:
    return MemoryFiles(
        {
            f"model_world_size_4_rank_{rank}.pt": of_a_slice(rank, torch.full((2, 3), float(value)))
            for rank, value in enumerate(values)
        }
    )


def test_a_tensor_on_some_of_the_ranks_is_each_groups_if_all_have_the_same_bytes() -> None:
    files = slices(1, 1, 2, 2)
    found, _ = per_rank.tensors(files, "model")
    assert [part.offsets for part in found.copies[0].parts] == [(0, 0), (2, 0)]
    assert [[r.extent.file[-4] for r in part.replicas] for part in found.copies[0].parts] == [
        ["1"],
        ["3"],
    ]
    copy_consistency.check_copies(files, [found])
    files = slices(1, 1, 2, 3)
    with pytest.raises(
        Unsupported,
        match=(
            r"w lies on 2 of 4 ranks, its values in .*_rank_[23].pt differ from those in"
            r" .*_rank_[23].pt"
        ),
    ):
        copy_consistency.check_copies(files, per_rank.tensors(files, "model"))
    files.content["model_world_size_4_rank_3.pt"] = of_a_slice(3, torch.ones(3, 2).t())
    with pytest.raises(Unsupported, match=r"rank_3.pt: w is stored in another order"):
        read(files, "model")


def test_slices_as_older_versions_of_torch_keep_them_know_their_own_ranks_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch.distributed.device_mesh import DeviceMesh

    def older(mesh: Any) -> dict[str, Any]:
        ranks = mesh.mesh.flatten().tolist()
        return {
            "mesh": mesh.mesh,
            "_flatten_mesh_list": tuple(ranks),
            "_coordinate_on_dim": list(mesh.get_coordinate()),
        }

    monkeypatch.setattr(DeviceMesh, "__getstate__", older)
    files = slices(1, 1, 2, 2)
    found, _ = per_rank.tensors(files, "model")
    assert [len(part.replicas) for part in found.copies[0].parts] == [1, 1]
    first = files.content["model_world_size_4_rank_0.pt"]
    alone = MemoryFiles({"pytorch_model_fsdp_rank0.bin": first})
    assert len(per_rank.demands(alone, "pytorch_model_fsdp")) == 4
    for rank, other in [(0, 2), (1, 0)]:  # two of one place, and none of another
        name = f"model_world_size_4_rank_{rank}.pt"
        with pytest.raises(Corrupt, match="wrote it"):
            read(
                MemoryFiles(
                    files.content | {name: files.content[f"model_world_size_4_rank_{other}.pt"]}
                ),
                "model",
            )


@pytest.mark.parametrize("change", [{"ranks": (0, 1)}, {"ranks": (0, 3)}, {"ranks": (0, 2, 4, 6)}])
def test_groups_that_are_not_made_of_all_ranks_are_corrupt(
    change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed.device_mesh import DeviceMesh

    files = slices(1, 1, 2, 2)

    of_both = DeviceMesh.__getstate__

    def other(mesh: Any) -> Any:
        ranks = change["ranks"]
        if mesh.ndim == 2:
            return of_both(mesh)
        return {"mesh": torch.tensor(ranks), "_flatten_mesh_list": ranks, "_coordinate_on_dim": [0]}

    monkeypatch.setattr(DeviceMesh, "__getstate__", other)
    files.content["model_world_size_4_rank_0.pt"] = of_a_slice(0, torch.ones(2, 3))
    with pytest.raises(Corrupt, match=r"is sharded differently|mesh and placements give"):
        read(files, "model")


def test_parts_that_are_on_more_ranks_than_others_are_corrupt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch.distributed.device_mesh import DeviceMesh

    files = slices(1, 1, 2, 2)
    of_slice, ranks = DeviceMesh.__getstate__, (0, 3, 2, 1)

    def other(mesh: Any) -> Any:
        """Where rank 3's part is, rank 1 is too."""
        if mesh.ndim == 1:
            return of_slice(mesh)
        rows = torch.tensor(ranks).reshape(2, 2)
        return {"mesh": rows, "_flatten_mesh_list": ranks, "_coordinate_on_dim": [1, 1]}

    monkeypatch.setattr(DeviceMesh, "__getstate__", other)
    files.content["model_world_size_4_rank_1.pt"] = of_a_slice(1, torch.ones(2, 3))
    with pytest.raises(Corrupt, match="some parts of on both are on more ranks"):
        read(files, "model")


def test_other_names_and_a_rank_file_without_its_metadata_are_anybodys() -> None:
    names = ["model_0.pt", "b/model_0.pt", "b/metadata.pkl", "model_world_size_1_rank_0.pt"]
    others = ["pytorch_model_fsdp.bin", "a/model_rank_0.pt", "pytorch_model_rank0.bin"]
    others += ["x/xmodel_world_size_2_rank_0.pt", "random_states_0.pkl"]
    assert per_rank.roots([*names, *others]) == ("b/model", "model")
    assert [name for _, name in of_stem(names, "model")] == ["model_world_size_1_rank_0.pt"]


def checkpointing(metadata: object) -> MemoryFiles:
    files = tree(*vector("torch-checkpointing").sources)
    files.content["metadata.pkl"] = pickle.dumps(metadata, 4)
    return files


def test_torch_checkpointings_metadata_says_how_many_ranks_there_are() -> None:
    files = tree(*vector("torch-checkpointing").sources)
    assert registry.choose(files, None) == WeightsSource("per_rank", "model")
    demands = registry.demands(files)
    assert demands.model.keys() == {"model_0.pt", "model_1.pt", "metadata.pkl"}
    assert demands.resume.keys() == {"optimizer_0.pt", "optimizer_1.pt"}
    assert demands.world == 2
    del files.content["model_1.pt"]
    with pytest.raises(Incomplete, match=r"model_1\.pt"):
        registry.tensors(files, WeightsSource("per_rank", "model"))


def test_a_number_of_ranks_that_there_cannot_be_is_corrupt() -> None:
    for world in (None, 0, -1, True, "2", 1 << 30):
        for told in ({"world_size": world}, [world]):
            with pytest.raises(Corrupt, match="world_size"):
                per_rank.demands(checkpointing(told), "model")
    files = MemoryFiles({"model_world_size_99999999999_rank_0.pt": b""})
    with pytest.raises(Corrupt, match="no training has so many"):
        per_rank.demands(files, "model")


@pytest.mark.parametrize("world", [1, 3])
def test_metadata_of_another_number_of_ranks_is_refused(world: int) -> None:
    files = checkpointing({"world_size": world})
    with pytest.raises((Corrupt, Incomplete)):
        registry.tensors(files, WeightsSource("per_rank", "model"))
