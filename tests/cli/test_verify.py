"""``ckptsync verify`` as a transcript."""

import json
import os
import shutil
from pathlib import Path

import pytest

from ckptsync.stores.opening import open_store
from ckptsync.worker.options import RunDir, WorkerOptions
from ckptsync.worker.worker import Worker
from tests.support.command_line import Cli
from tests.support.s3_permissions import policy
from tests.support.seaweedfs import weed
from tests.support.small_store import DATA, SHARD, flip, make
from tests.support.vector import vector
from tests.support.worker_in_process import tick


@pytest.fixture
def store(named: Path) -> Path:
    return make(named)


def test_verify_lists_what_is_arriving_and_exits_0(store: Path, cli: Cli) -> None:
    said = cli("verify").out
    assert "fsdp2/checkpoint-4: ok (level digest, 505 KB read)" in said
    assert "zero3/checkpoint-4: INCOMPLETE (level digest, " in said


def test_verify_names_the_file_and_the_tensors_and_exits_10(store: Path, cli: Cli) -> None:
    flip(store / "fsdp2" / SHARD)
    first, again = (cli("verify", "--json", code=10).json["reports"] for _ in "ab")
    reports = {r["run"]: r for r in first}
    assert reports["fsdp2"]["recorded"]
    assert not any(r["recorded"] for r in again)
    [finding] = [f for f in reports["fsdp2"]["findings"] if f["kind"] == "digest"]
    assert finding["name"] == SHARD
    assert finding["tensors"]
    said = cli("verify", store / "fsdp2" / "checkpoint-4", code=10).out
    assert "fsdp2/checkpoint-4: DAMAGED" in said
    assert f"digest: {SHARD}: " in said
    assert f"({finding['tensors'][0]}" in said
    cli("verify", store / "zero3", "--level", "stat")


def test_a_level_that_there_is_not_is_refused_with_what_there_is(store: Path, cli: Cli) -> None:
    for level, why in (
        ("deep", "'deep' is not one of stat, digest, parse, load"),
        ("model", "own"),
    ):
        assert why in cli("verify", store, "--level", level, code=2).err


def records(store: Path) -> dict[str, bytes]:
    return {str(p.relative_to(store)): p.read_bytes() for p in store.rglob(".ckptsync/*/*.json")}


def listed(cli: Cli) -> str:
    """Status and evidence of fsdp2."""
    [location] = [p for p in cli("ls", "--json").json["locations"] if p["run"] == "fsdp2"]
    return f"{location['status']} {' '.join(location['evidence'])}".strip()


def test_findings_are_recorded_and_repaired(store: Path, tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "out").mkdir()
    shutil.copytree(DATA / "fsdp2" / "node0", tmp_path / "out", dirs_exist_ok=True)
    flip(store / "fsdp2" / SHARD)
    said = cli("verify", code=10).out
    assert f"`ckptsync repair fsdp2/checkpoint-4 --store {store}`" in said
    assert listed(cli).startswith(f"DAMAGED {SHARD}: digest: ")
    cli("status", "--check", code=10)
    first = records(store)
    for _ in range(2):
        cli("verify", code=10)
    assert records(store) == first

    worker = Worker(
        WorkerOptions("node0", RunDir("fsdp2", tmp_path / "out")), open_store(str(store))
    )
    assert [(r.name, r.reason) for r in tick(worker, 0.0).repairs] == [(SHARD, "")]
    assert listed(cli) == f"DAMAGED {SHARD}: uploaded again, not yet verified"
    cli("verify")
    assert listed(cli) == "VERIFIED"
    assert "damaged" not in cli("status", "--check", code=0).out
    second = records(store)
    cli("verify")
    assert records(store) == second


@pytest.mark.parametrize("harm", ["consolidated", "record"])
def test_every_damage_is_seen_by_other_commands(store: Path, harm: str, cli: Cli) -> None:
    if harm == "consolidated":
        flip(store / "fsdp2" / "consolidated" / "checkpoint-4" / "model.safetensors")
    else:
        flip(next((store / "fsdp2" / ".ckptsync" / "checkpoint-4").glob("manifest-node0-*")))
    assert "hint: `ckptsync repair" in cli("verify", store / "fsdp2" / "checkpoint-4", code=10).out
    cli("status", "--check", code=10)
    if harm != "record":
        assert listed(cli).startswith("DAMAGED ")


def test_a_damaged_manifest_is_recorded_once(store: Path, cli: Cli) -> None:
    (manifest,) = (store / "zero3" / ".ckptsync" / "checkpoint-4").glob("manifest-*")
    data, told, counts = manifest.read_bytes(), manifest.stat(), []
    for _ in range(2):
        flip(manifest)
        for _ in range(2):
            cli("verify", store / "zero3", code=10)
            counts.append(len(list(manifest.parent.glob("report-*"))))
        manifest.write_bytes(data)
    assert counts == [1, 1, 2, 2]
    cli("verify", store / "zero3")
    flip(manifest)
    os.utime(manifest, ns=(told.st_atime_ns, told.st_mtime_ns))  # as a disk would do it
    cli("verify", store / "zero3", code=10)
    assert len(list(manifest.parent.glob("report-*"))) == 4


def test_a_consolidated_checkpoint_becomes_verified_by_hand(store: Path, cli: Cli) -> None:
    for report in (store / "fsdp2" / ".ckptsync" / "checkpoint-4").glob("report-*"):
        report.unlink()
    assert listed(cli) == "CONSOLIDATED"
    cli("verify", "--level", "stat")
    assert listed(cli) == "CONSOLIDATED"
    cli("verify")
    assert listed(cli) == "VERIFIED"
    before = records(store)
    cli("verify")
    assert records(store) == before
    cli("verify", "--always-report")
    assert len(records(store)) == len(before) + 2


def test_a_store_that_may_not_be_written_is_told_to_have_nothing_recorded(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, bucket = make(tmp_path / "made"), weed().bucket()
    shard = made / "fsdp2" / SHARD
    shard.write_bytes(bytes(shard.stat().st_size))
    for path in (p for p in made.rglob("*") if p.is_file()):
        key = f"store/{path.relative_to(made)}"
        weed().client().put_object(Bucket=bucket, Key=key, Body=path.read_bytes())
    options, url = (
        weed().identity(*policy("policy-worker", bucket, "store")),
        f"s3://{bucket}/store",
    )
    monkeypatch.setenv("CKPTSYNC_STORAGE_OPTIONS", json.dumps(options))
    out, err = cli("verify", "--store", url, code=10)
    assert f"`ckptsync repair fsdp2/checkpoint-4 --store {url}`" in out
    assert "warning: the findings were not recorded: " in err
    assert list(cli("verify", "--store", url, "--json", code=10).json["not_recorded"]) == [url]


@pytest.mark.parametrize(
    ("target", "code"), [("fsdp2/node0/checkpoint-4", 3), ("base", 5), ("absent", 2)]
)
def test_a_plain_directory_has_no_digests(target: str, code: int, cli: Cli) -> None:
    out, err = cli("verify", DATA / target, code=code)
    assert err if code != 3 else "nothing recorded the digests" in out


def test_verify_of_a_sample_says_its_coverage_and_claims_level_stat(store: Path, cli: Cli) -> None:
    (report,) = cli("verify", store / "fsdp2", "--sample", "20%", "--json").json["reports"]
    (digest,) = [r for r in report["readings"] if r["level"] == "digest"]
    assert (report["level"], report["verdict"]) == ("stat", "ok")
    assert 0.2 * digest["of_bytes"] <= digest["bytes"] < 0.6 * digest["of_bytes"]
    assert "nothing is known of the others" in cli("verify", store / "fsdp2", "--sample", "20%").out
    cli("verify", store / "fsdp2", "--sample", "100")


@pytest.mark.parametrize(
    "options",
    [
        "--sample 0",
        "--sample x",
        "--sample 101%",
        "--sample 5% --level load",
        "--baseline f",
        f"--sample 5% {DATA}/base",
        f"--record f {DATA}/base {DATA}/base",
    ],
)
def test_options_that_cannot_be_are_refused(store: Path, options: str, cli: Cli) -> None:
    cli("verify", *options.split(), code=2)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A plain directory: a sharded model with its index."""
    made = tmp_path / "model"
    shutil.copytree(vector("hf-sharded").sources[0], made)
    return made


def test_a_baseline_is_recorded_once_and_compared(model: Path, tmp_path: Path, cli: Cli) -> None:
    base = str(tmp_path / "base.json")
    cli("verify", model, "--record", base)
    cli("verify", model, "--record", base, code=2)
    assert "level parse" in cli("verify", model, "--baseline", base).out
    (model / "notes").write_text("x")
    weights = max(model.iterdir(), key=lambda p: p.stat().st_size)
    flip(weights)
    said = cli("verify", model, "--baseline", base, code=10).out
    assert f"digest: {weights.name}: " in said
    assert "notes: the baseline does not name it" in said
    weights.unlink()
    assert f"missing: {weights.name}" in cli("verify", model, "--baseline", base, code=10).out


def test_a_model_is_compared_with_its_index(model: Path, cli: Cli) -> None:
    cli("verify", model)
    max(model.iterdir(), key=lambda p: p.stat().st_size).unlink()
    assert "the checkpoint's own metadata demands it" in cli("verify", model, code=3).out


def test_what_is_damaged_is_no_baseline(model: Path, tmp_path: Path, cli: Cli) -> None:
    weights, base = max(model.iterdir(), key=lambda p: p.stat().st_size), tmp_path / "base.json"
    weights.write_bytes(weights.read_bytes()[:-1])
    cli("verify", model, "--record", base, code=10)
    (tmp_path / "empty").mkdir()
    cli("verify", tmp_path / "empty", "--record", base, code=5)
    assert not base.exists()


def test_a_target_that_fails_hides_no_damage(model: Path, tmp_path: Path, cli: Cli) -> None:
    weights = max(model.iterdir(), key=lambda p: p.stat().st_size)
    weights.write_bytes(weights.read_bytes()[:-1])
    (tmp_path / "empty").mkdir()
    targets = [str(tmp_path / "empty"), str(model), str(tmp_path / "absent")]
    out, err = cli("verify", *targets, "--json", code=10)
    told = json.loads(out)
    assert [r["verdict"] for r in told["reports"]] == ["damaged"]
    assert [(e["target"], e["exit_code"]) for e in told["errors"]] == [
        (targets[0], 5),
        (targets[2], 2),
    ]
    assert [json.loads(line)["exit_code"] for line in err.splitlines()] == [5, 2]


def test_the_first_error_is_the_commands(model: Path, tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "empty").mkdir()
    max(model.iterdir(), key=lambda p: p.stat().st_size).unlink()
    out, err = cli("verify", tmp_path / "empty", model, tmp_path / "absent", code=5)
    assert "incomplete" in out
    assert err.count("ckptsync: error: ") == 2
    assert f"error: {tmp_path / 'empty'}: no known checkpoint" in err
