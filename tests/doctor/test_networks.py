"""Two nodes with a network between them that is theirs: what they say of it, and what is planted in
it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.campaigns.nodes import TRAIN, Network, can_isolate
from tests.doctor.real import SOUND_MACHINE, doctor, environment

pytestmark = pytest.mark.skipif(not can_isolate(), reason="only root may make network namespaces")
SETUP = f'{SOUND_MACHINE}mount -t sysfs sysfs /sys; mount --bind $1 /etc/hosts; shift; exec "$@"'


class Pair:
    """Two nodes, a store that both see, and a Python that trains; n0 has said what it is."""

    def __init__(self, home: Path, network: Network) -> None:
        self._store, self.network = home / "store", network
        self._store.mkdir()
        self._python = environment(home / "venv", {"torch": "2.8.0"})
        assert self.found(0) == []

    def found(
        self, rank: int, hosts: Path = Path("/etc/hosts"), **planted: str
    ) -> list[tuple[str, str]]:
        """What is found of the network when a node has said what it is, and was compared."""
        told = {
            "NNODES": "2",
            "NODE_RANK": str(rank),
            "NPROC_PER_NODE": "1",
            "MASTER_ADDR": self.network.trainer(0),
            "MASTER_PORT": "29500",
        }
        named = {"GLOO_SOCKET_IFNAME": TRAIN, "NCCL_SOCKET_IFNAME": TRAIN, **planted}
        isolated = ("unshare", "--mount", "sh", "-e", "-c", SETUP, "sh", str(hosts))
        within = self.network.nodes[rank].within(*isolated)
        words = [
            "--publish",
            "--store",
            self._store,
            "--node",
            f"n{rank}",
            "--python",
            self._python,
        ]
        words += ["--nodes"] if rank else []
        answer = doctor(words, within=within, **{**told, **named})
        return [(f["kind"], f["subject"]) for f in answer["findings"]]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with closing(Network(2)) as network:
        yield Pair(tmp_path_factory.mktemp("network"), network)


def test_a_sound_network_has_no_fault(pair: Pair) -> None:
    assert pair.found(1) == []


def test_an_interface_of_another_node_or_of_none_is_found(pair: Pair) -> None:
    assert pair.found(1, GLOO_SOCKET_IFNAME="eth9") == [("interface-missing", "GLOO_SOCKET_IFNAME")]


def test_what_goes_over_loopback_is_found(pair: Pair) -> None:
    assert ("interface-loopback", "GLOO_SOCKET_IFNAME") in pair.found(1, GLOO_SOCKET_IFNAME="lo")
    assert ("master-loopback", "MASTER_ADDR") in pair.found(1, MASTER_ADDR="127.0.0.1")


def test_a_link_of_another_mtu_is_found(pair: Pair) -> None:
    pair.network.nodes[1].ip("link", "set", TRAIN, "mtu", "1400")
    assert pair.found(1) == [
        ("links-differ", "GLOO_SOCKET_IFNAME: mtu"),
        ("links-differ", "NCCL_SOCKET_IFNAME: mtu"),
    ]
    pair.network.nodes[1].ip("link", "set", TRAIN, "mtu", "1500")


def test_a_master_behind_a_link_that_is_down_is_found(pair: Pair) -> None:
    pair.network.nodes[1].ip("link", "set", TRAIN, "down")
    found = pair.found(1)
    pair.network.nodes[1].ip("link", "set", TRAIN, "up")
    assert found == [
        ("interface-down", "GLOO_SOCKET_IFNAME"),
        ("interface-down", "NCCL_SOCKET_IFNAME"),
        ("master-unreachable", "MASTER_ADDR"),
    ]


def test_a_firewall_that_says_nothing_is_found(pair: Pair) -> None:
    pair.network.hub.ip("link", "set", "t0", "down")
    found = pair.found(1)
    pair.network.hub.ip("link", "set", "t0", "up")
    assert found == [("master-unreachable", "MASTER_ADDR")]


def test_a_port_that_an_earlier_training_has_is_found(pair: Pair) -> None:
    listener = pair.network.nodes[0].listener()
    with listener:
        port = str(listener.getsockname()[1])
        assert ("port-taken", "MASTER_PORT") in pair.found(0, MASTER_PORT=port)
    assert pair.found(0) == []


def test_a_master_whose_name_has_an_address_of_no_network_here_is_reached_by_the_other(
    pair: Pair, tmp_path: Path
) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text(f"0100::1 master\n{pair.network.trainer(0)} master\n")
    assert pair.found(1, hosts=hosts, MASTER_ADDR="master") == []
    hosts.write_text("0100::1 master\n")
    assert ("master-unreachable", "MASTER_ADDR") in pair.found(1, hosts=hosts, MASTER_ADDR="master")
