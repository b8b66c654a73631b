"""What a machine says of itself, without a library imported and without a secret."""

import ast
import json
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ckptsync.doctor import probe
from tests.doctor.real import environment


def test_it_runs_in_a_python_that_has_nothing_of_ours_and_imports_no_library(
    tmp_path: Path,
) -> None:
    python = environment(
        tmp_path / "venv",
        {"torch": "2.8.0", "nvidia-nccl-cu12": "2.27.3", "transformers": "4.57.1"},
    )
    watched = [python, "-v", probe.__file__, json.dumps({"node": "n0"})]
    done = subprocess.run(watched, capture_output=True, text=True, check=True, cwd=tmp_path)
    told = json.loads(done.stdout)
    assert told["node"] == "n0"
    assert told["versions"] == {"torch": "2.8.0", "transformers": "4.57.1", "nccl": "2.27.3"}
    assert told["builds"] == {"cuda": "12.8"}
    assert told["prefix"] == str(tmp_path / "venv")
    assert "import 'torch" not in done.stderr
    assert "import 'ckptsync" not in done.stderr


def test_it_knows_this_machine() -> None:
    told = probe.gather()
    assert (told["host"], told["node"]) == (socket.gethostname(), socket.gethostname())
    assert told["python"].startswith(f"{sys.version_info[0]}.{sys.version_info[1]}.")
    for key, name in (("state", "operstate"), ("mtu", "mtu")):
        assert told["interfaces"]["lo"][key] == Path("/sys/class/net/lo", name).read_text().strip()
    assert told["limits"]["nofile"] > 0
    assert told["cpus"] > 0
    assert told["boot"]
    assert 0 < told["booted"] < told["at"]
    json.dumps(told)


def test_of_the_environment_only_what_tells_nodes_of_each_other_is_said_and_nothing_secret() -> (
    None
):
    said = {
        "NNODES": "2",
        "NCCL_IB_HCA": "mlx5",
        "TORCH_NCCL_BLOCKING_WAIT": "1",
        "HF_TOKEN": "hf_1",
        "AWS_SECRET_ACCESS_KEY": "s",
        "PATH": "/bin",
        "NCCL_PLUGIN_TOKEN": "t",
        "NCCL_AUTH": "a",
        "GLOO_PASSWORD": "p",
        "NCCL_NET_URL": "https://user:pw@host",
        "NCCL_X": "u:p@h",
        "NCCL_LONG": "x" * 999,
    }
    assert probe.read_variables(said) == {
        "NCCL_IB_HCA": "mlx5",
        "NCCL_LONG": "x" * 200,
        "NNODES": "2",
        "TORCH_NCCL_BLOCKING_WAIT": "1",
    }


def test_what_nccls_own_files_say_counts_unless_the_environment_does(tmp_path: Path) -> None:
    (tmp_path / "nccl.conf").write_text(
        "# ours\nNCCL_IB_DISABLE=1\nNCCL_DEBUG=WARN\nNCCL_SECRET=x\nAWS_KEY=y\n"
    )
    told = probe.read_variables(
        {"NCCL_CONF_FILE": str(tmp_path / "nccl.conf"), "NCCL_DEBUG": "INFO"}
    )
    assert told == {
        "NCCL_CONF_FILE": str(tmp_path / "nccl.conf"),
        "NCCL_DEBUG": "INFO",
        "NCCL_IB_DISABLE": "1",
    }


def test_another_nccl_is_found_where_the_loader_would_find_it(tmp_path: Path) -> None:
    real = tmp_path / "libnccl.so.2.21.5"
    real.touch()
    (tmp_path / "libnccl.so.2").symlink_to(real)
    assert probe.find_overrides({"LD_LIBRARY_PATH": f"/nowhere:{tmp_path}:relative"}) == [str(real)]
    assert probe.find_overrides({"LD_PRELOAD": f"/lib/libc.so {tmp_path}/libnccl.so.2"}) == [
        str(real)
    ]
    assert probe.find_overrides({}) == []


def test_two_nodes_see_each_others_word_where_the_disk_is_one(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for made in (False, True):
        if made:
            out.mkdir()
        first, second = (
            probe.gather([str(out)], node)["output_dirs"][str(out)] for node in ("n0", "n1")
        )
        assert first["nonce"] in second["seen"]
        assert second["nonce"] not in first["seen"], "it was not there yet"
    assert sorted(p.name for p in (out / "_ckptsync/doctor").iterdir()) == ["n0", "n1"]


def test_words_are_left_first_and_looked_for_later_where_nodes_gather_at_once(
    tmp_path: Path,
) -> None:
    place = str(tmp_path / "out")
    left = {node: probe.leave([place], node) for node in ("n0", "n1")}
    for node in left:
        told = probe.gather([place], node, tokens=left[node])["output_dirs"][place]
        assert set(told["seen"]) == {word[place] for word in left.values()}


def test_a_place_where_nothing_can_be_written_has_no_word(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "out").mkdir()
    (tmp_path / "out/_ckptsync").touch()
    assert probe.leave([str(tmp_path / "out"), "/no such directory/out"], "n0") == {}
    assert probe.gather([str(tmp_path / "out")], "n0")["output_dirs"] == {
        str(tmp_path / "out"): {"nonce": "", "seen": []}
    }


def test_a_models_digest_is_of_its_configuration_and_its_files(tmp_path: Path) -> None:
    assert probe.gather(model=str(tmp_path))["digest"] == ""
    (tmp_path / "config.json").write_text("{}")
    first = probe.gather(model=str(tmp_path))["digest"]
    (tmp_path / "model.safetensors").write_bytes(b"1")
    second = probe.gather(model=str(tmp_path))["digest"]
    (tmp_path / "config.json").write_text('{"a": 1}')
    assert len({first, second, probe.gather(model=str(tmp_path))["digest"], ""}) == 4


def master() -> tuple[object, ...]:
    told = probe.gather()
    return told["master"], told["is_master"], told["port"]


def test_the_masters_port_is_free_or_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("MASTER_PORT", str(server.getsockname()[1]))
        assert master() == (["127.0.0.1"], True, "taken")
    assert master() == (["127.0.0.1"], True, "free")
    monkeypatch.setenv("NODE_RANK", "1")  # which does not listen there, and so does not try
    assert master() == (["127.0.0.1"], True, "refused")
    monkeypatch.setenv("MASTER_ADDR", "no.such.host.invalid")
    assert master() == ([], False, "")


@pytest.mark.parametrize(
    ("addresses", "state"),
    [
        (["192.0.2.1"], "silent"),
        (["198.51.100.1"], "unreachable"),
        (["198.51.100.1", "192.0.2.1", "203.0.113.1"], "refused"),
    ],
)
def test_the_best_answer_of_the_masters_addresses_counts(
    addresses: list[str], state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = {"192.0.2.1": TimeoutError, "203.0.113.1": ConnectionRefusedError}

    def connect(where: tuple[str, int], _patience: float) -> None:
        raise errors.get(where[0], OSError)

    monkeypatch.setenv("MASTER_ADDR", "master")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setattr(probe, "_addresses", lambda _host: addresses)
    monkeypatch.setattr(socket, "create_connection", connect)
    assert master() == (addresses, False, state)


VERSION = """NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build  \
(dvs-builder@U16)  Wed Feb 26 02:06:59 UTC 2025
GCC version:  gcc version 12.3.0
"""


def test_nvidias_driver_is_asked_by_its_own_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "NVIDIA", tmp_path)
    for slot, model in (("0000:0a:00.0", "NVIDIA L4"), ("0000:01:00.0", "NVIDIA H200")):
        (tmp_path / "gpus" / slot).mkdir(parents=True)
        (tmp_path / "gpus" / slot / "information").write_text(
            f"Model: \t\t {model}\nIRQ:   \t\t 0\nGPU UUID: \t GPU-1\n"
        )
    (tmp_path / "version").write_text(VERSION)
    told = probe.gather()
    assert (told["gpus"], told["driver"]) == (["NVIDIA H200", "NVIDIA L4"], "570.124.06")


def test_where_a_container_hides_those_files_nvidia_smi_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(
        '#!/bin/sh\ncase "$1" in --query-gpu=name) echo "NVIDIA H200"; echo "NVIDIA H200";; *) echo'
        " 570.124.06; echo 570.124.06;; esac\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(probe, "NVIDIA", tmp_path / "none")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    told = probe.gather()
    assert (told["gpus"], told["driver"]) == (["NVIDIA H200"] * 2, "570.124.06")
    program.write_text("#!/bin/sh\nexit 9\n")
    assert probe.gather()["gpus"] == [], "a driver that does not answer"


def test_it_is_written_in_words_that_python_3_8_knows() -> None:
    source = Path(probe.__file__).read_text()
    ast.parse(source, feature_version=(3, 8))
    assert not [
        word
        for word in (
            "removeprefix",
            "removesuffix",
            "parents[",
            "is_relative_to",
            "strict=True",
            "slots=True",
        )
        if word in source
    ]


def test_a_name_that_nobody_answers_for_in_time_is_not_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answered = threading.Event()
    monkeypatch.setattr(probe, "_LOOKUP", 0.1)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_args, **_kinds: answered.wait(60) and [])
    assert probe._addresses("slow") == []
    answered.set()


def test_a_model_with_a_link_to_nothing_has_a_digest(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "gone")
    assert probe.gather(model=str(tmp_path))["digest"]


def test_no_limit_is_minus_one() -> None:
    ask = (
        "import resource as r; r.setrlimit(r.RLIMIT_MEMLOCK, (r.RLIM_INFINITY,) * 2); from"
        " ckptsync.doctor.probe import gather; print(gather()['limits']['memlock'])"
    )
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=False)
    if "not allowed" in done.stderr:
        pytest.skip("only root may raise it")
    assert done.stdout == "-1\n", done.stderr


def test_an_interface_tells_whether_it_has_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    assert probe.gather()["interfaces"]["lo"]["address"] == "yes"
    for name, scope, expected in (("x", "00", "yes"), ("x", "20", "no"), ("y", "00", "no")):
        listed = f"fe800000000000000000000000000001 02 40 {scope} 80 {name}\n"
        monkeypatch.setattr(probe, "_text", lambda _, listed=listed: listed)
        assert probe._address("x") == expected, "one of its own link alone reaches nobody"
