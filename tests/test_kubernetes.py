"""configs/kubernetes/*.yaml: by Kubernetes' schemas, by this program's own parser and loader."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from ckptsync.cli.main import parser
from ckptsync.config.loading import read
from ckptsync.config.schema import Config

ROOT = Path(__file__).parent.parent
MANIFESTS = {path.stem: path for path in sorted((ROOT / "configs/kubernetes").glob("*.yaml"))}
PAGE = (ROOT / "docs/kubernetes.md").read_text()
VERSIONS = ("1.29", "1.37")


def load(name: str) -> Any:
    return yaml.safe_load(MANIFESTS[name].read_text())


def objects() -> Iterator[Any]:
    """Each object of which Kubernetes has a schema: of a JobSet, the jobs that it makes."""
    for name in MANIFESTS:
        manifest = load(name)
        if manifest["kind"] != "JobSet":
            yield manifest
            continue
        for job in manifest["spec"]["replicatedJobs"]:
            metadata = {"name": f"{manifest['metadata']['name']}-{job['name']}-0"}
            spec = job["template"]["spec"]
            yield {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}


def pods() -> dict[str, Any]:
    """The specification of a pod of each manifest that has pods."""
    return {
        found["kind"]: found["spec"]["template"]["spec"]
        for found in objects()
        if "template" in found.get("spec", {})
    }


def containers() -> dict[str, Any]:
    return {
        container["name"]: container
        for pod in pods().values()
        for container in [*pod.get("initContainers", []), *pod["containers"]]
    }


def commands() -> list[list[str]]:
    """What the program gets in each container, without its own name."""
    found = []
    for container in containers().values():
        pre_stop = container.get("lifecycle", {}).get("preStop", {}).get("exec", {})
        program = container.get("command", ["ckptsync", *container.get("args", [])])
        found += [words for words in (program, pre_stop.get("command")) if words]
    assert all(words[0] == "ckptsync" for words in found)
    return [words[1:] for words in found]


def configurations() -> dict[str, Config]:
    data = load("settings")["data"]
    return {f"/etc/ckptsync/{name}": read(text, name, {}) for name, text in data.items()}


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_knows_every_field(version: str) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    kinds = {found["kind"] for found in objects()}
    assert kinds == {"ConfigMap", "Deployment", "Job"}
    for found in objects():
        assert kubernetes_validate.validate(found, version, strict=True)
    wrong = next(objects()) | {"speck": {}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, version, strict=True)


def test_every_command_is_one_that_the_command_line_takes_with_a_configuration_that_loads() -> None:
    names = set()
    for words in commands():
        args = parser(words[0]).parse_args(words[1:])
        assert args.config in configurations()
        names.add(words[0])
    assert names == {"run", "resume", "drain"}


def test_the_worker_serves_what_the_training_writes_as_the_same_user_on_the_same_volume() -> None:
    worker, training = containers()["worker"], containers()["training"]
    config = configurations()["/etc/ckptsync/worker.yaml"]
    words = training["command"]
    run = config.worker.runs[0]
    assert [str(run.path), f"--run={run.name}"] == [words[2], words[4]]
    assert worker["restartPolicy"] == "Always"
    assert worker["volumeMounts"] == training["volumeMounts"]
    assert worker["env"] == training["env"]
    assert not {"securityContext", "workingDir"} & {*worker, *training}, "the pod's hold for both"
    assert config.store.url == configurations()["/etc/ckptsync/head.yaml"].store.url


def test_a_pod_has_time_for_all_that_waits_at_its_end() -> None:
    training = containers()["training"]["command"]
    args = parser("resume").parse_args(training[2:])
    assert args.drain == "10m"
    assert pods()["Job"]["terminationGracePeriodSeconds"] >= 600 + 300


def test_a_probe_asks_where_the_configuration_listens() -> None:
    for container in (containers()["worker"], containers()["head"]):
        words = next(words for words in commands() if container.get("args") == words)
        listen = configurations()[words[2]].metrics.listen
        assert container["ports"][0]["containerPort"] == int(listen.rpartition(":")[2])


def test_nobody_is_root_and_no_key_is_in_a_manifest() -> None:
    for pod in pods().values():
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] > 0
    for path in MANIFESTS.values():
        assert load(path.stem)["kind"] != "Secret"
        assert not re.search(r"(?m)^(?!#).*(SECRET|TOKEN|PASSWORD)", path.read_text())


def test_the_page_shows_what_is_shipped() -> None:
    shown = re.findall(
        r"<!-- manifest: (\w+)\.yaml -->\n```yaml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL
    )
    assert len(shown) == 2
    for name, text in shown:
        lines = [line.strip() for line in MANIFESTS[name].read_text().splitlines()]
        part = [line.strip() for line in textwrap.dedent(text).splitlines()]
        assert any(lines[at : at + len(part)] == part for at in range(len(lines))), text
