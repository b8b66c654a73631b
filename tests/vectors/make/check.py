"""Read a vector back with the framework's own offline tools and compare that with the reference, bit for bit."""

import contextlib
import io
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import torch
from safetensors.torch import load_file


def overlay(sources: list[Path], into: Path) -> Path:
    """Lay the folders of all nodes over one another."""
    for source in sources:
        shutil.copytree(source, into, dirs_exist_ok=True)
    return into


def flatten(tree: object, prefix: tuple[str, ...] = ()) -> dict[str, torch.Tensor]:
    """Return the tensors of nested dicts and lists under their joined names."""
    if isinstance(tree, torch.Tensor):
        return {".".join(prefix): tree}
    if isinstance(tree, dict):
        branches = tree.items()
    elif isinstance(tree, list):
        branches = enumerate(tree)
    else:
        return {}
    return {k: v for key, branch in branches for k, v in flatten(branch, (*prefix, str(key))).items()}


def from_dcp(folder: Path, section: str = "model") -> dict[str, torch.Tensor]:
    """Return what torch's dcp_to_torch_save makes of the folder, without the section around the model."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    with tempfile.NamedTemporaryFile(suffix=".pt") as file:
        dcp_to_torch_save(folder, file.name)
        state = torch.load(file.name, weights_only=False)
    return flatten(state.get(section, state))


def from_shards(folder: Path) -> dict[str, torch.Tensor]:
    """Return what torch's consolidator makes of a DCP in safetensors."""
    from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files

    names = {name for file in folder.glob("*.safetensors") for name in load_file(file)}
    with tempfile.TemporaryDirectory() as out:
        consolidate_safetensors_files(str(folder), out, fqn_to_index_mapping=dict.fromkeys(sorted(names), 1))
        return from_files(Path(out))


def from_zero(folder: Path, tag: str | None) -> dict[str, torch.Tensor]:
    """Return what DeepSpeed's zero_to_fp32 makes of the folder."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    with contextlib.redirect_stdout(io.StringIO()):
        return get_fp32_state_dict_from_zero_checkpoint(str(folder), tag=tag)


def from_files(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of all safetensors files of the folder."""
    return {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}


def from_bins(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of all files that torch.save wrote in the folder, as torch loads them."""
    files = sorted(folder.glob("*.bin"))
    return {k: v for file in files for k, v in torch.load(file, map_location="cpu", weights_only=True).items()}


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Tell whether two tensors hold the same bits under the same shape and dtype."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    raw = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return torch.equal(raw[0], raw[1])


def upcast(tensor: torch.Tensor) -> torch.Tensor:
    """Return floats as fp32, as zero_to_fp32 gives them (it leaves frozen ones alone when it returns a dict)."""
    return tensor.float() if tensor.is_floating_point() else tensor


def compare(found: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> dict[str, object]:
    """Return whether all of the reference is found bit for bit, and the names that are not on both sides."""
    both = found.keys() & reference.keys()
    return {
        "equal": all(k in found and same(found[k], reference[k]) for k in reference),
        "tensors_equal": sum(same(found[k], reference[k]) for k in both),
        "tensors_in_reference": len(reference),
        "differ": sorted(k for k in both if not same(found[k], reference[k])),
        "missing_from_tool": sorted(reference.keys() - found.keys()),
        "added_by_tool": sorted(found.keys() - reference.keys()),
    }


def fp32_groups(folder: Path) -> dict[str, object]:
    """Return what the optimizer's file of rank 0 says of itself."""
    file = min(folder.glob("*/*zero_pp_rank_0_mp_rank_00_optim_states.pt"))
    state = torch.load(file, map_location="cpu", weights_only=False)["optimizer_state_dict"]
    groups = state.get("fp32_flat_groups", state.get("single_partition_of_fp32_groups"))
    keys = sorted(str(key) for key in state)
    return {"file": file.name, "optimizer_state_dict_keys": keys, "fp32_group_numels": [g.numel() for g in groups]}


def check(folder: Path, vector: dict[str, Any]) -> dict[str, object]:
    """Return the comparison that vector.json keeps under "checked"."""
    sources = [folder / source for source in vector["sources"]]
    reference = load_file(folder / vector["keep"])
    with tempfile.TemporaryDirectory() as scratch:
        if vector["kind"] == "zero":
            whole = overlay(sources, Path(scratch) / "whole")
            reference = {name: upcast(value) for name, value in reference.items()}
            try:
                found = {name: upcast(value) for name, value in from_zero(whole, vector.get("tag")).items()}
            except Exception as error:  # noqa: BLE001  what the tool says is part of the vector
                return {"tool": "zero_to_fp32", "equal": False, "error": str(error).replace(scratch, "..."), **fp32_groups(whole)}
            return {"tool": "zero_to_fp32", **compare(found, reference), **fp32_groups(whole)}
        if vector["kind"] == "dcp_safetensors":
            try:
                found = from_shards(sources[0] / vector["shards_folder"])
            except Exception as error:  # noqa: BLE001  as above
                return {"tool": "consolidate_safetensors_files", "equal": False, "error": f"{type(error).__name__}: {error}"}
            return {"tool": "consolidate_safetensors_files", **compare(found, reference)}
        if vector["kind"] == "dcp":
            results = []
            for index, parts in enumerate([vector["sources"], *vector.get("alternatives", [])]):
                whole = overlay([folder / part for part in parts], Path(scratch) / str(index))
                try:
                    results.append(compare(from_dcp(whole / vector["model_folder"], vector.get("section", "model")), reference))
                except Exception as error:  # noqa: BLE001  as above
                    return {"tool": "dcp_to_torch_save", "equal": False, "error": f"{type(error).__name__}: {error}".replace(scratch, "...")}
            return {"tool": "dcp_to_torch_save", **min(results, key=lambda result: bool(result["equal"]))}
    if vector["kind"] == "bin":
        return {"tool": "torch.load", **compare(from_bins(sources[0]), reference)}
    if vector["kind"] == "lightning":
        (file,) = sources[0].glob("*.ckpt")
        return {"tool": "torch.load", **compare(torch.load(file, map_location="cpu", weights_only=False)["state_dict"], reference)}
    if vector["kind"] == "per_rank":
        return {"tool": "none", "equal": None}  # each has torch's own gathering at run time, and no tool that needs no GPU or training
    return {"tool": "safetensors", **compare(from_files(sources[0] / vector.get("home", "")), reference)}


if __name__ == "__main__":
    for name in sys.argv[1:]:
        root = Path(name)
        print(name, json.dumps(check(root, json.loads((root / "vector.json").read_text())), indent=1))
