"""What Prometheus is told, read back by its own parser."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from ckptsync.catalogue.location_summary import Proven
from ckptsync.status.alarms import Channel
from ckptsync.status.heartbeat import Disk
from ckptsync.status.overview import Overview, Room
from tests.support.status_examples import HOUR, NOW, heart, job, location, shown

parser = pytest.importorskip("prometheus_client.parser")
metrics = pytest.importorskip("ckptsync.status.metrics")
MOST: int = metrics.MOST
ROOT = Path(__file__).parents[2]
Process, Loop = metrics.Process, metrics.Loop
WELL = Process(
    "n0",
    "1.0",
    ("worker", "head"),
    is_healthy=True,
    loops=(Loop("worker", 7, 1, 2.5),),
    queue=2,
    oldest=90.0,
    sent_bytes=10**12,
    errors=1,
    disks=(Disk("/data/out", 1, 2, 3, 4),),
    running=(job("verify", "a/b", done=5, total=9), job("verify", "a/c")),
    channels=(Channel("slack-1", 5, 2),),
)
LOCATIONS = [
    location("a/checkpoint-1", ago=300, model_size=7),
    location("a/checkpoint-2", ago=200),
    location(
        "a/checkpoint-3",
        "DAMAGED",
        ago=100,
        arrived=NOW - 50,
        proof=Proven(damage=("r",), damaged_at=NOW - 9),
    ),
]


def seen() -> Overview:
    return shown(
        heart(),
        heart("gone", ago=2 * HOUR, queue=("a/checkpoint-4",), errors=("e",)),
        locations=LOCATIONS,
        room=Room(10**6, 10**7),
    )


def samples(process: Any = WELL, store: Overview | None = None) -> dict[str, Any]:
    """``name{label values}``, by the labels' names → value."""
    families = parser.text_string_to_metric_families(metrics.exposition(process, store).decode())
    return {
        f"{s.name}{[s.labels[name] for name in sorted(s.labels)] or ''}": s.value
        for f in families
        for s in f.samples
    }


def test_a_process_tells_what_it_does() -> None:
    told = samples()
    assert told["ckptsync_build_info['n0', 'worker+head', '1.0']"] == 1
    assert (told["ckptsync_healthy"], told["ckptsync_errors"]) == (1, 1)
    assert told["ckptsync_loop_busy_seconds['worker']"] == 2.5
    loop = [told[f"ckptsync_loop_{name}_total['worker']"] for name in ("runs", "failures")]
    assert loop == [7, 1]
    assert (told["ckptsync_queue_checkpoints"], told["ckptsync_queue_oldest_seconds"]) == (2, 90)
    assert told["ckptsync_sent_bytes_total"] == 10**12
    disk = ("disk_free_bytes", "disk_size_bytes", "spool_bytes", "spool_budget_bytes")
    assert [told[f"ckptsync_{name}['/data/out']"] for name in disk] == [1, 2, 3, 4]
    assert told["ckptsync_jobs['verify']"] == 2
    work = [
        told[f"ckptsync_running_{name}_bytes['b', 'verify', 'a']"] for name in ("done", "total")
    ]
    assert work == [5, 9]
    sent = [told[f"ckptsync_alerts_{name}_total['slack-1']"] for name in ("delivered", "failed")]
    assert sent == [5, 2]
    assert told["process_resident_memory_bytes"] > 1e6


def test_a_head_tells_of_all_runs_and_nodes() -> None:
    expected = {
        "run_checkpoints['a', 'verified']": 2,
        "run_checkpoints['a', 'damaged']": 1,
        "run_checkpoints['a', 'incomplete']": 0,  # what is not there cannot be compared
        "run_size_bytes['a']": 3000,
        "run_model_size_bytes['a']": 7,
        "run_newest_step['a']": 3,
        "run_newest_timestamp_seconds['a']": NOW - 100,
        "run_proven_timestamp_seconds['a']": NOW - 300,
        "run_verified_step['a']": 2,
        "run_verified_timestamp_seconds['a']": NOW - 200,
        "run_interval_seconds['a']": 100,
        "nodes['alive']": 1,
        "nodes['silent']": 1,
        "node_alive['n0']": 1,
        "node_alive['gone']": 0,
        "node_beat_timestamp_seconds['gone']": NOW - 2 * HOUR,
        "node_errors['gone']": 1,
        "node_queue_checkpoints['gone']": 1,
        "alarms['damaged', 'damage', 'critical']": 1,
        "store_free_bytes": 10**6,
        "store_size_bytes": 10**7,
        "overview_timestamp_seconds": NOW,
    }
    told = samples(WELL, seen())
    assert {name: told[f"ckptsync_{name}"] for name in expected} == expected


def test_a_thousand_checkpoints_are_no_more_series_than_one() -> None:
    many = shown(heart(), locations=[location(f"a/checkpoint-{n}", ago=n) for n in range(1_000)])
    one = shown(heart(), locations=[location(f"a/checkpoint-{n}", ago=n) for n in range(3)])
    assert samples(WELL, many).keys() == samples(WELL, one).keys()


def test_of_very_many_runs_and_nodes_the_newest_are_told() -> None:
    locations = [location(f"r{n}/checkpoint-1", ago=n) for n in range(MOST + 10)]
    told = samples(
        WELL, shown(*(heart(f"n{n}", ago=n) for n in range(MOST + 10)), locations=locations)
    )
    for series, name in (("run_newest_step", "r"), ("node_alive", "n")):
        assert len([k for k in told if k.startswith(f"ckptsync_{series}[")]) == MOST
        assert f"ckptsync_{series}['{name}0']" in told
        assert f"ckptsync_{series}['{name}{MOST}']" not in told


def test_names_of_any_kind_are_labels() -> None:
    odd = 'r"\\\nü\udcff'
    told = samples(WELL, shown(locations=[location(f"{odd}/checkpoint-1")]))
    assert any(r"\\udcff" in key for key in told)


def test_the_example_of_alert_rules_asks_for_metrics_and_labels_that_are_there() -> None:
    text = metrics.exposition(WELL, seen()).decode()
    families = list(parser.text_string_to_metric_families(text))
    there = {s.name for f in families for s in f.samples}
    labels = {label for f in families for s in f.samples for label in s.labels}
    example = yaml.safe_load((ROOT / "configs" / "prometheus-alerts.yml").read_text("utf-8"))
    rules = [rule for group in example["groups"] for rule in group["rules"]]
    assert len(rules) >= 8
    for rule in rules:
        assert set(re.findall(r"\bckptsync_\w+", rule["expr"])) <= there, rule["alert"]
        asked = set(re.findall(r"(\w+)\s*(?:=~?|!=)\s*\"", rule["expr"])) | set(
            re.findall(r"\$labels\.(\w+)", str(rule["annotations"]))
        )
        assert asked <= labels | {"instance", "job"}, rule["alert"]
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"].keys() == {"summary", "description"}


def test_every_metric_is_named_as_prometheus_wants_it_and_used_in_an_example() -> None:
    text = metrics.exposition(WELL, seen()).decode()
    kinds = re.findall(r"^# TYPE (ckptsync_\S+) \S+$", text, re.MULTILINE)
    assert len(kinds) == len(set(kinds))
    for name in kinds:
        assert re.fullmatch(r"ckptsync_[a-z_]+", name)
        assert not re.search(r"_(ms|millis|minutes|hours|kb|mb|percent)$", name)
    examples = ("prometheus-alerts.yml", "grafana-dashboard.json")
    used = "".join((ROOT / "configs" / name).read_text("utf-8") for name in examples)
    names = {
        s.name for family in parser.text_string_to_metric_families(text) for s in family.samples
    }
    queried = set(re.findall(r"\bckptsync_\w+[a-z]\b", used))
    assert {name for name in names if name.startswith("ckptsync_")} == queried


def test_labels_command_no_terminal_and_none_comes_twice() -> None:
    """A node may call itself what it likes.

    With two of the same labels Prometheus takes nothing at all.
    """
    store = shown(heart("a\x1b[2J\u202e"), heart("a\\x1b[2J\\u202e"))
    text = metrics.exposition(WELL, store).decode()
    assert all(line.isprintable() for line in text.split("\n"))
    alive = [line for line in text.split("\n") if line.startswith("ckptsync_node_alive{")]
    assert len(alive) == 1
