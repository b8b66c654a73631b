"""``ckptsync ls RUN`` and ``ls RUN/CHECKPOINT`` as transcripts."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from ckptsync.catalogue.cached import read_catalogue
from ckptsync.catalogue.location_summary import Catalogue, Proven, Summary
from ckptsync.cli import ls
from ckptsync.cli.ls import Listing, watch_lines
from ckptsync.cli.ls_run import (
    BLOCKS,
    RUN_HEADING,
    curve_line,
    list_row,
    next_command,
    read_rows,
    reasons,
    sparkline,
    weights_lines,
)
from ckptsync.cli.output import columns
from ckptsync.records.event_record import EventRecord
from ckptsync.records.io import append_record
from ckptsync.records.manifest_groups import Sibling
from ckptsync.records.weights_record import ModelValues
from ckptsync.status import location_details
from ckptsync.status.alarms import Alarm
from ckptsync.status.live_catalogue import LiveCatalogue, NodeProgress
from ckptsync.status.location_details import commands, describe_progress, read_details
from ckptsync.status.locations import describe_locations
from ckptsync.status.training_curves import Curve
from ckptsync.stores.opening import open_store
from tests.support.command_line import Cli
from tests.support.files_in_memory import safetensors_file
from tests.support.small_store import SHARD, flip, make, make_two
from tests.support.worker_in_process import push_now

Said = Callable[..., list[str]]


@pytest.fixture
def said(named: Path, cli: Cli) -> Said:
    """Return a function that returns the lines of ``ckptsync ls``."""
    store = make_two(named)
    history = [{"step": step, "loss": 3 - step / 4} for step in range(1, 6)]
    state = {"log_history": [*history, {"step": 5, "eval_loss": 1.75}]}
    name = store / "fsdp2" / "checkpoint-5" / "trainer_state.json"
    name.chmod(0o600)
    name.write_text(json.dumps(state))

    def ls(*words: str) -> list[str]:
        return cli("ls", *words).out.splitlines()

    return ls


def test_a_run_has_its_loss_above_and_a_row_a_checkpoint(said: Said) -> None:
    curve, heading, first, second = said("fsdp2")
    assert curve == "loss 2.75 █▆▅▃▁ 1.75, steps 1 to 5"
    assert " ".join(heading.split()) == (
        "STEP AGE LOSS EVAL SIZE NODES STATUS MODEL RESUME KEPT REASON"
    )
    row = first.split()
    assert (row[0], " ".join(row[2:])) == ("4", "2 - 458 KB 2 VERIFIED opens yes -")
    row = second.split()
    assert (row[0], row[2:4]) == ("5", ["1.75", "1.75"])
    assert second.endswith(
        "VERIFIED  no config  yes     -     no config.json: from_pretrained cannot open it"
    )


@pytest.mark.parametrize(
    ("column", "steps"),
    [("loss", "54"), ("eval", "54"), ("model", "45"), ("step", "45"), ("age", "45")],
)
def test_rows_are_sorted_by_a_column_unknown_last(said: Said, column: str, steps: str) -> None:
    assert [line[0] for line in said("fsdp2", "--sort", column)[2:]] == [*steps]


def test_one_status_is_shown_alone_also_of_all_runs(said: Said) -> None:
    assert [line.split()[0] for line in said("--status", "incomplete")] == ["RUN", "zero3"]
    assert [line[0] for line in said("fsdp2", "--status", "VERIFIED")[2:]] == ["4", "5"]
    [line] = said("fsdp2", "--status", "DAMAGED")
    assert line.endswith("no checkpoint has that status")
    document = json.loads(said("--sort", "size", "--json")[0])
    assert [d["run"] for d in document["locations"]] == ["zero3", "fsdp2", "fsdp2"]


def test_losses_are_of_one_run(named: Path, cli: Cli) -> None:
    make(named)
    assert "ls RUN --sort loss" in cli("ls", "--sort", "loss", code=2).err


def test_json_of_a_run_has_what_the_table_has_and_its_form_stays(said: Said) -> None:
    [line] = said("--json")
    assert "loss" not in json.loads(line)["locations"][0]
    for words in (("fsdp2",), ("fsdp2/checkpoint-5",)):
        [line] = said(*words, "--json")
        last = json.loads(line)["locations"][-1]
        assert (last["step"], last["loss"], last["eval_loss"], last["kept"]) == (
            5,
            1.75,
            1.75,
            False,
        )
        assert isinstance(last["files"], int)


def test_a_checkpoint_is_shown_in_full_with_the_next_command(said: Said) -> None:
    lines = said("zero3/checkpoint-4")
    assert lines[0] == "zero3/checkpoint-4"
    text = "\n".join(lines)
    assert "  status    INCOMPLETE\n" in text
    assert "no; global_step4/zero_pp_rank_1_mp_rank_00_model_states.pt: no node has" in text
    assert "\n  rank 1: global_step4/zero_pp_rank_1_mp_rank_00_model_states.pt and 2 more" in text
    assert "zero_pp_rank_0_mp_rank_00_model_states.pt  12 KB    node0" in text
    assert lines[-1].startswith("next: ckptsync status zero3 --store ")
    assert said("fsdp2/checkpoint-4")[-1].startswith("next: ckptsync pull fsdp2/checkpoint-4 DIR ")


def test_a_model_is_shown_with_norms_and_nan_first(tmp_path: Path, named: Path, cli: Cli) -> None:
    out = tmp_path / "out" / "checkpoint-4"
    assert not named.exists()
    out.mkdir(parents=True)
    layer, nan = "model.layers.0.", b"\xff\x7f"  # as bf16
    tensors = {
        "model.embed_tokens.weight": ("BF16", (2,), b"\x80\x3f\0\0"),
        f"{layer}self_attn.q_proj.weight": ("BF16", (2,), b"\x80\x3f" * 2),
        f"{layer}mlp.up_proj.weight": ("BF16", (2,), nan + b"\x80\xbf"),
    }
    (out / "model.safetensors").write_bytes(safetensors_file(tensors))
    cli("push", out, "--run", "run")
    cli("consolidate", "run/checkpoint-4")
    text = cli("ls", "run/checkpoint-4").out
    assert "  norm embeddings 1, attention 1.414, mlp 1; 1 of 6 values are zero; NaN: 1" in text
    said = cli("ls", "run").out
    assert "1 tensor holds NaN or infinity (model.layers.0.mlp" in said
    [found] = cli("ls", "run", "--json").json["locations"]
    groups = found["weights"]["groups"].values()
    assert sum(group["nan"] for group in groups) == 1


def test_a_metric_of_an_event_counts_and_hides_no_fact(said: Said, tmp_path: Path) -> None:
    metrics = {"status": 7.0, "model": 8.0, "loss": 0.25, "a": 0.5}
    words = ("fsdp2", "checkpoint-5", "checkpoint-5", 0, "eval", "0" * 16, "verified", "x", "done")
    record = EventRecord(*words, metrics=metrics)  # type: ignore[arg-type]
    append_record(open_store(str(tmp_path / "store")), record)
    lines = {
        line[2:].partition(" ")[0]: line.split(None, 1)[-1] for line in said("fsdp2/checkpoint-5")
    }
    assert lines["status"].startswith("VERIFIED")
    assert lines["loss"] == "0.25"
    assert lines["metrics"] == "a 0.5, model 8, status 7"


def test_what_is_damaged_is_said_with_its_bytes(
    named: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip(make(named) / "fsdp2" / SHARD)
    cli("verify", "fsdp2", code=10)
    lines = cli("ls", "fsdp2/checkpoint-4").out.splitlines()
    [damage] = [line for line in lines if line.startswith(f"  {SHARD}: ")]
    assert damage.count("in bytes 24576 to 28672 (model.layers.") == 1
    assert lines[-1].startswith("next: ckptsync repair fsdp2/checkpoint-4 --store ")
    store = open_store(str(named))
    details = read_details(store, read_catalogue(store, run="fsdp2").summaries[0])
    assert [report["verdict"] for report in details["reports"]] == ["damaged", "ok"]
    monkeypatch.setattr(location_details, "FILES", 2)
    some = read_details(store, read_catalogue(store, run="fsdp2").summaries[0])
    assert (some["files"], some["files_total"]) == (details["files"][:2], len(details["files"]))


def test_what_only_a_node_knows_has_no_files_and_no_losses_yet(tmp_path: Path) -> None:
    store = open_store(str(make(tmp_path / "store")))
    begun = Summary("fsdp2", "checkpoint-9", "checkpoint-9", 9, "WAITING", ended=1.0, arrived=1.0)
    details = read_details(store, replace(begun, kept="paper", shards_retired="old"))
    assert details["files_total"] == 0
    assert (details["reason_kept"], details["retired"]) == ("paper", "old")
    keys = ("saved", "uploaded", "merged", "verified", "loss")
    proof = Proven("r", "ok", "digest", 3.0, holds=True)
    done = replace(begun, status="VERIFIED", manifests=("m",), merged=2.0, proof=proof)
    for s, expected in (
        (begun, (1.0, None, None, None, None)),
        (done, (1.0, 1.0, 2.0, 3.0, 2.5)),
        (replace(done, status="DAMAGED", ended=0.0), (None, 1.0, 2.0, None, 2.5)),
    ):
        values = describe_progress(s, {"loss": [(8, 2.5)]})
        assert tuple(values[key] for key in keys) == expected


def test_a_join_is_the_next_command_only_where_nothing_speaks_against_it() -> None:
    parts = Sibling("checkpoint-4~a", ("n1",), ()), Sibling("checkpoint-4~b", ("n2",), ("dates",))
    s = Summary("r", "checkpoint-4", "checkpoint-4", 4, "INCOMPLETE", siblings=parts[1:])
    assert next_command("/s", s) == "ckptsync status r --store /s"
    assert next_command("/s", replace(s, siblings=parts)) == parts[0].command(
        "/s", "r", "checkpoint-4"
    )


@pytest.mark.parametrize(
    ("values", "blocks"),
    [
        ((1.0, 1.0), "▁▁"),
        ((0.0, None, 7.0), "▁ █"),
        ((-1.7e308, 0.0, 1.7e308), "▁▅█"),
        ((0.0, 5e-324), "▁▁"),
    ],
)
def test_blocks_are_as_high_as_the_values(values: tuple[float | None, ...], blocks: str) -> None:
    assert sparkline([*enumerate(values)], 60) == blocks


def test_many_points_share_cells_and_a_terminal_without_blocks_has_none() -> None:
    curve: Curve = [(step, float(step)) for step in range(10_000)]
    assert sparkline(curve, 8) == BLOCKS
    assert curve_line({"loss": curve}, "ascii") == curve_line({"loss": curve}, None) == []
    assert curve_line({"loss": curve[:1]}, "utf-8") == curve_line({}, "utf-8") == []


def test_watch_reads_the_losses_of_a_new_checkpoint(
    said: Said, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, save = open_store(str(tmp_path / "store")), tmp_path / "out/checkpoint-6"
    save.mkdir(parents=True)
    (save / "model.safetensors").write_bytes(safetensors_file({"w": ("U8", (1,), b"x")}))
    state = {"global_step": 6, "log_history": [{"step": 6, "loss": 0.5}]}
    (save / "trainer_state.json").write_text(json.dumps(state))

    def sleep(_seconds: float) -> None:
        if store.dirs("fsdp2/.ckptsync/checkpoint-6/"):
            raise KeyboardInterrupt
        push_now(save.parent, store, "n0", "fsdp2")

    monkeypatch.setattr(ls, "time", SimpleNamespace(sleep=sleep))
    lines = cli("ls", "fsdp2", "--watch", "--json", code=130).out.splitlines()
    rows = [json.loads(line)["locations"][-1] for line in lines]
    assert [(row["step"], row["loss"]) for row in rows] == [(5, 1.75), (6, 0.5)]


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("is_of_run", [False, True])
def test_watch_shows_alarms_activities_rows(tmp_path: Path, width: int, *, is_of_run: bool) -> None:
    store = open_store(str(make(tmp_path / "store")))
    run, odd = "a-run-with-a-long-name", f"checkpoint-5~{'b' * 32}"
    names = [f"checkpoint-{n}" for n in range(1, 40)]
    shown = [
        *(
            Summary(run, n, n, step, "CONSOLIDATED", size=10**8, ended=1e9, arrived=1e6 + step)
            for step, n in enumerate(names, 1)
        ),
        Summary(run, "checkpoint-5", odd, 5, "INCOMPLETE", evidence=("w" * 200,), ended=1e9),
    ]
    entry = NodeProgress(
        kind="upload", state="uploading", run=run, checkpoint=names[2], location=names[2],
        node="n0", left=None, at=1e9,
    )  # fmt: skip
    overlay = LiveCatalogue(Catalogue(tuple(shown)), (entry,))
    alarm = Alarm("late", run, "warning", None, "it is late", "look")
    rows = read_rows(store.url, shown, (entry,), {}, 1e9)
    listing = Listing(overlay, shown, 1e9, rows if is_of_run else (), alarms=(alarm,))
    lines = watch_lines(store, "utf-8", listing, width, is_sorted=False)
    assert max(map(columns, lines)) <= width
    assert lines[:3] == ["WARNING late: it is late", "  -> look", f"{run}/{names[2]}: n0 uploads"]
    heading = next(i for i, line in enumerate(lines) if "STATUS" in line)
    table = [line.split() for line in lines[heading + 1 :] if not line.startswith("  ")]
    assert all("CONSOLIDATED" in row or "INCOMPLETE" in row for row in table[:-1])
    if is_of_run:
        assert any("www" in line for line in lines)
        assert (table[0][0], table[2][0], table[3][0]) == ("3", "39", "38")
    else:
        assert [row[1] for row in table[:3]] == [names[2], names[38], names[37]]
    sorted_lines = watch_lines(store, "utf-8", listing, width, is_sorted=True)
    assert names[0][11:] in sorted_lines[heading + 1]


def test_what_is_missing_is_said_while_another_node_uploads() -> None:
    s = Summary(
        "r", "checkpoint-4", "checkpoint-4", 4, "UPLOADING", manifests=("m",), nodes=("n0",),
        uploading=("n1",), missing_lines=("rank 2: x.pt, which n2 should have",),
    )  # fmt: skip
    sends = NodeProgress(
        kind="upload", state="uploading", run="r", checkpoint="checkpoint-4", node="n1",
        done=1, total=4, left=None, at=9.0,
    )  # fmt: skip
    on_its_way = replace(s, awaited_nodes=("n1",))
    for row, told in (
        (replace(s, awaited_nodes=("n2",)), s.missing_lines),
        (s, s.missing_lines),
        (on_its_way, ()),
        (replace(on_its_way, uploading=()), s.missing_lines),
        (replace(s, manifests=()), ()),
        (replace(s, status="VERIFIED"), s.missing_lines),
        (replace(s, consolidated=True), s.missing_lines),
    ):
        lines = [*reasons("/s", row, [sends], "", now=10.0)]
        assert lines == ["n1 uploads, 25 % of 4 B", *told]
    for uploading, document in ((("n1",), {"nodes": ["n1"], "percent": None}), ((), None)):
        [described] = describe_locations("/s", [replace(s, uploading=uploading)])
        assert described["uploading"] == document


def test_a_damaged_model_does_not_open() -> None:
    s = Summary("r", "checkpoint-4", "checkpoint-4", 4, "DAMAGED", consolidated=True)
    model = RUN_HEADING.index("MODEL")
    for changes, cells in (
        ({}, ["opens", "yes"]),
        ({"suspects": ("model.safetensors",)}, ["damaged", "yes"]),
        ({"retired": "old"}, ["none", "no"]),
        ({"shards_retired": "old"}, ["opens", "no"]),
    ):
        [row] = read_rows("/s", [replace(s, resume=True, **changes)], (), {}, 0.0)
        assert list_row(row, 0.0)[model : model + 2] == cells
    lines = weights_lines(replace(s, weights=ModelValues((), uncounted=2)))
    assert "2 tensors have no statistics" in [*lines]
    pull = "ckptsync pull r/checkpoint-4 DIR --consolidated --store /s"
    assert commands("/s", s)["pull_model"] == pull
    assert "pull_model" not in commands("/s", replace(s, consolidated=False))
