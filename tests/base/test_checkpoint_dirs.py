"""Which checkpoints a scan finds, under which names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ckptsync.checkpoint_dirs import (
    ListedCheckpoint,
    checkpoint_dir_at,
    checkpoint_name,
    family_of,
    find_checkpoint_dirs,
    find_strays,
    list_checkpoint,
    output_dirs_of,
    uncovered,
)
from ckptsync.safe_names import checked_path


def lay(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(name.encode())


def names(root: Path) -> dict[str, tuple[str, list[str]]]:
    return {
        f.name: (f.family, [s.path for s in f.files])
        for f in map(list_checkpoint, find_checkpoint_dirs(root))
    }


FOUND: dict[str, dict[str, tuple[str, list[str]]]] = {
    """checkpoint-4/trainer_state.json checkpoint-12/.tmpabcdef tmp-checkpoint-9/x latest model.bin
    global_step7/zero_pp_rank_0_mp_rank_00_optim_states.pt checkpoint/step-3/.metadata runs/events
    checkpoints/checkpoint_0/model.safetensors checkpoint-best/model.bin
    _ckptsync/pins/checkpoint-4.0/files/x""": {
        "checkpoint-12": ("trainer", []),
        "checkpoint-4": ("trainer", ["trainer_state.json"]),
        "checkpoint_0": ("accelerate", ["model.safetensors"]),
        "global_step7": ("deepspeed", ["zero_pp_rank_0_mp_rank_00_optim_states.pt"]),
        "step-3": ("dcp", [".metadata"]),
    },
    "step-1/log.txt step-2/__0_0.distcp step-3/model_1.pt step-4/model.pt": {
        "step-2": ("dcp", ["__0_0.distcp"]),
        "step-3": ("dcp", ["model_1.pt"]),
    },
    "checkpoint_0/a checkpoints/checkpoint_0/b": {
        "checkpoint_0": ("accelerate", ["a"]),
        "checkpoints.checkpoint_0": ("accelerate", ["b"]),
    },
    "global_step_7/actor/model_world_size_2_rank_0.pt global_step_8/log.txt": {
        "global_step_7": ("verl", ["actor/model_world_size_2_rank_0.pt"])
    },
    "iter_0000002/.metadata iter_0000004/__8_0.distcp iter_0000006/log.txt": {
        "iter_0000002": ("dcp", [".metadata"]),
        "iter_0000004": ("dcp", ["__8_0.distcp"]),
    },
    "run-0/checkpoint-4/a run-1/checkpoint-4/b run-1/logs/c": {
        "run-0.checkpoint-4": ("trainer", ["a"]),
        "run-1.checkpoint-4": ("trainer", ["b"]),
    },
    """epoch=0-step=5.ckpt lightning_logs/version_0/checkpoints/epoch=0-step=5.ckpt .ckpt
    lightning_logs/version_0/x.csv lightning_logs/version_1/checkpoints/last.ckpt/meta.pt
    checkpoints/epoch=1-step=10-loss=0.12.ckpt lightning_logs/version_x/checkpoints/a.ckpt""": {
        "epoch-0-step-5.ckpt": ("lightning", ["epoch=0-step=5.ckpt"]),
        "version_0.epoch-0-step-5.ckpt": ("lightning", ["epoch=0-step=5.ckpt"]),
        "version_1.last.ckpt": ("lightning", ["meta.pt"]),
        "epoch-1-step-10-loss-0.12.ckpt": ("lightning", ["epoch=1-step=10-loss=0.12.ckpt"]),
    },
    """config.json training_args.bin optimizer.bin model/model.safetensors
    checkpoints/global_step7/mp_rank_00_model_states.pt""": {},
    "checkpoint/mp_rank_00_model_states.pt": {},
    "": {},
}
STEPS = {"iter_0000002": 2, "epoch-0-step-5.ckpt": 5, "epoch-1-step-10-loss-0.12.ckpt": 10}


@pytest.mark.parametrize("files", FOUND)
def test_every_family_is_found_and_nothing_else(files: str, tmp_path: Path) -> None:
    lay(tmp_path, *files.split())
    assert names(tmp_path) == FOUND[files]
    steps = {c.name: c.step for c in find_checkpoint_dirs(tmp_path) if c.name in STEPS}
    assert steps.items() <= STEPS.items()


ONE_FILE_EACH = {
    "verl": """model_world_size_16_rank_8.pt optim_world_size_2_rank_1.pt data_3.pt
        dist_ckpt/__8_0.distcp model.safetensors""",
    "deepspeed": """expp_rank_1_mp_rank_00_optim_states.pt layer_03-model_states.pt
        layer_0_expert_4_mp_rank_00_model_states.pt expert_4_mp_rank_00_model_states.pt
        layer_03-model_01-model_states.pt bf16_zero_pp_rank_3_mp_rank_01_optim_states.pt""",
    "final": """source.spm bpe.codes dict.txt prophetnet.tokenizer tokenizer.model
        qwen.tiktoken""",
}


@pytest.mark.parametrize(("family", "files"), ONE_FILE_EACH.items(), ids=ONE_FILE_EACH)
def test_each_file_alone_says_whose_the_directory_is(
    family: str, files: str, tmp_path: Path
) -> None:
    where = {"verl": "global_step_7", "deepspeed": "global_step7", "final": ""}[family]
    for number, file in enumerate(files.split()):
        root = tmp_path / str(number)
        lay(root, f"{where}/{file}".removeprefix("/"), "logs/layer_0.txt")
        if family == "final":  # a vocabulary belongs to the model in the root
            lay(root, "model.safetensors")
        listed = sorted([file, *["model.safetensors"] * (family == "final")])
        assert names(root) == {where or "final": (family, listed)}


TAGS = ["Logs", "my tag", "a\nb", "consolidated", "final", "x~y", "-", "ü" * 50]
OF_LIGHTNING = [["a b.ckpt"], ["\n.ckpt"], ["é=1.ckpt"], ["x" * 120 + ".ckpt"]]
OF_LIGHTNING.append(["step=1.ckpt", "step-1.ckpt", "checkpoints/step=1.ckpt"])


@pytest.mark.parametrize(
    "files",
    [
        *([f"{t}/mp_rank_00_model_states.pt", f"{t} /mp_rank_00_model_states.pt"] for t in TAGS),
        *OF_LIGHTNING,
    ],
)
def test_any_name_becomes_one_plain_component_and_no_two_become_the_same(
    files: list[str], tmp_path: Path
) -> None:
    lay(tmp_path, *files)
    plain = list(names(tmp_path))
    assert len(plain) == len(files)
    for name in plain:
        assert checked_path(name) == name
        assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name)
        assert name.casefold() not in ("consolidated", "final", "logs")
        assert family_of(name) == ("lightning" if files in OF_LIGHTNING else "deepspeed")


def test_links_to_checkpoints_are_not_followed(tmp_path: Path) -> None:
    lay(tmp_path, "real/trainer_state.json", "real/a.ckpt", "out/lightning_logs/version_0/hparams")
    for name in ("checkpoint-1", "lightning_logs/version_0/checkpoints"):
        (tmp_path / "out" / name).symlink_to(tmp_path / "real")
    (tmp_path / "out" / "a.ckpt").symlink_to(tmp_path / "real" / "a.ckpt")
    assert find_checkpoint_dirs(tmp_path / "out") == ()


def test_a_checkpoint_is_known_by_itself(tmp_path: Path) -> None:
    lay(tmp_path, "out/checkpoint-4/a", "out/tag/mp_rank_00_model_states.pt")
    checkpoint_dir = checkpoint_dir_at(tmp_path / "out" / "checkpoint-4")
    assert checkpoint_dir is not None
    assert (checkpoint_dir.name, checkpoint_dir.family, checkpoint_dir.step) == (
        "checkpoint-4",
        "trainer",
        4,
    )
    assert checkpoint_dir_at(tmp_path / "out") is None
    assert uncovered(checkpoint_dir.path, [checkpoint_dir]) == ()


def test_what_vanishes_during_the_scan_was_not_there(tmp_path: Path) -> None:
    lay(tmp_path, "checkpoint-4/a")
    gone = find_checkpoint_dirs(tmp_path)[0]
    (tmp_path / "checkpoint-4" / "a").unlink()
    (tmp_path / "checkpoint-4").rmdir()

    assert list_checkpoint(gone) == ListedCheckpoint(
        "checkpoint-4", "trainer", gone.path, (), (), ()
    )


def test_the_model_in_the_root_is_found_without_checkpoints_logs_and_spool(tmp_path: Path) -> None:
    model = """README.md chat_template.jinja config.json model-00001-of-00002.safetensors
        model-00002-of-00002.safetensors training_args.bin vocab.txt""".split()  # noqa: SIM905
    others = """trainer_log.jsonl nohup.out running_log.txt checkpoint-4/model.safetensors
        _ckptsync/x.json x.pt runs/events.json""".split()  # noqa: SIM905
    lay(tmp_path, *model, *others)
    assert list(names(tmp_path)) == ["checkpoint-4", "final"]
    assert names(tmp_path)["final"] == ("final", model)
    rest = ("nohup.out", "running_log.txt", "runs/", "trainer_log.jsonl", "x.pt")
    assert uncovered(tmp_path, find_checkpoint_dirs(tmp_path)) == rest


def test_adapters_in_directories_of_their_names_are_a_final_model(tmp_path: Path) -> None:
    lay(tmp_path, "policy/adapter_model.safetensors", "policy/adapter_config.json", "README.md")
    lay(tmp_path, "a b/adapter_model.bin", "checkpoint-4/adapter_model.safetensors")
    lay(
        tmp_path, "run-1/adapter_model.bin", "runs/events.json", "x.json/y", "checkpoint-4 (copy)/x"
    )
    lay(tmp_path, "checkpoint-4 (copy)/adapter_model.bin")
    found = names(tmp_path)
    assert list(found) == ["checkpoint-4", "final"]
    assert found["final"] == (
        "final",
        [
            "README.md",
            "a b/adapter_model.bin",
            "policy/adapter_config.json",
            "policy/adapter_model.safetensors",
        ],
    )
    assert "policy/" not in uncovered(tmp_path, find_checkpoint_dirs(tmp_path))


def test_a_checkpoint_given_as_a_run_and_a_model_of_links_are_no_final_model(
    tmp_path: Path,
) -> None:
    lay(tmp_path, "checkpoint-4/model.safetensors", "blob")
    assert find_checkpoint_dirs(tmp_path / "checkpoint-4") == ()
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "model.safetensors").symlink_to(tmp_path / "blob")
    assert find_checkpoint_dirs(tmp_path / "cache") == ()


def test_the_directories_of_trainers_with_several_models_and_starts_are_searched(
    tmp_path: Path,
) -> None:
    state = "mp_rank_00_model_states.pt"
    files = f"""global_step_4/policy/model_world_size_2_rank_0.pt weights/step_4/STABLE
        checkpoints/step_4/trainer/.metadata v0-20260801-093000/checkpoint-4/a
        v1-20260801-103000/checkpoint-4/a _actor/global_step4/{state}
        _actor/actor.global_step2/{state} _critic/best_global_step4/{state}
        checkpoints_sft/global_step4/{state}"""
    lay(tmp_path, *files.split())
    # nothing of the trainer yet; another's directory; what only looks like one
    lay(tmp_path, "checkpoints/step_6/orchestrator/progress.pt", "_others/global_step4/" + state)
    lay(tmp_path, "broadcasts/step_6/STABLE", "step_8/log.txt", "v1/checkpoint-4/a")
    lay(tmp_path, "tmp_step-6/model_0.pt", "tmp_step-6/metadata.pkl")
    assert {name: family for name, (family, _) in names(tmp_path).items()} == {
        "actor.global_step2": "deepspeed",
        "actor.global_step4": "deepspeed",
        "critic.best_global_step4": "deepspeed",
        "global_step_4": "verl",
        "checkpoints_sft.global_step4": "deepspeed",
        "step_4": "prime-rl",
        "v0-20260801-093000.checkpoint-4": "trainer",
        "v1-20260801-103000.checkpoint-4": "trainer",
        "weights.step_4": "prime-rl",
    }
    for found in find_checkpoint_dirs(tmp_path):
        assert checkpoint_name(tmp_path, found.path) == found.name
        assert family_of(found.name) == found.family
        assert (tmp_path, found) in output_dirs_of(found.path)
        assert found.step in (2, 4)


def test_whose_it_is_follows_from_its_name_alone(tmp_path: Path) -> None:
    files = """checkpoint-1/a checkpoint_0/a checkpoints/checkpoint_0/b step-1/.metadata a=1.ckpt
        global_step_1/actor/x global_step1/mp_rank_00_model_states.pt run-0/checkpoint-4/a"""
    lay(tmp_path, *files.split(), "adapter_model.bin")
    found = find_checkpoint_dirs(tmp_path)
    assert len(found) == 9
    assert [family_of(s.name) for s in found] == [s.family for s in found]


def test_ray_s_dates_are_numbers_that_grow(tmp_path: Path) -> None:
    lay(
        tmp_path,
        "checkpoint_2026-11-21_14-00-59.000123/checkpoint/x",
        "checkpoint_2026-11-21_14-01-00.900000/x",
        "checkpoint_best/x",
    )
    assert [(s.family, family_of(s.name), s.step) for s in find_checkpoint_dirs(tmp_path)] == [
        ("accelerate", "accelerate", 20261121140059000123),
        ("accelerate", "accelerate", 20261121140100900000),
    ]


def test_a_path_is_found_from_every_directory_whose_scan_finds_it_nearest_first(
    tmp_path: Path,
) -> None:
    lay(
        tmp_path,
        "checkpoints/checkpoint_3/model.safetensors",
        "lightning_logs/version_0/checkpoints/a.ckpt",
        "model.safetensors",
    )
    told = {
        path: [
            (home, checkpoint_dir.name) for home, checkpoint_dir in output_dirs_of(tmp_path / path)
        ]
        for path in ("checkpoints/checkpoint_3", "notes", ".")
    }
    assert told == {
        "checkpoints/checkpoint_3": [
            (tmp_path / "checkpoints", "checkpoint_3"),
            (tmp_path, "checkpoint_3"),
        ],
        "notes": [],
        ".": [(tmp_path, "final")],
    }
    logged = tmp_path / "lightning_logs" / "version_0" / "checkpoints" / "a.ckpt"
    assert [(home, checkpoint_dir.name) for home, checkpoint_dir in output_dirs_of(logged)] == [
        (logged.parent, "a.ckpt"),
        (logged.parent.parent, "a.ckpt"),
        (tmp_path, "version_0.a.ckpt"),
    ]


def test_a_name_is_known_before_there_is_anything_of_the_checkpoint(tmp_path: Path) -> None:
    files = """checkpoint-1/x run-3/checkpoint-2/x checkpoints/checkpoint_4/x step-5/.metadata
        checkpoints/epoch=1.ckpt lightning_logs/version_7/checkpoints/last.ckpt"""
    lay(tmp_path, *files.split(), "a tag/mp_rank_00_model_states.pt")
    found = [(s.path / "".join(s.only or ()), s.name) for s in find_checkpoint_dirs(tmp_path)]
    assert len(found) == 7
    assert [(path, checkpoint_name(tmp_path, path)) for path, _ in found] == found


def test_weights_that_are_in_no_checkpoint_are_found_and_nothing_else(tmp_path: Path) -> None:
    lay(tmp_path, "checkpoint-4/model.safetensors", "model.safetensors", "config.json")
    lay(tmp_path, "runs/host/events.out", "logs/train.log", "eval/results.json", "_tmp/x.bin")
    lay(tmp_path, "served/_ckptsync/store", "served/checkpoint-1/model.safetensors")
    assert find_strays(tmp_path) == {}
    lay(tmp_path, "step-2/weights.npz", "orbax/100/default/d/a", "orbax/100/_CHECKPOINT_METADATA")
    lay(tmp_path, "checkpoints/iter_0000100/mp_rank_00/model_optim_rng.pt", "m.gguf")
    lay(tmp_path, "checkpoints/step=1.nemo", "best/model.safetensors")
    assert find_strays(tmp_path) == {
        "best": "model.safetensors",
        "checkpoints/iter_0000100": "mp_rank_00/model_optim_rng.pt",
        "checkpoints/step=1.nemo": "step=1.nemo",
        "m.gguf": "m.gguf",
        "orbax": "100/_CHECKPOINT_METADATA",
        "step-2": "weights.npz",
    }
