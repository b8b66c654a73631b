"""``ckptsync merge`` as a transcript, on the demo's real shards."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from tests.support.adapters import Q, delta, pair, read_model, write_adapter, write_base
from tests.support.command_line import Cli
from tests.support.small_store import DATA
from tests.support.vector import ROOT

FSDP = [str(DATA / "fsdp2" / node / "checkpoint-4") for node in ("node0", "node1")]
ZERO = [str(DATA / "zero3" / node / "checkpoint-4") for node in ("node0", "node1")]


def names(path: Path) -> list[str]:
    with safe_open(path, "np") as f:
        return sorted(f.keys())


@pytest.mark.parametrize("sources", [FSDP, ZERO], ids=["fsdp2", "zero3"])
def test_shards_of_two_nodes_become_one_model(sources: list[str], tmp_path: Path, cli: Cli) -> None:
    said = cli("merge", *sources, tmp_path / "out", "--config-from", DATA / "base").out
    assert f"written: {len(list((tmp_path / 'out').iterdir()))} files" in said
    assert "(21 F32)" in said
    assert len(names(tmp_path / "out" / "model.safetensors")) == 21
    assert (tmp_path / "out" / "config.json").exists()


def as_json(cli: Cli, *words: object) -> dict[str, Any]:
    printed: dict[str, Any] = cli("merge", *words, "--json").json
    return printed


def test_json_tells_what_was_written(tmp_path: Path, cli: Cli) -> None:
    out, small = tmp_path / "out", ("--dtype", "bf16", "--max-shard-size", "10KB")
    result = as_json(cli, *FSDP, out, *small)
    assert result["dtypes"] == {"BF16": 21}
    sizes = {file["path"]: file["bytes"] for file in result["files"]}
    assert sizes == {p.name: p.stat().st_size for p in out.iterdir()}
    assert len(result["files"]) >= 3
    assert "no config.json" in result["notes"][0]


def test_a_dry_run_says_the_same_and_writes_nothing(tmp_path: Path, cli: Cli) -> None:
    def described(result: dict[str, Any]) -> list[object]:
        files = {file["path"]: file["bytes"] for file in result["files"]}
        return [files, *(result[key] for key in ("tensors", "bytes", "source"))]

    planned = as_json(cli, *ZERO, tmp_path / "out", "--dry-run")
    assert not (tmp_path / "out").exists()
    assert described(planned) == described(as_json(cli, *ZERO, tmp_path / "out"))


def with_code(directory: Path, name: str) -> Path:
    """A configuration that leads to code, in the checkpoint or beside it."""
    directory.mkdir(exist_ok=True)
    config = json.loads((DATA / "base" / "config.json").read_text())
    (directory / "config.json").write_text(
        json.dumps(config | {"auto_map": {"AutoModel": f"modeling_{name}.X"}})
    )
    (directory / f"modeling_{name}.py").write_text(name)
    return directory


def test_code_in_a_checkpoint_is_left_out_unless_it_is_named(tmp_path: Path, cli: Cli) -> None:
    source = with_code(Path(shutil.copytree(FSDP[0], tmp_path / "checkpoint-4")), "theirs")
    mine = with_code(tmp_path / "mine", "mine")
    left = ["config.json: auto_map", "modeling_theirs.py"]
    for words, left_out, taken in (
        ([], left, ""),
        (["--config-from", mine], left[1:], "mine"),
        (["--allow-code"], [], "theirs"),
    ):
        out = tmp_path / f"out{len(list(tmp_path.iterdir()))}"
        result = as_json(cli, source, FSDP[1], out, *words)
        assert result["left_out"] == left_out
        assert any("--allow-code" in note for note in result["notes"]) is bool(left_out)
        config = json.loads((out / "config.json").read_text())
        code = f"modeling_{taken}"
        assert config.get("auto_map") == ({"AutoModel": f"{code}.X"} if taken else None)
        assert config["model_type"] == "llama"
        written = {path.name: path.read_text() for path in out.glob("*.py")}
        assert written == ({f"{code}.py": taken} if taken else {})
    said = cli("merge", source, FSDP[1], tmp_path / "out", "--dry-run").out
    assert f"code in a checkpoint may be malicious: {', '.join(left)};" in said


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ([FSDP[1], "{out}"], 3, "pytorch_model_fsdp_0/.metadata: not found"),
        ([*FSDP, "{out}", "--source", "zero"], 5, "source 'zero'"),
        ([str(DATA / "base"), "{out}"], 5, "no known checkpoint among these"),
        (["s3://", "{out}"], 2, "no bucket, host or path"),
        (["{out}/absent", "{out}"], 2, "no such directory"),
        ([*FSDP, "{out}", "--jobs", "0"], 2, "--jobs: expected at least 1, not 0"),
        ([*FSDP, "{out}", "--max-shard-size", "big"], 2, "--max-shard-size: 'big' is not a size"),
        ([*FSDP, "{out}", "--max-shard-size", "0"], 2, "at least one byte"),
        ([*FSDP, "{out}", "--config-from", "{out}/absent"], 2, "absent"),
    ],
)
def test_what_cannot_be_done_is_one_line_a_code_and_nothing_written(
    arguments: list[str], code: int, said: str, tmp_path: Path, cli: Cli
) -> None:
    out, err = cli("merge", *(a.format(out=tmp_path / "out") for a in arguments), code=code)
    assert out == ""
    assert err.startswith("ckptsync: error: ")
    assert said in err.splitlines()[0]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("jobs", ["1", "3"])
def test_jobs_change_nothing_but_the_time(jobs: str, tmp_path: Path, cli: Cli) -> None:
    one, other = (
        as_json(cli, *FSDP, tmp_path / str(len(given)), "--max-shard-size", "10KB", *given)
        for given in ((), ("--jobs", jobs))
    )
    assert one | {"destination": ""} == other | {"destination": ""}


def test_statistics_are_a_table_and_json(tmp_path: Path, cli: Cli) -> None:
    said = cli("merge", *FSDP, tmp_path / "one", "--statistics").out
    rows = [line.split() for line in said.splitlines()]
    heading = rows.index(["tensor", "min", "max", "norm", "nan", "infinite", "zero"])
    found = as_json(cli, *FSDP, tmp_path / "two", "--statistics")["statistics"]
    assert [row[0] for row in rows[heading + 1 : heading + 22]] == list(found)
    with safe_open(tmp_path / "two" / "model.safetensors", "np") as file:
        for name, told in found.items():
            values = file.get_tensor(name).astype("f8")
            assert (told["min"], told["max"]) == (values.min(), values.max())
            assert told["norm"] == pytest.approx(np.sqrt((values**2).sum()), rel=2e-6)
            assert (told["elements"], told["zeros"]) == (values.size, (values == 0).sum())
            assert (told["nan"], told["infinite"]) == (0, 0)


@pytest.mark.parametrize(
    ("vectors", "code", "said"),
    [
        ("hf-fsdp1 base", 0, "compared with the base model's 21 tensors"),
        ("hf-fsdp1 base-tied", 0, "are tied by the configuration, but differ: both are kept"),
        ("acc-fsdp2-bf16-tied base-tied", 0, "lm_head.weight is tied to model.embed_tokens.weight"),
        ("acc-fsdp2-bf16-tied base", 0, "compared with the base model's 21 tensors"),
        ("raw-ds-zero2-odd base", 3, "tensors are missing"),
        ("hf-fsdp2-lora hf-ddp/out/checkpoint-4", 0, "no adapter_config.json was found"),
        ("hf-fsdp2-lora dcp-fp8", 5, "vectors/dcp-fp8: no weights among its 1 files"),
        ("hf-fsdp1 peft-adapter/out", 5, "an adapter, a model is expected"),
    ],
)
def test_a_merge_is_compared_with_the_base_model_that_is_named(
    vectors: str, code: int, said: str, tmp_path: Path, cli: Cli
) -> None:
    source, base = (ROOT / name for name in vectors.split())
    sources = json.loads((source / "vector.json").read_text())["sources"]
    given = [str(source / name) for name in sources]
    captured = cli("merge", *given, tmp_path / "out", "--base", base, code=code)
    assert said in captured.out + captured.err
    assert (tmp_path / "out").exists() is (code == 0)


def model(directory: Path, *names: str, value: float) -> Path:
    directory.mkdir()
    save_file({n: np.full(2, value, "<f4") for n in names}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({"model_type": "llava"}))
    return directory


def test_frozen_tensors_and_names_come_from_a_model_that_is_named(tmp_path: Path, cli: Cli) -> None:
    base = model(tmp_path / "base", "language_model.model.w", "vision_tower.w", value=1)
    own = model(tmp_path / "own", "model.language_model.w", value=2)
    given = ("--fill-from", base, "--names-of", base, "--base", base)
    for place in ("out", "store"):  # a directory that appears, and one that is a store
        target = tmp_path / place if place == "out" else f"file://{tmp_path / place}"
        result = as_json(cli, own, target, *given)
        assert result["filled"] == ["vision_tower.w"]
        assert "1 of 2 tensors are the given model's" in " ".join(result["notes"])
        held = load_file(tmp_path / place / "model.safetensors")
        assert {n: list(v) for n, v in held.items()} == {
            "language_model.model.w": [2, 2],
            "vision_tower.w": [1, 1],
        }
    assert as_json(cli, own, tmp_path / "as-before")["filled"] == []
    assert names(tmp_path / "as-before/model.safetensors") == ["model.language_model.w"]
    (tmp_path / "empty").mkdir()
    said = cli("merge", own, tmp_path / "x", "--names-of", tmp_path / "empty", code=5).err
    assert "--names-of" in said


def test_an_adapter_into_its_base_ends_with_what_was_changed(tmp_path: Path, cli: Cli) -> None:
    base, out = tmp_path / "base", tmp_path / "out"
    tensors, module = write_base(base), Q.removesuffix(".weight")
    adapters = [write_adapter(tmp_path / f"{n}", pair(module, n)) for n in (1, 3)]
    words = [str(adapters[0]), str(adapters[1]), "--into", str(base)]
    planned = as_json(cli, *words, out, "--dry-run")
    assert planned["change"] == {"adapters": 2, "modules": 2, "tensors": 1}
    result = as_json(cli, *words, out)
    assert set(result["change"]["groups"]) == {"attention"}
    assert result["change"]["relative"] > 0
    found = read_model(out)
    changes = sum(delta(pair(module, n), module) for n in (1, 3))
    assert np.array_equal(found[Q], tensors[Q] + changes)
    shown = cli("merge", *words, tmp_path / "shown").out
    assert "change   2 modules, 1 tensors, by 2 adapters" in shown
    assert "attention: " in shown
    sized = as_json(cli, *words, tmp_path / "cut", "--max-shard-size", "3KB")
    assert len(sized["files"]) > len(result["files"])


def test_options_that_a_sum_has_not_are_refused(tmp_path: Path, cli: Cli) -> None:
    base, out = tmp_path / "base", str(tmp_path / "out")
    write_base(base)
    adapter = str(write_adapter(tmp_path / "adapter", pair(Q.removesuffix(".weight"), 1)))
    into = ["--into", str(base)]
    cli("merge", adapter, *into, out, "--engine", "ray", code=2)
    cli("merge", adapter, *into, out, "--base", base, code=2)
    for option in ("--fill-from", "--names-of"):
        said = cli("merge", adapter, *into, out, option, base, code=2).err
        assert f"merge BASE DST {option} DIR" in said
    cli("merge", adapter, out, "--changed-base", code=2)
    assert "a LoRA adapter is expected" in cli("merge", base, *into, out, code=5).err
    assert "its base is expected" in cli("merge", adapter, "--into", adapter, out, code=5).err
    assert not (tmp_path / "out").exists()
