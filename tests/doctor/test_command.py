"""`ckptsync doctor` as an operator has it: on one node, and between two."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from ckptsync.cli.main import main
from ckptsync.doctor import published_facts
from ckptsync.errors import StoreError
from tests.doctor.real import SOUND_MACHINE, doctor, environment, kinds, needs_namespaces

PORT = str(20000 + os.getpid() % 12000)  # which no other process of these tests has
SHIFTED = Path(__file__).parents[1] / "campaigns/shifted_clock.c"
VERSIONS = {
    "torch": "2.8.0",
    "transformers": "4.57.1",
    "accelerate": "1.11.0",
    "nvidia-nccl-cu12": "2.27.3",
}


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    return environment(tmp_path_factory.mktemp("venv"), VERSIONS)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    (tmp_path / "store").mkdir()
    return tmp_path / "store"


def config(tmp_path: Path, **more: str) -> Path:
    (tmp_path / "out/run").mkdir(parents=True, exist_ok=True)
    runs = f"worker: {{runs: [{{path: {tmp_path}/out/*}}]}}"
    lines = [f"store: {{url: {tmp_path}/store}}", runs, *(f"{k}: {v}" for k, v in more.items())]
    path = tmp_path / "worker.yaml"
    path.write_text("\n".join(lines))
    return path


Ask = Callable[..., dict[str, Any]]


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Ask:
    """Run doctor in this process; what it prints as JSON."""

    def asked(*words: object) -> dict[str, Any]:
        code = main(["doctor", "--json", *map(str, words)])
        told: dict[str, Any] = json.loads(capsys.readouterr().out)
        assert told["exit_code"] == code
        return told

    return asked


@pytest.fixture
def publish(ask: Ask, store: Path, python: str) -> Ask:
    return lambda *words: ask("--publish", "--store", store, "--python", python, *words)


SOUND = (
    "hostname {node}; mkdir -p {home}/{node} {home}/out; mount --bind {home}/{node} {home}/out\n"
    f"{SOUND_MACHINE}"
)


def sound(home: Path, node: int, python: str) -> dict[str, Any]:
    """A node of two that publishes its facts, with a disk and a name of its own."""
    said = {
        "NNODES": "2",
        "NODE_RANK": str(node),
        "NPROC_PER_NODE": "1",
        "MASTER_ADDR": address(),
        "MASTER_PORT": PORT,
        "GLOO_SOCKET_IFNAME": interface(),
    }
    given = ["--publish", "--store", home / "store", "--node", f"n{node}", "--python", python]
    given += ["--output-dir", home / "out/run"]
    return doctor(given, SOUND.format(home=home, node=f"n{node}"), **said)


def address() -> str:
    """Of this machine in its network; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as trial:
        try:
            trial.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine is in no network")
        return str(trial.getsockname()[0])


def interface() -> str:
    """One that is up."""
    names = [name for _, name in socket.if_nameindex() if name != "lo"]
    found = [
        name
        for name in names
        if Path(f"/sys/class/net/{name}/operstate").read_text().strip() in ("up", "unknown")
    ]
    return found[0] if found else pytest.skip("this machine is in no network")


@needs_namespaces
def test_nothing_is_found_on_a_sound_pair(store: Path, tmp_path: Path, python: str) -> None:
    for node in (0, 1):
        told = sound(tmp_path, node, python)
        assert (told["findings"], told["published"]) == ([], f".ckptsync/launches/n{node}.json")
    compared = doctor(["--store", store])
    assert (compared["findings"], compared["nodes"], compared["exit_code"]) == ([], ["n0", "n1"], 0)
    assert sorted(p.name for p in (store / ".ckptsync").iterdir()) == ["launches"]


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory, python: str) -> Path:
    """Where a sound n0 has said what it is, and n1 may say anything."""
    home = tmp_path_factory.mktemp("pair")
    (home / "store").mkdir()
    assert sound(home, 0, python)["findings"] == []
    return home


def test_nodes_that_published_are_compared_and_one_that_did_not_is_missing(
    store: Path, ask: Ask, publish: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish("--node", "n0")
    told = ask("--store", store)
    assert ("one-node" in kinds(told), told["exit_code"]) == (True, 0)
    monkeypatch.setenv("NNODES", "1")
    publish("--node", "n0")
    assert "one-node" not in kinds(ask("--store", store)), "it trains alone"
    monkeypatch.setenv("NNODES", "2")
    publish("--node", "n0")
    assert "nodes-missing" in kinds(ask("--store", store))


def test_facts_that_cannot_be_read_are_found(store: Path, ask: Ask, publish: Ask) -> None:
    publish()
    (store / ".ckptsync/launches/n5.json").write_text("[1]")
    told = ask("--store", store)
    (one,) = [f for f in told["findings"] if f["kind"] == "unreadable-facts"]
    assert ("--publish" in one["hint"], told["exit_code"]) == (True, 2)


def test_a_store_that_goes_after_publishing_is_a_finding_beside_the_others(
    publish: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    def go(*_: object) -> NoReturn:
        raise StoreError("no answer")

    monkeypatch.setattr(published_facts, "read_living", go)
    told = publish("--nodes", "--python", "/nowhere")
    assert (kinds(told), told["exit_code"]) == (["python", "unreadable-facts"], 4)
    assert told["published"]


def test_a_node_whose_id_another_machine_has_is_not_published(store: Path, publish: Ask) -> None:
    publish("--node", "n0")
    file = store / ".ckptsync/launches/n0.json"
    clone = {"boot": "of another machine", "host": "clone"}
    file.write_text(json.dumps(json.loads(file.read_text()) | clone))
    told = publish("--node", "n0")
    assert (kinds(told), told["exit_code"], told["published"]) == (["not-published"], 2, None)


def test_a_configuration_that_is_wrong_is_a_finding(tmp_path: Path, ask: Ask) -> None:
    told = ask("-c", config(tmp_path, verify="{level: much}"))
    assert (kinds(told), told["exit_code"]) == (["configuration"], 2)
    assert "verify.level" in told["findings"][0]["what"]


@needs_namespaces
def test_a_store_that_is_read_only_is_found_and_is_the_stores_exit_code(
    store: Path, tmp_path: Path
) -> None:
    told = doctor(
        ["-c", config(tmp_path), "--python", sys.executable],
        f"mount --bind {store} {store}; mount -o remount,ro,bind {store}",
    )
    assert "store-create" in kinds(told)
    assert told["exit_code"] == 4
    assert "mount it for writing" in " ".join(f["hint"] for f in told["findings"])


@needs_namespaces
def test_a_store_that_is_not_mounted_is_found(store: Path, tmp_path: Path, python: str) -> None:
    (tmp_path / "fstab").write_text(f"# ours\nhead:/srv {store} nfs4 hard 0 0\n")
    told = doctor(
        ["-c", config(tmp_path), "--python", python], f"mount --bind {tmp_path}/fstab /etc/fstab"
    )
    assert [(f["kind"], f["subject"]) for f in told["findings"] if f["kind"] == "not-mounted"] == [
        ("not-mounted", str(store))
    ]
    assert told["exit_code"] == 4
    there = f"mount --bind {tmp_path}/fstab /etc/fstab; mount -t tmpfs -o size=1g tmpfs {store}"
    assert "not-mounted" not in kinds(doctor(["-c", config(tmp_path), "--python", python], there))


def test_a_new_store_is_made_by_a_node_that_publishes_and_by_nobody_else(
    tmp_path: Path, python: str, ask: Ask
) -> None:
    ask("-c", config(tmp_path), "--python", python)
    assert not (tmp_path / "store").exists()
    assert ask("-c", config(tmp_path), "--python", python, "--publish")["published"]
    assert (tmp_path / "store/.ckptsync/store.json").is_file()


def test_a_store_that_was_served_and_has_gone_is_not_made_anew(
    tmp_path: Path, python: str, ask: Ask
) -> None:
    file = config(tmp_path)
    (tmp_path / "out/run/_ckptsync").mkdir()
    (tmp_path / "out/run/_ckptsync/store").write_text(f"{tmp_path}/store\n")
    told = ask("-c", file, "--python", python, "--publish")
    assert (kinds(told), told["exit_code"]) == (["store-absent"], 4)
    assert not (tmp_path / "store").exists()


def test_variables_of_the_services_own_file_are_heeded(
    store: Path, tmp_path: Path, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPTSYNC_VERIFY_LEVEL", "digest")
    (tmp_path / "worker.env").write_text("CKPTSYNC_VERIFY_LEVEL=much\n")
    assert kinds(ask("-c", config(tmp_path))) == ["configuration"]
    assert store.is_dir()


def test_the_python_that_trains_gets_no_keys_of_the_service(
    tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch, ask: Ask
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "before")
    told, trains = tmp_path / "told", tmp_path / "python"
    trains.write_text(f'#!/bin/sh\nenv > {told}\nexec {sys.executable} "$@"\n')
    trains.chmod(0o755)
    source = config(tmp_path)
    source.with_suffix(".env").write_text("AWS_SECRET_ACCESS_KEY=hunter2\n")
    ask("-c", source, "--python", trains)
    assert "PATH=" in told.read_text()
    assert os.environ["AWS_SECRET_ACCESS_KEY"] == "hunter2"
    assert "AWS_SECRET_ACCESS_KEY=before" in told.read_text()
    assert store.is_dir()


def test_settings_that_are_known_to_go_wrong_are_found(
    store: Path, tmp_path: Path, ask: Ask
) -> None:
    versions = {"transformers": "5.15.0", "llamafactory": "0.9.2", "ray": "2.54.0"}
    old, training = environment(tmp_path / "old", versions), tmp_path / "x.yaml"
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 3}}')
    training.write_text(
        "save_on_each_node: true\ndeepspeed: ds.json\noutput_dir: saves/x\nray_run_name: x\n"
    )
    told = ask("-c", config(tmp_path), "--python", old, "--training", training)
    wanted = {"save-on-each-node", "ray-destroys-twice", "zero3-no-model", "output-relative"}
    assert wanted <= set(kinds(told))
    assert store.is_dir()


@pytest.mark.parametrize("given", ["--output-dir", "yaml", "script"])
def test_an_output_directory_that_no_worker_looks_at_is_found(
    given: str,
    store: Path,
    tmp_path: Path,
    *,
    python: str,
    ask: Ask,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    training = tmp_path / ("launch.sh" if given == "script" else "x.yaml")
    for name, is_seen in (("out/new", True), ("saves/new", False)):
        training.write_text(
            f"torchrun t.py --output_dir {name}" if given == "script" else f"output_dir: {name}"
        )
        words = ["--output-dir", name] if given == "--output-dir" else ["--training", training]
        told = ask("-c", config(tmp_path), "--python", python, *words)
        assert [f["subject"] for f in told["findings"] if f["kind"] == "run-left-out"] == (
            [] if is_seen else [str(tmp_path / name)]
        )
        assert told["exit_code"] == (0 if is_seen else 2)
    assert "worker.runs" in told["findings"][0]["hint"]
    assert store.is_dir()


def test_a_directory_that_others_may_write_to_is_found_by_root_too(
    store: Path, tmp_path: Path, python: str, ask: Ask
) -> None:
    file = config(tmp_path)
    (tmp_path / "out/run").chmod(0o777)
    (found,) = ask("-c", file, "--python", python)["findings"]
    assert (found["kind"], found["hint"].split(",")[0]) == (
        "run-left-out",
        f"chmod o-w {tmp_path}/out/run",
    )
    assert store.is_dir()


def test_what_was_not_checked_is_said_and_how_it_is(
    store: Path,
    tmp_path: Path,
    python: str,
    *,
    ask: Ask,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("CKPTSYNC_STORE", raising=False)
    little = ask("--python", python)["not_checked"]
    assert "the store (-c CONFIG, or CKPTSYNC_STORE)" in little
    assert "output directories (--output-dir DIR, or --training FILE)" in little
    assert main(["doctor", "--python", python]) == 0
    assert "\nno problems found on " in capsys.readouterr().out
    (tmp_path / "l.sh").write_text("torchrun t.py --output_dir $1\n")
    told = ask("-c", config(tmp_path), "--python", python, "--training", tmp_path / "l.sh")
    assert any("only a shell knows $1" in what for what in told["not_checked"])
    assert not any("configuration" in what for what in told["not_checked"])
    assert store.is_dir()


def test_a_training_file_that_cannot_be_read_is_not_the_services_fault(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "-c", str(config(tmp_path)), "--training", "/gone.yaml"]) == 2
    assert capsys.readouterr().err.startswith("ckptsync: error: /gone.yaml: cannot be read")


def test_a_python_that_cannot_be_asked_or_has_no_torch_is_a_finding(
    store: Path, tmp_path: Path, ask: Ask
) -> None:
    assert kinds(ask("--publish", "--store", store, "--python", "/nowhere")) == ["python"]
    bare = environment(tmp_path / "venv", {"ray": "2.55.0"})
    told = ask("--publish", "--store", store, "--python", bare)
    assert "no-torch" in kinds(told)
    assert (told["python"], told["versions"]) == (str(tmp_path / "venv"), {"ray": "2.55.0"})


def test_the_python_of_a_head_is_not_asked(store: Path, tmp_path: Path, ask: Ask) -> None:
    told = ask("-c", config(tmp_path, roles="[head]"), "--python", "/nowhere")
    assert (told["findings"], told["python"]) == ([], None)
    assert store.is_dir()


def test_without_a_store_or_a_node_that_spoke_there_is_nothing_to_compare(
    store: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CKPTSYNC_STORE", raising=False)
    assert main(["doctor", "--nodes"]) == 2
    assert main(["doctor", "--store", str(store)]) == 2
    assert "ckptsync doctor --publish" in capsys.readouterr().err
    assert main(["doctor", "--store", str(store), "--fresh", "soon"]) == 2
    assert main(["doctor", "--fresh", "yesterday"]) == 2  # where nothing is compared, too


def test_warnings_are_printed_and_end_with_0_unless_strict(
    tmp_path: Path, python: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "worker.yaml").write_text(
        f"store: {{url: {tmp_path}/gone/store}}\nworker: {{runs: [{{path: {tmp_path}/soon}}]}}\n"
    )
    words = ["doctor", "-c", str(tmp_path / "worker.yaml"), "--python", python]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert re.search(
        r"^WARN  \S+: .*store: not found\n      why: .*\n      hint: .*mount", text, re.MULTILINE
    )
    assert re.search(r"^0 failures, \d+ warnings?: ", text, re.MULTILINE)
    assert main([*words, "--strict"]) == 1


def test_a_node_that_cannot_publish_fails(tmp_path: Path, python: str, ask: Ask) -> None:
    (tmp_path / "file").touch()
    told = ask("--publish", "--store", tmp_path / "file/store", "--python", python)
    assert (kinds(told), told["exit_code"], told["published"]) == (["store-unreachable"], 2, None)


@needs_namespaces
def test_a_store_without_room_for_two_of_the_newest_is_found(
    store: Path, tmp_path: Path, python: str
) -> None:
    (tmp_path / "out/run/checkpoint-1").mkdir(parents=True)
    with (tmp_path / "out/run/checkpoint-1/model.safetensors").open("wb") as file:
        file.truncate(200 << 20)
    told = doctor(
        ["-c", config(tmp_path), "--python", python], f"mount -t tmpfs -o size=300m tmpfs {store}"
    )
    assert [f["subject"] for f in told["findings"] if f["kind"] == "disk-full"] == [str(store)]


@pytest.mark.skipif(not shutil.which("cc"), reason="no compiler")
def test_nodes_are_compared_also_by_one_whose_own_clock_is_hours_off(
    beside: Path, tmp_path: Path, python: str
) -> None:
    library, ahead = tmp_path / "shifted.so", tmp_path / "seconds"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(SHIFTED)], check=True)
    sound(beside, 1, python)
    ahead.write_bytes((7200).to_bytes(8, sys.byteorder))
    shifted = {"LD_PRELOAD": str(library), "SHIFTED_CLOCK": str(ahead)}
    for words in ([], ["--publish", "--nodes", "--node", "n1", "--python", python]):
        told = doctor(["--store", beside / "store", *words], **shifted)
        assert told["nodes"] == ["n0", "n1"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes directories of others")
@pytest.mark.parametrize("what", ["store", "out", "model"])
def test_what_this_user_cannot_reach_is_found_and_said_in_our_words(
    what: str, tmp_path: Path, python: str
) -> None:
    for name in ("store", "out", "model"):
        (tmp_path / name).mkdir()
    os.chown(tmp_path / what, 12345, 12345)
    (tmp_path / what).chmod(0o700)
    (tmp_path / "worker.yaml").write_text(
        f"store: {{url: {tmp_path}/store/x}}\n"
        f"worker: {{runs: [{{path: {tmp_path}/out/x}}, {{path: {tmp_path}/out/y/*}}]}}\n"
    )
    words = ["-c", tmp_path / "worker.yaml", "--publish", "--python", python]
    words += ["--model", tmp_path / "model/x"]
    told = doctor(words, within=["setpriv", "--bounding-set=-dac_override,-dac_read_search"])
    wanted = {"store": ["asked-as-root"], "out": ["configuration"], "model": []}[what]
    assert [f["kind"] for f in told["findings"] if f["level"] == "fail"] == wanted
    assert bool(told["published"]) == (not wanted)


def test_a_password_in_a_stores_url_is_not_told(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["--store"], ["--publish", "--store"], ["--nodes", "--store"]):
        assert main(["doctor", "--json", *words, "s3://me:s3cret@bucket"]) == 2
        told = capsys.readouterr()
        assert "s3cret" not in told.out + told.err


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes directories of others")
def test_root_tries_nothing_in_directories_of_other_users(tmp_path: Path, python: str) -> None:
    for uid in (65534, 12345):
        (tmp_path / f"out{uid}").mkdir()
        os.chown(tmp_path / f"out{uid}", uid, uid)
    words = [word for uid in (65534, 12345) for word in ("--output-dir", tmp_path / f"out{uid}")]
    told = doctor([*words, "--python", python])
    assert [f["kind"] for f in told["findings"]] == ["asked-as-root"] * 2
    assert all("doctor skipped it" in f["why"] for f in told["findings"])
    assert not any(path for uid in (65534, 12345) for path in (tmp_path / f"out{uid}").iterdir())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes directories of others")
def test_root_makes_nothing_in_a_store_of_another_user(tmp_path: Path, python: str) -> None:
    (tmp_path / "store").mkdir()
    os.chown(tmp_path / "store", 65534, 65534)
    told = doctor(
        ["--publish", "--store", tmp_path / "store", "--python", python, "--output-dir", tmp_path]
    )
    assert ([f["kind"] for f in told["findings"] if f["level"] == "fail"], told["published"]) == (
        ["asked-as-root"],
        None,
    )
    assert list((tmp_path / "store").iterdir()) == []
