"""The conversion into DeepSpeed's universal form: whole states, for any number of ranks."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings

import ckptsync
from ckptsync.cli.main import main
from ckptsync.errors import CkptsyncError, Corrupt, Incomplete, Unsupported
from ckptsync.merger.engine import Destination, write_model
from ckptsync.merger.plan import MergeOptions, MergeResources
from ckptsync.merger.universal_conversion import LATEST, prepare_universal
from tests.support.deepspeed_in_memory import TAG, changed, held, without
from tests.support.exhaustive import ALL
from tests.support.files_in_memory import MemoryFiles, contents, write_files
from tests.support.merge_in_memory import Written, run
from tests.support.zero_writer import Zero, files, own, values, zeros

DATA = Path(ckptsync.__file__).parent / "demo_data" / "zero3"
NODES = [str(DATA / node / "checkpoint-4") for node in ("node0", "node1")]
WEIGHT = {"w": values((3, 4), 0), "b": values((5,), 50)}
ADAM = {"exp_avg": 0.5, "exp_avg_sq": 0.25}


def converted(of: Any, jobs: int = 1, window: int = 1 << 20) -> dict[str, bytes]:
    written = Written()
    work = MergeResources(jobs, tensor_digests=False, window=window)
    job = prepare_universal(of, None, "tag")
    write_model(job, of, Destination(written.write), work=work)
    assert all(len(written[plan.name]) == plan.size for plan in job.plans)
    return written


def loaded(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)


@settings(max_examples=150 if ALL else 12)
@given(zeros())
def test_each_state_is_whole_for_any_number_of_ranks_and_groups(of: Zero) -> None:
    of = replace(of, states={"sum": 0.5} if of.extra else ADAM)
    written = converted(files(of))
    told = any(
        "exp_avg_sq at stage 3" in note for note in prepare_universal(files(of), None, "").notes
    )
    assert told == (of.stage == 3 and of.states != ADAM)
    root = of.root or "tag"
    models = {n: d for n, d in files(of).content.items() if n.endswith("_model_states.pt")}
    assert written.pop("latest_universal") == root.encode()
    for name, data in models.items():
        assert written.pop(f"{root}/{name.rpartition('/')[2]}") == data
    common = loaded(written.pop(f"{root}/zero/optimizer_state.pt"))
    assert common["param_groups"][0]["lr"] == 0.5
    found = {name.removeprefix(f"{root}/zero/"): loaded(data) for name, data in written.items()}
    for name, tensor in of.trained.items():
        for key, factor in {"fp32": 1.0, **of.states}.items():
            whole = found.pop(f"{name}/{key}.pt")
            if of.stage < 3:
                assert whole.pop("cat_dim") == 0
                whole = whole.pop("param").reshape(tensor.shape)
            assert same(whole, (tensor if of.stage < 3 else tensor.reshape(-1)) * factor)
        if of.stage < 3:
            assert same(found.pop(f"{name}/step.pt"), torch.tensor(3.0))
    if of.stage < 3:  # what else is in the module, but for integers
        module = loaded(next(iter(models.values())))["module"]
        names = [*of.frozen, *(n for n, stored in of.tied.items() if module[n] is not None)]
        for name in names:
            assert same(found.pop(f"{name}/fp32.pt")["param"], module[name].float())
    assert not found


def test_what_deepspeed_lets_all_groups_share_at_stage_3_is_said() -> None:
    of = Zero(3, 2, [WEIGHT], states=ADAM)
    rank = "zero_pp_rank_0_mp_rank_00_optim_states.pt"

    def notes(change: Callable[[dict[str, Any]], object]) -> str:
        def work(content: dict[str, Any]) -> None:
            change(content["optimizer_state_dict"]["optimizer_state_dict"])

        return " ".join(
            prepare_universal(changed(files(of), f"{of.root}/{rank}", work), None, "tag").notes
        )

    plain = {"lr": 0.5, "params": [0], "betas": (0.9, 0.99)}
    decayed = {**plain, "params": [1], "weight_decay": 0.1}
    shared = "2 groups of stage 3 share one step"
    assert shared not in notes(lambda _: None)
    assert shared in notes(lambda state: state["state"].update({1: state["state"][0]}))
    assert "of the first" not in notes(lambda state: state.update(param_groups=[plain, plain]))
    odd = notes(lambda state: state.update(param_groups=[plain, decayed]))
    assert "all parameter groups at stage 3 the weight_decay of the first" in odd
    notes(lambda state: state["state"].update({9: 1}))  # what no group has is not read


REAL = [
    *("raw-ds-zero1-bf16", "raw-ds-zero1-bf16-fp32acc", "raw-ds-zero1-frozen"),
    *("raw-ds-zero2-bf16-tied", "raw-ds-zero2-frozen", "raw-ds-zero2-odd", "acc-zero2-peft"),
    *("raw-ds-zero3-odd", "raw-ds-zero3-tied", "raw-ds-zero3-bf16-frozen", "acc-zero3"),
    *("hf-zero1", "hf-zero2", "hf-zero3-2node", "hf-zero3-lora"),
]


@pytest.mark.parametrize("name", REAL)
def test_a_real_checkpoint_and_its_conversion_merge_into_the_same_model(name: str) -> None:
    of = held(name)
    shards = prepare_universal(of, None, "tag").source
    written = MemoryFiles(converted(of, jobs=2, window=1 << 12))
    root = shards.partition(":")[2]
    names = {shards: of, f"universal:{root}": written}
    one, other = (run(f, MergeOptions("keep", source=s))[0] for s, f in names.items())
    assert {n: d for n, d in one.items() if n.endswith(".safetensors")} == {
        n: d for n, d in other.items() if n.endswith(".safetensors")
    }
    tops = {name for name in written.content if "/" not in name}
    assert not [n for n in tops if n.startswith(("model", "latest", "zero_")) and n != LATEST]


# What is refused


def altered(path: str, change: Callable[[dict[str, Any]], object]) -> Callable[[MemoryFiles], Any]:
    return lambda of: changed(of, f"{TAG}/{path}", change)  # type: ignore[arg-type]


MODEL, OPTIM = "mp_rank_00_model_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt"


def optimizer(change: Callable[[dict[str, Any]], object]) -> Callable[[MemoryFiles], Any]:
    return altered(OPTIM, lambda content: change(content["optimizer_state_dict"]))


def base(change: Callable[[dict[str, Any]], object]) -> Callable[[MemoryFiles], Any]:
    return optimizer(lambda state: change(state["base_optimizer_state"]["state"][0]))


BAD: dict[str, tuple[Callable[[MemoryFiles], Any], type[CkptsyncError], str]] = {
    "rank": (lambda of: without(of, f"{TAG}/{OPTIM}"), Incomplete, "zero_pp_rank_1"),
    "model": (lambda of: without(of, f"{TAG}/{MODEL}"), Incomplete, "model_states"),
    "dealt": (
        altered(
            MODEL, lambda m: m["ds_config"]["zero_optimization"].update(round_robin_gradients=True)
        ),
        Unsupported,
        "round_robin_gradients",
    ),
    "patterns": (
        altered(
            MODEL,
            lambda m: m.update(universal_checkpoint_info={"vocabulary_parameter_patterns": ["x"]}),
        ),
        Unsupported,
        "vocabulary_parameter_patterns",
    ),
    "experts": (altered(MODEL, lambda m: m.update(num_experts=[2])), Unsupported, "experts"),
    "tensor": (altered(MODEL, lambda m: m.update(mp_world_size=2)), Unsupported, "parallel"),
    "elastic": (
        optimizer(lambda state: state.update(base_optimizer_state=[{}])),
        Unsupported,
        "elastic_checkpoint",
    ),
    "number": (base(lambda s: s.update(mu=torch.tensor(0.5))), Unsupported, "mu is one number"),
    "rows": (base(lambda s: s.update(row=torch.ones(2))), Unsupported, "row does not have"),
    "step": (base(lambda s: s.update(step=torch.tensor(9.0))), Corrupt, "another step"),
    "absent": (base(lambda s: s.pop("exp_avg")), Corrupt, "no exp_avg"),
    "dtype": (base(lambda s: s.update(exp_avg=s["exp_avg"].half())), Corrupt, "element types"),
    "master": (base(lambda s: s.update(fp32=s["exp_avg"])), Corrupt, "no name"),
    "steps": (base(lambda s: s.update(step=s["exp_avg"])), Unsupported, "step does not have"),
    "path": (base(lambda s: s.update({"../x": s["exp_avg"]})), Corrupt, "no name"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_converted_is_refused_and_says_why(case: str) -> None:
    bad, error, words = BAD[case]
    of = files(Zero(2, 2, [WEIGHT], states=ADAM))
    assert converted(of)
    with pytest.raises(error) as raised:
        prepare_universal(bad(of), None, "tag")
    assert words in f"{raised.value} {raised.value.hint}"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("raw-ds-experts", "experts"),
        ("raw-ds-pipeline", "pipeline"),
        ("raw-ds-tensor", "tensor or pipeline"),
        ("raw-ds-universal", "already"),
        ("hf-fsdp2-2node", "does not depend on the number of ranks"),
        ("hf-ddp", "no shards of DeepSpeed"),
    ],
)
def test_other_layouts_are_refused_by_name(name: str, words: str) -> None:
    with pytest.raises(Unsupported, match=words):
        prepare_universal(held(name), None, "tag")


def test_of_several_tags_the_one_that_latest_names_is_converted_or_the_one_that_is_named() -> None:
    two = {
        n: d
        for root in ("global_step2", "global_step4")
        for n, d in files(Zero(2, 2, [WEIGHT], root=root)).content.items()
    }
    with pytest.raises(Unsupported, match="2 of that name"):
        prepare_universal(MemoryFiles(two), None, "tag")
    named = MemoryFiles({**two, "latest": b"global_step4\n"})
    assert prepare_universal(named, None, "tag").source == "zero:global_step4"
    assert prepare_universal(named, "zero:global_step2", "tag").source == "zero:global_step2"
    with pytest.raises(Unsupported, match="3"):
        prepare_universal(named, "zero:global_step3", "tag")


def test_a_file_of_several_units_is_written_whole_by_several_threads(tmp_path: Path) -> None:
    large = {"w": values((1200, 1031), 3), "b": WEIGHT["b"]}
    write_files(tmp_path / "in", files(Zero(2, 3, [large], states=ADAM)).content)
    assert command(tmp_path / "in", tmp_path / "out", "--jobs", 4) == 0
    for name, tensor in large.items():
        for key, factor in {"fp32": 1.0, **ADAM}.items():
            path = tmp_path / f"out/{TAG}/zero/{name}/{key}.pt"
            assert zipfile.ZipFile(path).testzip() is None
            assert same(loaded(path.read_bytes())["param"], tensor * factor)


# The command


def command(*words: object) -> int:
    return main(["convert", *map(str, words), "--to", "universal"])


def test_shards_of_two_nodes_become_one_universal_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(*NODES, tmp_path / "dry", "--dry-run", "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert not list(tmp_path.iterdir())
    assert command(*NODES, tmp_path / "out", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    sizes = {name: len(data) for name, data in contents(tmp_path / "out").items()}
    assert {f["path"]: f["bytes"] for f in result["files"]} == sizes
    assert {f["path"]: f["bytes"] for f in plan["files"]} == sizes
    assert (result["parameters"], result["states"]) == (21, ["exp_avg", "exp_avg_sq", "fp32"])
    assert {"trainer_state.json", LATEST} <= sizes.keys()
    assert (tmp_path / "out" / LATEST).read_text() == result["tag"] == "global_step4"
    assert main(["merge", str(tmp_path / "out"), str(tmp_path / "model")]) == 0
    capsys.readouterr()
    assert command(*NODES, tmp_path / "out") == 2  # it exists
    assert command(*NODES, "s3://bucket/x") == 2
    assert command(NODES[0], tmp_path / "half") == 3  # the other node's shards are missing
    assert command(tmp_path / "out", tmp_path / "again") == 5  # it is universal
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "out"]
    said = capsys.readouterr().err
    assert said.count("hint:") >= 3


def test_the_tag_alone_keeps_its_name_and_brings_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(*(f"{node}/global_step4" for node in NODES), tmp_path / "out") == 0
    assert "written: " in capsys.readouterr().out
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["global_step4", LATEST]


@pytest.mark.parametrize("kind", ["optim", "model"])
def test_a_flipped_byte_is_found_and_nothing_is_written(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_files(tmp_path / "in", files(Zero(2, 2, [WEIGHT], states=ADAM)).content)
    (path,) = (tmp_path / "in").rglob(MODEL if kind == "model" else OPTIM)
    data = bytearray(path.read_bytes())
    weight = own(WEIGHT["b"]).view(torch.int16) if kind == "model" else WEIGHT["b"] * 0.5
    at = data.find(weight.numpy().tobytes())
    assert at > 0
    data[at] ^= 1
    path.write_bytes(data)
    assert command(tmp_path / "in", tmp_path / "out") == 10
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in"]
    assert path.name in capsys.readouterr().err
