"""``ckptsync push`` as a transcript."""

import json
import os
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

import ckptsync
from ckptsync.catalogue.cached import cache_path
from ckptsync.cli.main import main
from ckptsync.cli.push import counted, notes
from tests.support.command_line import Cli

VECTORS = Path(__file__).parents[1] / "vectors"
FSDP = Path(ckptsync.__file__).parent / "demo_data" / "fsdp2"
SHARD, OPTIMIZER = "pytorch_model_fsdp_0/__0_0.distcp", "optimizer_0/__0_0.distcp"


def test_a_checkpoint_is_sent_once(tmp_path: Path, cli: Cli) -> None:
    store = str(tmp_path / "store")
    for sent in ("sent, 7 files, 223 KB", "sent, the store had every file already"):
        said = cli("push", FSDP / "node0", "--store", store, "--run", "a", "--node", "n0").out
        assert f"a/checkpoint-4: {sent}" in said


def as_json(cli: Cli, *words: object) -> dict[str, Any]:
    printed: dict[str, Any] = cli("push", *words, "--json").json
    return printed


def test_a_configuration_that_comes_later_is_sent_alone_and_once(tmp_path: Path, cli: Cli) -> None:
    out, store = tmp_path / "sft", tmp_path / "store"
    shutil.copytree(VECTORS / "hf-fsdp1/out/checkpoint-4", out / "checkpoint-4")
    cli("push", out, "--store", store)
    config = (VECTORS / "base/config.json").read_text()
    for content, files in ((config, 1), (f"{config}\n", 0)):
        (out / "config.json").write_text(content)
        [sent] = as_json(cli, out, "--store", store)["checkpoints"]
        assert (sent["location"], sent["files"]) == ("checkpoint-4", files)
    assert (store / "sft/checkpoint-4/config.json").read_text() == config


def test_a_dry_run_counts_what_was_chosen_and_makes_no_store(tmp_path: Path, cli: Cli) -> None:
    words = (FSDP / "node0" / "checkpoint-4", "--store", tmp_path / "store", "--dry-run")
    [planned] = as_json(cli, *words)["checkpoints"]
    assert (planned["run"], planned["phase"], planned["files"]) == ("node0", "would be sent", 7)
    [weights] = as_json(cli, *words, "--send", "weights")["checkpoints"]
    assert planned["files"] > weights["files"] > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["{tmp}/absent", "--store", "{tmp}/s"], 2, "no such directory"),
        (
            ["{data}/node0/checkpoint-4/trainer_state.json", "--store", "{tmp}/s"],
            2,
            "not a directory",
        ),
        (["{tmp}", "--store", "{tmp}/s"], 2, "no checkpoint in it"),
        (["{data}/node0", "--store", "{tmp}/s", "--node", "a/b"], 2, "--node: 'a/b'"),
        (["{data}/node0", "--store", "{tmp}/s", "--run", "../up"], 2, "up"),
    ],
)
def test_what_cannot_be_sent_is_one_line_and_a_code(
    arguments: list[str], code: int, said: str, tmp_path: Path, cli: Cli
) -> None:
    words = [a.format(tmp=tmp_path, data=FSDP) for a in arguments]
    assert said in cli("push", *words, code=code).err.splitlines()[0]
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_that_is_torn_is_not_sent(tmp_path: Path, cli: Cli) -> None:
    shutil.copytree(FSDP / "node0", tmp_path / "out")
    (tmp_path / "out" / "checkpoint-4" / "trainer_state.json").write_text('{"global_step": 4')
    said = cli("push", tmp_path / "out", "--store", tmp_path / "store", code=3).err
    assert "trainer_state.json" in said
    assert not (tmp_path / "store" / "out").exists()


def test_progress_counts_each_byte_once_though_some_are_read_twice() -> None:
    told: list[tuple[int, int]] = []
    passed = counted(lambda done, total: told.append((done, total)), 100)
    for count in (50, 50, -50, 50, 50):
        passed(count)
    assert told == [(50, 100), (100, 100), (50, 100), (100, 100), (100, 100)]


@pytest.mark.parametrize(
    ("url", "count"),
    [("memory://x", 1), ("webdav://x", 1), ("s3://b/x", 0), ("sftp://h/x", 0), ("/mnt/x", 0)],
)
def test_a_store_that_continues_nothing_is_said_to_be_one(url: str, count: int) -> None:
    assert len(notes(url)) == count


def configured(tmp_path: Path, more: str = "send: weights") -> Path:
    """A worker's configuration, whose output directory holds one checkpoint."""
    shutil.copytree(FSDP / "node0", tmp_path / "jobs" / "sft" / "out")
    config = tmp_path / "worker.yaml"
    config.write_text(
        "node: n7\n"
        f"store: {{url: {tmp_path}/store}}\n"
        "limits: {threads: 2}\n"
        "worker:\n"
        f"  runs: [{{path: '{tmp_path}/jobs/*/out'}}]\n"
        f"  {more}\n"
    )
    return config


def test_a_configuration_says_where_to_under_which_names_and_what(tmp_path: Path, cli: Cli) -> None:
    result = as_json(cli, tmp_path / "jobs/sft/out", "-c", configured(tmp_path))
    [sent] = result["checkpoints"]
    assert (result["store"], sent["run"], sent["phase"]) == (f"{tmp_path}/store", "sft", "sent")
    [manifest] = (tmp_path / "store" / "sft" / ".ckptsync").rglob("manifest-n7-*")
    files = {f["path"] for f in json.loads(manifest.read_bytes())["files"]}
    assert SHARD in files
    assert not any("optimizer" in path for path in files if path.endswith(".distcp"))


@pytest.mark.parametrize(
    ("flags", "there", "absent"),
    [
        (["--send", "all"], OPTIMIZER, "none"),
        (["--send", "all", "--exclude", "optimizer_*/*"], SHARD, OPTIMIZER),
        (["--include", "*.json"], "trainer_state.json", SHARD),
    ],
)
def test_flags_go_before_the_configuration(
    flags: list[str], there: str, absent: str, tmp_path: Path, cli: Cli
) -> None:
    words = ["push", str(tmp_path / "jobs/sft/out"), "-c", str(configured(tmp_path))]
    assert "mine/checkpoint-4: sent" in cli(*words, "--run", "mine", "--node", "n1", *flags).out
    stored = tmp_path / "store" / "mine" / "checkpoint-4"
    assert (stored / there).exists()
    assert not (stored / absent).exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["/else"], "ckptsync push {out} --store /else"),
        (["s3://b/x", "--run", "r"], "ckptsync push {out} --run r --store s3://b/x"),
        (["--store", "/else", "--as", "a", "{out}/checkpoint-4"], "--as is the name of one"),
        ([], "no store is named"),
        (["--store", "/else", "--exclude", "/abs"], "--exclude: '/abs' is not a glob"),
    ],
)
def test_what_contradicts_itself_sends_nothing(
    words: list[str], said: str, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CKPTSYNC_STORE", raising=False)
    configured(tmp_path)
    out = tmp_path / "jobs/sft/out"
    told = cli("push", out, *(word.format(out=out) for word in words), code=2).err
    assert said.format(out=out) in told
    assert not (tmp_path / "store").exists()


def test_what_is_left_out_is_listed(tmp_path: Path, cli: Cli) -> None:
    shutil.copytree(FSDP / "node0", tmp_path / "out")
    (tmp_path / "out" / "runs").mkdir()
    (tmp_path / "out" / "train.log").write_text("x")
    shutil.copy(FSDP.parent / "base/config.json", tmp_path / "out")  # goes with the checkpoint
    (tmp_path / "out" / "checkpoint-4" / "link").symlink_to("train.log")
    words = [str(tmp_path / "out"), "--store", str(tmp_path / "s"), "--exclude", "rng_state*"]
    for dry in (["--dry-run"], []):
        told = as_json(cli, *words, *dry)
        assert told["left_out"] == ["runs/", "train.log"]
        assert [c["left_out"] for c in told["checkpoints"]] == [["link", "rng_state_0.pth"]]
    said = cli("push", *words).out
    assert "left out: link, rng_state_0.pth" in said
    assert "not uploaded, not part of a checkpoint: runs/, train.log" in said
    both = as_json(cli, *words[:1], FSDP / "node1", *words[1:])
    assert both["left_out"] == [f"{words[0]}/runs/", f"{words[0]}/train.log"]


def advised(text: str) -> list[str]:
    """The arguments of the first command that a message tells to run."""
    [command, *_] = re.findall(r"ckptsync (push [^:;\n]*?)(?=\)|;|\n|$)", text)
    return shlex.split(command)


@pytest.mark.parametrize("words", [["{out}"], ["{out}/my runs"], ["{out}", "--as", "all"]])
def test_advice_can_be_followed_to_the_letter(
    words: list[str], tmp_path: Path, cli: Cli, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(FSDP / "node0", tmp_path / "out")
    (tmp_path / "out" / "my runs").mkdir()
    (tmp_path / "out" / "my runs" / "events").write_text("x")
    given = [word.format(out=tmp_path / "out") for word in words]
    main(["push", *given, "--store", str(tmp_path / "s")])
    said = capsys.readouterr()
    follow = advised(said.out + said.err)
    assert ("all" if "all" in words else "NAME") in cli(*follow).out


@pytest.mark.parametrize("proof", ["spool", "cache"])
def test_a_store_that_was_there_before_is_not_made_anew(
    proof: str, tmp_path: Path, cli: Cli
) -> None:
    out, store = tmp_path / "out", tmp_path / "store"
    shutil.copytree(FSDP / "node0", out)
    store.mkdir()  # as a mount point without its file system
    os.utime(store, (1, 1))
    marks = {"spool": out / "_ckptsync" / "store", "cache": cache_path(str(store))}
    marks[proof].parent.mkdir(parents=True, exist_ok=True)
    marks[proof].write_text(f"{store}\n")
    assert f"delete {marks[proof]}" in cli("push", out, "--store", store, code=2).err
    assert list(store.iterdir()) == []


def test_a_store_inside_a_checkpoint_is_refused_before_it_is_made(tmp_path: Path, cli: Cli) -> None:
    shutil.copytree(FSDP / "node0" / "checkpoint-4", tmp_path / "best")
    cli("push", tmp_path / "best", "--store", tmp_path / "best" / "store", code=2)
    assert not (tmp_path / "best" / "store").exists()


def test_a_run_that_a_store_cannot_keep_wants_another_name(tmp_path: Path, cli: Cli) -> None:
    shutil.copytree(FSDP / "node0" / "checkpoint-4", tmp_path / ".cache" / "dcp")
    words = ["push", str(tmp_path / ".cache" / "dcp"), "--store", str(tmp_path / "s")]
    assert "--run NAME" in cli(*words, code=2).err
    assert "mine/dcp: sent" in cli(*words, "--run", "mine").out
