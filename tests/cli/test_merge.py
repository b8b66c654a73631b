"""``ckptsync merge`` as a transcript, on the demo's real shards."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

import ckptsync
from ckptsync.cli.main import main

DATA = Path(ckptsync.__file__).parent / "demo_data"
FSDP = [str(DATA / "fsdp2" / node / "checkpoint-4") for node in ("node0", "node1")]
ZERO = [str(DATA / "zero3" / node / "checkpoint-4") for node in ("node0", "node1")]


def names(path: Path) -> list[str]:
    with safe_open(path, "np") as f:
        return sorted(f.keys())


@pytest.mark.parametrize("sources", [FSDP, ZERO], ids=["fsdp2", "zero3"])
def test_shards_of_two_nodes_become_one_model(
    sources: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(["merge", *sources, str(tmp_path / "out"), "--config-from", str(DATA / "base")]) == 0
    )
    said = capsys.readouterr().out
    assert f"written: {len(list((tmp_path / 'out').iterdir()))} files" in said
    assert "(21 F32)" in said
    assert len(names(tmp_path / "out" / "model.safetensors")) == 21
    assert (tmp_path / "out" / "config.json").exists()


def test_json_tells_what_was_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            [
                "merge",
                *FSDP,
                str(tmp_path / "out"),
                "--json",
                "--dtype",
                "bf16",
                "--max-shard-size",
                "10KB",
            ]
        )
        == 0
    )
    result = json.loads(capsys.readouterr().out)
    assert result["dtypes"] == {"BF16": 21}
    assert {file["path"]: file["size"] for file in result["files"]} == {
        p.name: p.stat().st_size for p in (tmp_path / "out").iterdir()
    }
    assert len(result["files"]) >= 3
    assert "no config.json" in result["notes"][0]


def test_a_dry_run_says_the_same_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for dry in (["--dry-run"], []):
        assert main(["merge", *ZERO, str(tmp_path / "out"), "--json", *dry]) == 0
        assert (tmp_path / "out").exists() is not bool(dry)
    planned, written = map(json.loads, capsys.readouterr().out.splitlines())
    assert {f["path"]: f["size"] for f in planned["files"]} == {
        f["path"]: f["size"] for f in written["files"]
    }
    assert (planned["tensors"], planned["bytes"], planned["source"]) == (
        written["tensors"],
        written["bytes"],
        written["source"],
    )


def with_code(directory: Path, name: str) -> Path:
    """A configuration that leads to code, in the checkpoint or beside it."""
    directory.mkdir(exist_ok=True)
    config = json.loads((DATA / "base" / "config.json").read_text())
    (directory / "config.json").write_text(
        json.dumps(config | {"auto_map": {"AutoModel": f"modeling_{name}.X"}})
    )
    (directory / f"modeling_{name}.py").write_text(name)
    return directory


def test_code_in_a_checkpoint_is_left_out_and_said_and_code_that_is_named_is_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = with_code(Path(shutil.copytree(FSDP[0], tmp_path / "checkpoint-4")), "theirs")
    mine = with_code(tmp_path / "mine", "mine")
    left = ["config.json: auto_map", "modeling_theirs.py"]
    for number, (more, left_out, auto_map, code) in enumerate(
        (
            ([], left, None, {}),
            (
                ["--config-from", str(mine)],
                left[1:],
                {"AutoModel": "modeling_mine.X"},
                {"modeling_mine.py": "mine"},
            ),
            (
                ["--allow-code"],
                [],
                {"AutoModel": "modeling_theirs.X"},
                {"modeling_theirs.py": "theirs"},
            ),
        )
    ):
        out = tmp_path / f"out{number}"
        assert main(["merge", str(source), FSDP[1], str(out), "--json", *more]) == 0
        result = json.loads(capsys.readouterr().out)
        assert result["left_out"] == left_out
        assert any("--allow-code" in note for note in result["notes"]) is bool(left_out)
        config = json.loads((out / "config.json").read_text())
        assert config.get("auto_map") == auto_map
        assert config["model_type"] == "llama"
        assert {path.name: path.read_text() for path in out.glob("*.py")} == code
    assert main(["merge", str(source), FSDP[1], str(tmp_path / "out"), "--dry-run"]) == 0
    assert (
        f"not copied, since code in a checkpoint may be malicious: {', '.join(left)};"
        in capsys.readouterr().out
    )


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
    arguments: list[str], code: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["merge", *(a.format(out=tmp_path / "out") for a in arguments)]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("ckptsync: error: ")
    assert said in err.splitlines()[0]
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("x")
    assert main(["merge", *FSDP, str(tmp_path / "out")]) == 2
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["precious"]
    assert "exists" in capsys.readouterr().err


@pytest.mark.parametrize("jobs", ["1", "3"])
def test_jobs_change_nothing_but_the_time(
    jobs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = []
    for location, given in (("one", []), ("two", ["--jobs", jobs])):
        assert (
            main(
                [
                    "merge",
                    *FSDP,
                    str(tmp_path / location),
                    "--json",
                    "--max-shard-size",
                    "10KB",
                    *given,
                ]
            )
            == 0
        )
        results.append(json.loads(capsys.readouterr().out) | {"destination": ""})
    assert results[0] == results[1]


def test_statistics_are_a_table_and_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["merge", *FSDP, str(tmp_path / "one"), "--statistics"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (heading,) = (
        n
        for n, line in enumerate(lines)
        if line.split() == ["tensor", "min", "max", "norm", "nan", "infinite", "zero"]
    )
    assert main(["merge", *FSDP, str(tmp_path / "two"), "--statistics", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["statistics"]
    assert [line.split()[0] for line in lines[heading + 1 : heading + 22]] == list(found)
    with safe_open(tmp_path / "two" / "model.safetensors", "np") as file:
        for name, told in found.items():
            values = file.get_tensor(name).astype("f8")
            assert (told["min"], told["max"], told["elements"]) == (
                values.min(),
                values.max(),
                values.size,
            )
            assert told["norm"] == pytest.approx(np.sqrt((values**2).sum()), rel=1e-12)
            assert (told["nan"], told["infinite"], told["zeros"]) == (0, 0, (values == 0).sum())


VECTORS = Path(__file__).parent.parent / "vectors"


@pytest.mark.parametrize(
    ("vectors", "code", "said"),
    [
        (("hf-fsdp1", "base"), 0, "compared with the base model's 21 tensors"),
        (("hf-fsdp1", "base-tied"), 0, "are tied by the configuration, but differ: both are kept"),
        (
            ("acc-fsdp2-bf16-tied", "base-tied"),
            0,
            "lm_head.weight is tied to model.embed_tokens.weight",
        ),
        (("acc-fsdp2-bf16-tied", "base"), 0, "compared with the base model's 21 tensors"),
        (("raw-ds-zero2-odd", "base"), 3, "tensors are missing"),
        (("hf-fsdp2-lora", "hf-ddp/out/checkpoint-4"), 0, "no adapter_config.json was found"),
        (("hf-fsdp2-lora", "dcp-fp8"), 5, "no known checkpoint among these"),
        (("hf-fsdp1", "peft-adapter/out"), 5, "an adapter, a model is expected"),
    ],
)
def test_a_merge_is_compared_with_the_base_model_that_is_named(
    vectors: tuple[str, str],
    code: int,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    vector, base = (VECTORS / name for name in vectors)
    given = [
        str(vector / source)
        for source in json.loads((vector / "vector.json").read_text())["sources"]
    ]
    assert main(["merge", *given, str(tmp_path / "out"), "--base", str(base)]) == code
    captured = capsys.readouterr()
    assert said in captured.out + captured.err
    assert (tmp_path / "out").exists() is (code == 0)
