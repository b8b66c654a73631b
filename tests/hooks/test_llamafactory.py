from __future__ import annotations

import importlib.util
import json
import subprocess
from pathlib import Path

import pytest

from ckptsync.errors import ConfigError, Unsupported
from ckptsync.hooks import llamafactory
from ckptsync.hooks.llamafactory import check
from tests.hooks.training import commits
from tests.standing import PINS, ROOT, STAND_IN, ran

MODULE = ("-m", "ckptsync.hooks.llamafactory")


def train(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    (folder / "x.yaml").write_text(f"stage: sft\noutput_dir: {folder}/out\n")
    return ran(*MODULE, "train", f"{folder}/x.yaml", *words, cwd=ROOT, path=(STAND_IN, ROOT), **variables)


def test_one_process_trains_with_the_hook_and_the_arguments_are_llamafactorys(tmp_path: Path) -> None:
    done = train(tmp_path, "stage=rm")
    assert (done.returncode, done.stdout) == (0, f"trained with rm {tmp_path}/out\n")
    assert done.stderr == f"ckptsync: on: every save of {tmp_path}/out is kept until it is stored\n"
    assert set(commits(tmp_path / "out")) == PINS


def test_with_autoload_beside_it_the_hook_is_there_once(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("from ckptsync.hooks.autoload import begin; begin()\n")
    (tmp_path / "x.yaml").write_text(f"output_dir: {tmp_path}/out\n")
    done = ran(*MODULE, "train", f"{tmp_path}/x.yaml", path=(tmp_path, STAND_IN, ROOT), CKPTSYNC_AUTOLOAD="1")
    assert (done.returncode, done.stderr.count("ckptsync: "), done.stderr.count("ckptsync: on: ")) == (0, 1, 1)
    assert len(list((tmp_path / "out" / "_ckptsync" / "trains").iterdir())) == 1


def test_the_environment_names_a_store_and_how_long_to_wait_for_it(tmp_path: Path) -> None:
    assert train(tmp_path, CKPTSYNC_STORE=str(tmp_path / "store"), CKPTSYNC_WAIT="60").returncode == 0
    assert len(list((tmp_path / "store" / "out").glob("*/model.safetensors"))) == len(PINS)
    done = train(tmp_path, CKPTSYNC_STORE=str(tmp_path / "store"), CKPTSYNC_WAIT="soon")
    assert (done.returncode, done.stdout) == (2, "")
    assert "error: CKPTSYNC_WAIT: 'soon'" in done.stderr


@pytest.mark.parametrize(
    "variables", [{"STAND_IN_DEVICES": "2"}, {"FORCE_TORCHRUN": "1", "NPROC_PER_NODE": "2"}], ids=["devices", "forced"]
)
def test_several_devices_make_it_torchrun_which_starts_it_again(tmp_path: Path, variables: dict[str, str]) -> None:
    package = tmp_path / "torch" / "distributed"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package.parent / "__init__.py").touch()
    (package / "run.py").write_text("import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)])); sys.exit(7)")
    told = {"CKPTSYNC_STORE": "", "MASTER_PORT": "29511", **variables}
    done = ran(*MODULE, "train", "x.yaml", "a b=c", cwd=ROOT, path=(tmp_path, STAND_IN, ROOT), **told)
    assert done.returncode == 7, "the exit code is torchrun's"
    words, environment = json.loads(done.stdout)
    assert words[-5:] == ["-m", "ckptsync.hooks.llamafactory", "train", "x.yaml", "a b=c"]
    assert "--nproc-per-node 2 --master-addr 127.0.0.1 --master-port 29511" in " ".join(words)
    assert environment["TORCH_NCCL_AVOID_RECORD_STREAMS"] == "1"


def test_each_of_torchruns_ranks_trains_with_the_hook(tmp_path: Path) -> None:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    (tmp_path / "transformers.py").write_text("raise ImportError('a file of the user, in the directory where he trains')")
    (tmp_path / "x.yaml").write_text("output_dir: out\n")
    done = ran(*MODULE, "train", "x.yaml", cwd=tmp_path, FORCE_TORCHRUN="1", NPROC_PER_NODE="2", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert [set(commits(tmp_path / f"out{rank}")) for rank in (0, 1)] == [PINS, PINS]


def test_so_does_each_of_deepspeeds(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(f"output_dir: {tmp_path}/out\n")
    told = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "STAND_IN_DEVICES": "2"}
    done = ran(*MODULE, "--local_rank=1", "train", f"{tmp_path}/x.yaml", cwd=ROOT, path=(STAND_IN, ROOT), **told)
    assert (done.returncode, done.stderr.count("ckptsync: "), done.stderr.count("ckptsync: on: ")) == (0, 1, 1)
    assert set(commits(tmp_path / "out1")) == PINS


@pytest.mark.parametrize(
    ("words", "said"),
    [((), "nothing: only training"), (("chat", "x.yaml"), "chat: only training"), (("x.yaml",), "x.yaml: only training")],
)
def test_other_commands_are_refused(words: tuple[str, ...], said: str) -> None:
    done = ran(*MODULE, *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert "hint: llamafactory-cli" in done.stderr


def test_v1_is_refused_since_it_tells_nobody_of_its_saves(tmp_path: Path) -> None:
    done = train(tmp_path, USE_V1="1")
    assert (done.returncode, done.stdout) == (5, "")
    assert "USE_V1=1" in done.stderr
    assert "CHECKPOINT_COMPLETE" in done.stderr
    assert not (tmp_path / "out").exists()


def test_an_environment_without_llamafactory_is_refused(tmp_path: Path) -> None:
    if importlib.util.find_spec("llamafactory") is not None:
        pytest.skip("it is installed")
    done = ran(*MODULE, "train", "x.yaml", path=(ROOT,))
    assert (done.returncode, done.stdout) == (2, "")
    assert "LLaMA-Factory is not installed" in done.stderr


OTHERS = {
    "without the module": ("", "has another structure: No module named 'llamafactory.train.tuner'"),
    "without the function": ("def run(): pass\n", "has another structure: cannot import name 'run_exp'"),
    "whose function takes no callbacks": ("def run_exp(args=None): print('trained')\n", "run_exp takes no callbacks"),
}


@pytest.mark.parametrize(("source", "said"), OTHERS.values(), ids=OTHERS)
def test_another_llamafactory_is_refused_before_it_trains(tmp_path: Path, source: str, said: str) -> None:
    for package in ("llamafactory/extras", "llamafactory/train"):
        (tmp_path / package).mkdir(parents=True)
        (tmp_path / package / "__init__.py").touch()
    (tmp_path / "llamafactory" / "__init__.py").touch()
    (tmp_path / "llamafactory" / "extras" / "misc.py").write_text("def get_device_count(): return 1\n")
    if source:
        (tmp_path / "llamafactory" / "train" / "tuner.py").write_text(source)
    done = ran(*MODULE, "train", "x.yaml", path=(tmp_path, STAND_IN, ROOT))
    assert (done.returncode, done.stdout) == (5, ""), done.stderr
    assert said in done.stderr


def test_what_llamafactory_itself_lacks_is_its_own_to_say(tmp_path: Path) -> None:
    (tmp_path / "llamafactory").mkdir()
    (tmp_path / "llamafactory" / "__init__.py").write_text("import nothing_such\n")
    done = ran(*MODULE, "train", "x.yaml", path=(tmp_path, ROOT))
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "No module named 'nothing_such'" in done.stderr


@pytest.mark.parametrize("version", ["0.9.0", "0.9.5", "0.10.0.dev0", "1.0", ""])
def test_versions_that_take_callbacks_are_not_refused(version: str) -> None:
    check(("x.yaml",), {}, version)


def test_versions_before_them_are() -> None:
    with pytest.raises(Unsupported, match=r"LLaMA-Factory 0\.8\.3: 0\.9\.0 or later"):
        check(("x.yaml",), {}, "0.8.3")


REPORTED = [
    "report_to: ckptsync",
    "report_to: [wandb, ckptsync]",
    "report_to:\n  - wandb\n  - ckptsync\n",
    '{"report_to": "ckptsync", "a": 1}',
]
NOT_REPORTED = [
    "report_to: none\noutput_dir: /runs/ckptsync",
    '{"report_to": "none", "output_dir": "ckptsync"}',
    "report_to:\n- wandb\nrun_name: ckptsync",
]


@pytest.mark.parametrize("text", REPORTED)
def test_a_file_that_asks_to_report_to_us_is_told_that_it_need_not(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(ConfigError, match="report_to: ckptsync"):
        check((str(tmp_path / "x.yaml"),), {}, "0.9.5")


def test_so_are_words_of_the_command_line() -> None:
    for words in (("x.yaml", "report_to=ckptsync"), ("--stage", "sft", "--report_to", "ckptsync")):
        with pytest.raises(ConfigError, match="report_to: ckptsync"):
            check(words, {}, "0.9.5")


@pytest.mark.parametrize("text", NOT_REPORTED)
def test_our_name_elsewhere_is_no_matter(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.yaml").write_text(text)
    check((str(tmp_path / "x.yaml"),), {}, "0.9.5")


NODE = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29501"}
WHERE = {
    "two nodes": (NODE, "--nnodes 2 --node-rank 1 --nproc-per-node 8 --master-addr 10.0.0.1 --master-port 29501"),
    "fewer processes than devices": (
        {"NPROC_PER_NODE": "2", "MASTER_PORT": "1"},
        "--nnodes 1 --node-rank 0 --nproc-per-node 2 --master-addr 127.0.0.1 --master-port 1",
    ),
    "variables that are empty": (
        {"NNODES": "", "NODE_RANK": "", "NPROC_PER_NODE": " ", "MASTER_ADDR": "", "RDZV_ID": "", "MASTER_PORT": "1"},
        "--nnodes 1 --node-rank 0 --nproc-per-node 8 --master-addr 127.0.0.1 --master-port 1",
    ),
    "the first of two nodes": (
        {"NNODES": "2", "NODE_RANK": "0", "MASTER_PORT": "1"},
        "--nnodes 2 --node-rank 0 --nproc-per-node 8 --master-addr 127.0.0.1 --master-port 1",
    ),
    "as many nodes as come": (
        {"RDZV_ID": "job", "MIN_NNODES": "1", "MAX_NNODES": "4", "MASTER_PORT": "1"},
        "--nnodes 1:4 --nproc-per-node 8 --rdzv-id job --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:1 --max-restarts 0",
    ),
    "a meeting by name": (
        {**NODE, "RDZV_ID": "job", "MAX_RESTARTS": "3"},
        "--nnodes 2 --nproc-per-node 8 --rdzv-id job --rdzv-backend c10d --rdzv-endpoint 10.0.0.1:29501 --max-restarts 3",
    ),
    "any number of nodes": (
        {**NODE, "RDZV_ID": "job", "MIN_NNODES": "1", "MAX_NNODES": "4"},
        "--nnodes 1:4 --nproc-per-node 8 --rdzv-id job --rdzv-backend c10d --rdzv-endpoint 10.0.0.1:29501 --max-restarts 0",
    ),
}


@pytest.mark.parametrize(("environment", "words"), WHERE.values(), ids=WHERE)
def test_torchrun_is_told_what_llamafactory_tells_it(environment: dict[str, str], words: str) -> None:
    assert " ".join(llamafactory.torchrun_options(environment, 8)) == words


def test_one_node_takes_a_port_that_is_free() -> None:
    *_, port = llamafactory.torchrun_options({}, 0)
    assert 1024 < int(port) < 65536
    assert "--nproc-per-node 1 " in " ".join(llamafactory.torchrun_options({}, 0)), (
        "a machine without devices trains on its processor"
    )


LOST = [
    ({**NODE, "MASTER_ADDR": ""}, "MASTER_ADDR: not set, and NODE_RANK=1"),
    ({**NODE, "MASTER_PORT": ""}, "MASTER_PORT: not set, and NODE_RANK=1"),
    ({"NODE_RANK": "1"}, "MASTER_ADDR and MASTER_PORT: not set, and NODE_RANK=1"),
    ({"NNODES": "2"}, "MASTER_PORT: not set, and NNODES=2"),
    ({"NNODES": "2", "RDZV_ID": "job", "MASTER_PORT": "1"}, "MASTER_ADDR: not set, and NNODES=2"),
    ({"MIN_NNODES": "2", "MAX_NNODES": "4", "RDZV_ID": "job"}, "MASTER_ADDR and MASTER_PORT: not set, and NNODES=2:4"),
]


@pytest.mark.parametrize(("environment", "said"), LOST)
def test_nodes_that_could_never_meet_are_refused(environment: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        llamafactory.torchrun_options(environment, 1)


WANTED = [
    ({}, 2),
    ({"FORCE_TORCHRUN": "1"}, 0),
    ({"FORCE_TORCHRUN": "true"}, 1),
    ({"USE_MCA": "1"}, 1),
    ({"USE_RAY": "1", "FORCE_TORCHRUN": "1"}, 8),
]
UNWANTED = [({}, 0), ({}, 1), ({"FORCE_TORCHRUN": "0"}, 1), ({"USE_RAY": "1"}, 8), ({"USE_KT": "1"}, 8)]


@pytest.mark.parametrize(("environment", "devices"), WANTED)
def test_several_processes_are_wanted_where_llamafactory_wants_them(environment: dict[str, str], devices: int) -> None:
    assert llamafactory.needs_torchrun(environment, devices)


@pytest.mark.parametrize(("environment", "devices"), UNWANTED)
def test_and_nowhere_else(environment: dict[str, str], devices: int) -> None:
    assert not llamafactory.needs_torchrun(environment, devices)


def test_a_rank_that_a_launcher_has_started_is_known() -> None:
    assert llamafactory.is_rank({"TORCHELASTIC_RUN_ID": "none", "LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "2"})
    assert llamafactory.is_rank({"CROSS_RANK": "0", "LOCAL_RANK": "1", "RANK": "1", "WORLD_SIZE": "2"}), "by DeepSpeed's"


@pytest.mark.parametrize("said", [{}, {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1"}, {"LOCAL_RANK": "0"}])
def test_what_a_cluster_says_of_a_node_is_no_rank(said: dict[str, str]) -> None:
    assert not llamafactory.is_rank(said)


def test_the_processes_get_what_llamafactory_gives_them() -> None:
    given = llamafactory.torchrun_environment({"HOME": "/root"})
    assert given == {"HOME": "/root", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "TORCH_NCCL_AVOID_RECORD_STREAMS": "1"}
    assert llamafactory.torchrun_environment({"OPTIM_TORCH": "0"}) == {"OPTIM_TORCH": "0"}
