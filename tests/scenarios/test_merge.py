"""Every layout is merged bit for bit as its framework would.

What is broken, hostile or two saves in one is refused, and runs nothing.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.scenarios.world import VECTORS, Done, files_below, flipped, run_command, tensors

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TOLD: dict[str, Any] = {
    path.parent.name: json.loads(path.read_text()) for path in sorted(VECTORS.glob("*/vector.json"))
}
ONE_DIRECTORY = [name for name in TOLD if len(TOLD[name]["sources"]) == 1]


def run(*words: object, code: int = 0) -> Done:
    done = run_any(*words)
    assert done.code == code, f"{words}: {done.code}\n{done.out}\n{done.err}"
    return done


def run_any(*words: object) -> Done:
    """A command that ends in whichever way, but without a traceback."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("CKPTSYNC_")}
    done = run_command(words, environment, Path.cwd())
    assert "Traceback" not in done.err, done.err
    return done


def sources(name: str) -> list[Path]:
    return [VECTORS / name / source for source in TOLD[name]["sources"]]


def reference(name: str, dtype: str) -> dict[str, Any]:
    found = dict(tensors((VECTORS / name / TOLD[name][dtype]).read_bytes()))
    if TOLD[name].get("tied_names") and TOLD[name]["kind"] == "zero":
        # DeepSpeed's own gathering leaves the second name of a tied weight out
        found[HEAD] = found[EMBEDDING]
    if TOLD[name].get("adapter"):
        found = {key.replace(".default.", "."): value for key, value in found.items()}
    return found


def merged(folder: Path) -> dict[str, Any]:
    return {
        key: value
        for path in folder.glob("*.safetensors")
        for key, value in tensors(path.read_bytes()).items()
    }


@pytest.mark.parametrize("name", TOLD)
def test_a_checkpoint_becomes_the_model_that_its_framework_gathers(
    name: str, tmp_path: Path
) -> None:
    run("merge", *sources(name), tmp_path / "out", "--dtype", "keep")
    assert merged(tmp_path / "out") == reference(name, "keep")


@pytest.mark.parametrize("name", [n for n in TOLD if TOLD[n]["keep"] != TOLD[n]["auto"]])
def test_by_default_each_tensor_is_as_the_model_had_it(name: str, tmp_path: Path) -> None:
    run("merge", *sources(name), tmp_path / "out")
    assert merged(tmp_path / "out") == reference(name, "auto")


@pytest.mark.parametrize("folder", ["plain", "items"])
def test_a_nested_state_dict_is_one_model(folder: str, tmp_path: Path) -> None:
    run("merge", VECTORS / "dcp-dress" / folder, tmp_path / "out", "--dtype", "keep")
    assert merged(tmp_path / "out") == reference("dcp-dress", "keep")


def test_inspect_and_a_dry_run_change_nothing(tmp_path: Path) -> None:
    shutil.copytree(VECTORS / "hf-zero2/out", tmp_path / "in")
    before = files_below(tmp_path)
    found = run("inspect", tmp_path / "in/checkpoint-4", "--json").json
    assert [source["state"] for source in found["sources"]] == ["complete", "complete"] or found[
        "preferred"
    ]
    run("merge", tmp_path / "in/checkpoint-4", tmp_path / "out", "--dry-run")
    assert files_below(tmp_path) == before


def test_shards_of_two_trainings_are_not_one_model_even_where_their_times_are_equal(
    tmp_path: Path,
) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    shutil.copytree(VECTORS / "raw-ds-zero2-odd/out", one)
    shutil.copytree(one, other)
    shard = next(p for p in sorted(other.rglob("*_optim_states.pt")) if "rank_1_" in p.name)
    _rewrite(
        shard,
        lambda data: (
            bytes(b ^ (1 if n % 4 == 2 else 0) for n, b in enumerate(data))
            if len(data) > 60
            else data
        ),
    )
    (one / shard.relative_to(other)).write_bytes(shard.read_bytes())
    for path in one.rglob("*"):
        os.utime(path, (1_700_000_000, 1_700_000_000))
    done = run("merge", one, tmp_path / "out", "--dtype", "keep", "--json", code=10)
    assert "1" in done.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "rank", "code"),
    [("verl-parallel", 1, 5), ("verl-hsdp-parallel", 4, 5), ("verl-mesh", 3, 10)],
)
def test_a_replica_with_other_values_is_refused_and_a_damaged_one_named(
    name: str, rank: int, code: int, tmp_path: Path
) -> None:
    shutil.copytree(VECTORS / name / "out", tmp_path / "in")
    shard = next((tmp_path / "in").rglob(f"model_*_rank_{rank}.pt"))
    whole = shard.read_bytes()
    _rewrite(shard, lambda data: data[:-1] + bytes([data[-1] ^ 1]) if len(data) > 8 else data)
    said = run("merge", tmp_path / "in", tmp_path / "out", "--ignore-times", code=code).err
    assert shard.name in said
    assert len(re.findall(r"model_world_size_[48]_rank_[0-9].pt", said)) == 2
    assert re.search(r"model.embed_tokens.weight|replicated", said)
    shard.write_bytes(whole)
    _damage(shard)
    assert (
        shard.name in run("merge", tmp_path / "in", tmp_path / "out", "--ignore-times", code=10).err
    )
    assert not (tmp_path / "out").exists()


class Evil:
    """A pickle that would make a file."""

    def __init__(self, at: Path) -> None:
        self.at = at

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.at}",)


@pytest.mark.parametrize(
    "name",
    [
        "pytorch_model.bin",
        "global_step4/mp_rank_00_model_states.pt",
        "model/.metadata",
        "model_world_size_1_rank_0.pt",
        "training_args.bin",
    ],
)
@pytest.mark.parametrize("command", ["merge", "inspect", "verify", "push"])
def test_a_pickle_is_never_executed(name: str, command: str, tmp_path: Path) -> None:
    canary, at = tmp_path / "canary", tmp_path / "checkpoint-4" / name
    at.parent.mkdir(parents=True)
    data = pickle.dumps({"module": Evil(canary), "weight": Evil(canary)})
    if name.endswith(".metadata"):
        at.write_bytes(data)
        (at.parent / "__0_0.distcp").write_bytes(b"")
    else:
        with zipfile.ZipFile(at, "w") as archive:
            archive.writestr("archive/data.pkl", data)
            archive.writestr("archive/version", b"3\n")
    words: dict[str, list[object]] = {
        "merge": [tmp_path / "out"],
        "push": ["--store", tmp_path / "store"],
    }
    done = run_any(command, tmp_path / "checkpoint-4", *words.get(command, []))
    assert command == "push" or done.code in (3, 5, 10)
    assert not canary.exists()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_link_out_of_the_checkpoint_is_not_followed(name: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    source = tmp_path / "in"
    shutil.copytree(VECTORS / "hf-ddp/out/checkpoint-4", source)
    (secret / name).write_bytes((source / name).read_bytes())
    (source / name).unlink()
    (source / name).symlink_to(secret / name)
    run_any("merge", source, tmp_path / "out")
    assert not (tmp_path / "out" / name).exists()


@pytest.mark.parametrize("command", ["merge", "inspect", "verify", "push"])
def test_an_index_that_leads_out_of_the_checkpoint_is_refused(command: str, tmp_path: Path) -> None:
    source = tmp_path / "in/checkpoint-4"
    shutil.copytree(VECTORS / "hf-ddp/out/checkpoint-4", source)
    (tmp_path / "secret").mkdir()
    (source / "model.safetensors").rename(tmp_path / "secret/model.safetensors")
    names = tensors((tmp_path / "secret/model.safetensors").read_bytes())
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "../../secret/model.safetensors")}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    words: dict[str, list[object]] = {
        "merge": [tmp_path / "out"],
        "push": ["--store", tmp_path / "store"],
    }
    done = run_any(command, source, *words.get(command, []))
    assert command == "push" or done.code in (3, 5, 10), done.out + done.err
    assert not (tmp_path / "out").exists()
    assert not [
        name for name in files_below(tmp_path) if name.startswith("store/") and "secret" in name
    ]


def _damage(path: Path) -> None:
    """Turn a bit over in every record of an archive, or in a file of many archives."""
    data = bytearray(path.read_bytes())
    if zipfile.is_zipfile(path) and path.suffix != ".distcp":
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                if "/data/" in info.filename:
                    data[
                        info.header_offset + 30 + len(info.filename) + info.file_size // 2 + 100
                    ] ^= 16
    else:
        data[:] = flipped(bytes(data), 0.6)
    path.write_bytes(data)


def _rewrite(path: Path, change: Any) -> None:
    """The same archive with changed records, and CRCs that fit them."""
    with zipfile.ZipFile(path) as archive:
        records = [(info, archive.read(info)) for info in archive.infolist()]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for info, data in records:
            archive.writestr(info.filename, change(data) if "/data/" in info.filename else data)
