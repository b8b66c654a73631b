"""The alert rules and the dashboard of configs/, in a real Prometheus that scrapes ckptsync."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.ports import free_port
from tests.support.small_store import SHARD, flip, make_two
from tests.support.waiting import until
from tests.test_monitoring_together import DATA, daemon

CONFIGS = Path(__file__).parents[1] / "configs"
RULES = CONFIGS / "prometheus-alerts.yml"
PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")
needs_prometheus = pytest.mark.skipif(
    not (PROMETHEUS and PROMTOOL), reason="prometheus and promtool are not installed"
)
DASHBOARD = json.loads((CONFIGS / "grafana-dashboard.json").read_text("utf-8"))
TARGETS = [
    (panel["title"], target) for panel in DASHBOARD["panels"] for target in panel.get("targets", ())
]
MINUTES = "+0x300"  # as long as any rule waits
FIRES = {
    "CkptsyncCritical": {'ckptsync_alarms{kind="damage",code="damaged",severity="critical"}': "1"},
    "CkptsyncWarning": {'ckptsync_alarms{kind="late",code="waiting",severity="warning"}': "1"},
    "CkptsyncNothingVerified": {
        'ckptsync_run_newest_timestamp_seconds{run="a"}': "1000",
        'ckptsync_run_verified_timestamp_seconds{run="a"}': "100",
        'ckptsync_run_interval_seconds{run="a"}': "100",
    },
    "CkptsyncVerificationBehind": {'ckptsync_run_proven_timestamp_seconds{run="a"}': "-900000"},
    "CkptsyncNoHead": {"ckptsync_healthy": "1"},
    "CkptsyncHeadDoesNotSee": {"ckptsync_overview_timestamp_seconds": "0"},
    "CkptsyncUnhealthy": {"ckptsync_healthy": "0"},
    "CkptsyncQueueOld": {"ckptsync_queue_oldest_seconds": "7201"},
    "CkptsyncOutputDiskFull": {
        'ckptsync_disk_free_bytes{path="/out"}': "4",
        'ckptsync_disk_size_bytes{path="/out"}': "100",
    },
    "CkptsyncStoreFull": {"ckptsync_store_free_bytes": "4", "ckptsync_store_size_bytes": "100"},
    "CkptsyncAlertsNotDelivered": {
        'ckptsync_alerts_failed_total{channel="slack-1"}': "0+1x300",
        'ckptsync_alerts_delivered_total{channel="slack-1"}': "0",
    },
}
"""For each rule, series by which it fires."""


def promtool(*arguments: str) -> None:
    assert PROMTOOL
    command = [PROMTOOL, *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_prometheus
def test_each_rule_is_valid_and_fires_on_its_series_and_no_other_time(tmp_path: Path) -> None:
    promtool("check", "rules", str(RULES))
    rules = [
        rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]
    ]
    assert {rule["alert"] for rule in rules} == FIRES.keys()
    tests = [
        {
            "interval": "1m",
            "input_series": [
                {"series": name, "values": value if "x" in value else f"{value}{MINUTES}"}
                for name, value in series.items()
            ],
            "promql_expr_test": [
                {
                    "expr": f'count(ALERTS{{alertname="{alert}",alertstate="firing"}})',
                    "eval_time": "2h",
                    "exp_samples": [{"labels": "{}", "value": 1}],
                },
                {
                    "expr": f'ALERTS{{alertname="{alert}",alertstate="firing"}}',
                    "eval_time": "0m",
                    "exp_samples": [],
                },
            ],
        }
        for alert, series in FIRES.items()
    ]
    path = tmp_path / "tests.yml"
    path.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "tests": tests}))
    promtool("test", "rules", str(path))


def get(port: int, path: str, **query: str) -> Any:
    url = f"http://127.0.0.1:{port}/api/v1/{path}?{urllib.parse.urlencode(query)}"
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            return json.load(answer)["data"]
    except OSError:
        return None


@contextmanager
def prometheus(folder: Path, *scraped: int) -> Iterator[int]:
    """Run a Prometheus with our rules, which fire without a delay; gives its port."""
    assert PROMETHEUS
    rules = re.sub(r"^ *for: .*\n", "", RULES.read_text(), flags=re.MULTILINE)
    (folder / "rules.yml").write_text(rules)
    targets = [f"127.0.0.1:{port}" for port in scraped]
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": ["rules.yml"],
        "scrape_configs": [{"job_name": "ckptsync", "static_configs": [{"targets": targets}]}],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = free_port()
    command = [
        PROMETHEUS,
        f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (folder / "prometheus.log").open("wb") as log:
        child = subprocess.Popen(command, stderr=log, stdout=log, cwd=folder)
    try:
        yield port
    finally:
        child.kill()
        child.wait()


def expression(target: dict[str, Any]) -> str:
    """The expression of a query, with Grafana's variables filled in."""
    text = str(target["expr"]).replace("$run", ".*")
    return text.replace("$__rate_interval", "1m").replace("$__range", "5m")


def has_data(port: int, target: dict[str, Any]) -> bool:
    """Whether a query returned a number at any time until now."""
    now = get(port, "query", query="time()")
    if now is None:
        return False
    end = float(now["result"][0])
    period = {"start": str(end - 120), "end": str(end), "step": "1"}
    found = get(port, "query_range", query=expression(target), **period)
    values = [v for series in found["result"] for _, v in series["values"]] if found else []
    return any(value not in ("NaN", "+Inf", "-Inf") for value in values)


@needs_prometheus
def test_a_real_prometheus_fires_and_every_query_of_the_dashboard_returns_data(
    tmp_path: Path,
) -> None:
    store, head, worker = make_two(tmp_path / "store"), free_port(), free_port()
    flip(store / "fsdp2" / SHARD)
    (tmp_path / "slow").mkdir()
    shutil.copytree(DATA / "zero3" / "node1", tmp_path / "zero3")
    of_head = (
        "node: boss\n"
        "roles: [head, verifier]\n"
        f"store: {{url: {store}}}\n"
        f"head: {{every: 200ms, config_from: {{'*': '{DATA}/base'}}}}\n"
        "verify: {period: 10ms, tick: 200ms}\n"
        f"metrics: {{listen: '127.0.0.1:{head}'}}\n"
        "alerts: {command: [/bin/true]}\n"
    )
    of_worker = (  # which uploads for minutes
        "node: node1\n"
        f"store: {{url: {store}}}\n"
        "limits: {bandwidth: 1KB/s}\n"
        f"worker: {{runs: ['{tmp_path}/zero3'], quiet: 0, unmarked: 0, scan_every: 200ms}}\n"
        f"metrics: {{listen: '127.0.0.1:{worker}'}}\n"
    )
    with (
        daemon(tmp_path, of_head),
        daemon(tmp_path / "slow", of_worker),
        prometheus(tmp_path, head, worker) as there,
    ):
        firing = 'ALERTS{alertname="CkptsyncCritical",alertstate="firing",code="damaged"}'
        assert until(lambda: (get(there, "query", query=firing) or {}).get("result"), 300)
        missing = list(TARGETS)

        def is_all_there() -> bool:
            missing[:] = [(title, t) for title, t in missing if not has_data(there, t)]
            return not missing

        assert until(is_all_there, 300), [(title, expression(t)) for title, t in missing]
