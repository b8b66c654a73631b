"""Checks of launch variables, MASTER_ADDR and interfaces."""

from __future__ import annotations

from typing import Any

import pytest

from ckptsync.doctor.checks import check_node, compare
from tests.doctor.nodes import alone, changed, kinds, on_both, pair, planted

LOOPBACK = "fail master-loopback MASTER_ADDR"


def test_variables_that_must_be_equal_are_compared() -> None:
    different = {
        "NNODES": "3",
        "MASTER_ADDR": "10.0.0.9",
        "MASTER_PORT": "29501",
        "RDZV_ID": "job",
        "USE_RAY": "1",
    }
    for name, value in different.items():
        found = planted(variables={name: value}, master=["10.0.0.9"])
        assert f"fail launch-differs {name}" in found
    assert planted(variables={"MASTER_ADDR": "gpu0"}) == [], "a name of the same address"
    other = planted(variables={"MASTER_ADDR": "gpu1"}, master=["10.0.0.2"])
    assert "fail launch-differs MASTER_ADDR" in other
    nodes = [
        changed(node, variables={"FORCE_TORCHRUN": text})
        for node, text in zip(pair(), ("1", "true"), strict=True)
    ]
    assert kinds(*nodes) == [], "both are on"
    changed(nodes[1], variables={"FORCE_TORCHRUN": "0"})
    assert kinds(*nodes) == ["fail launch-differs FORCE_TORCHRUN"]


@pytest.mark.parametrize("name", ["NODE_RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_a_variable_that_a_node_lacks_is_found_on_that_node_alone_too(name: str) -> None:
    assert f"fail launch-missing {name}" in planted(variables={name: None})
    assert alone(variables={name: None}) == [f"fail launch-missing {name}"]


def test_a_node_without_nnodes_is_found_beside_one_that_has_it() -> None:
    differs = ["fail launch-differs NNODES", "fail launch-missing NNODES"]
    assert planted(variables={"NNODES": None}) == differs
    assert check_node(changed(pair()[1], variables={"NNODES": None})) == ()


def test_a_variable_that_no_node_has_may_stand_on_a_command_line_but_not_of_llamafactory() -> None:
    lacks = {"variables": {"NODE_RANK": None}}
    assert on_both(**lacks) == ["fail launch-missing NODE_RANK"] * 2
    without = {"versions": {"llamafactory": None}}
    assert on_both(**lacks, **without) == ["warn launch-missing NODE_RANK"] * 2


def test_each_node_has_a_rank_of_its_own() -> None:
    twice = compare([pair()[0], changed(pair()[1], variables={"NODE_RANK": "0"})])
    assert ("node-rank", ("n0", "n1")) in [(f.kind, f.nodes) for f in twice]
    for rank in ("2", "one"):
        assert planted(variables={"NODE_RANK": rank}) == ["fail node-rank NODE_RANK"]


def test_a_node_that_is_missing_and_one_too_many_are_found() -> None:
    missing = "fail nodes-missing NNODES"
    assert kinds(pair()[0]) == [missing]
    own = kinds(changed(pair()[0], variables={"MASTER_PORT": None}))
    assert own == ["fail launch-missing MASTER_PORT", missing], "and what it lacks itself"
    third = pair()[1] | {"node": "n2", "host": "gpu2", "machine": "2" * 32, "boot": "boot-2"}
    changed(third, variables={"NODE_RANK": "7"})
    assert "fail nodes-too-many NNODES" in kinds(*pair(), third)


def test_a_world_that_the_ranks_do_not_make_is_found() -> None:
    assert on_both(variables={"WORLD_SIZE": "12"}) == ["fail world-size WORLD_SIZE"]
    assert on_both(variables={"WORLD_SIZE": "16"}) == []
    assert on_both(variables={"WORLD_SIZE": "2"}) == [], "some clusters count nodes in it"
    more = {"NNODES": "3", "WORLD_SIZE": "24"}
    assert on_both(variables=more) == ["fail nodes-missing NNODES"], "the third has ranks, too"


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.1.1", "::1", "0.0.0.0"])
def test_a_master_that_no_other_node_reaches_is_found(address: str) -> None:
    loop = {"master": [address], "is_master": True, "port": "free"}
    assert on_both(**loop) == [LOOPBACK] * 2
    assert alone(**loop) == [LOOPBACK]


def test_a_master_that_is_unknown_silent_or_elsewhere_is_found() -> None:
    assert planted(master=[]) == ["fail master-unknown MASTER_ADDR"]
    for answer in ("silent", "unreachable"):
        assert planted(port=answer) == ["fail master-unreachable MASTER_ADDR"]
    first, second = pair()
    elsewhere = first | {"is_master": False, "port": "refused"}
    assert kinds(elsewhere, second) == ["fail master-elsewhere MASTER_ADDR"]
    assert kinds(first | {"port": "taken"}, second) == ["fail port-taken MASTER_PORT"]


def named(*, host: str, rank: int = 0) -> dict[str, Any]:
    """n0, whose MASTER_ADDR is its own name, which Debian takes for loopback."""
    node = changed(pair()[0], variables={"MASTER_ADDR": "gpu0", "NODE_RANK": str(rank)})
    return node | {"host": host, "master": ["127.0.1.1"], "is_master": True, "port": "free"}


def test_node_0_may_have_its_own_name_as_master_whatever_address_that_is_there() -> None:
    second = changed(pair()[1], variables={"MASTER_ADDR": "gpu0"})
    assert kinds(named(host="gpu0.cluster"), second) == []
    assert check_node(named(host="gpu0")) == ()
    for other in (named(host="gpu7"), named(host="gpu0", rank=1)):
        assert [f.kind for f in check_node(other)] == ["master-loopback"]


def test_an_elastic_launch_numbers_its_nodes_itself() -> None:
    master = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    elastic = {"NNODES": "1:4", "RDZV_ID": "job", **master}
    assert kinds(*(node | {"variables": elastic} for node in pair())) == []
    assert kinds(*(node | {"variables": {}, "master": []} for node in pair())) == []


def test_what_ray_sets_for_its_workers_is_no_launch() -> None:
    of_ray = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "40001", "WORLD_SIZE": "2"}
    nodes = [
        node | {"variables": {**of_ray, "NODE_RANK": str(rank)}} for rank, node in enumerate(pair())
    ]
    assert kinds(*nodes) == []
    loop = changed(nodes[0], variables={"MASTER_ADDR": "127.0.0.1"})
    assert kinds(loop | {"master": ["127.0.0.1"], "is_master": True}) == []


def test_rays_own_processes_are_not_launched_by_variables() -> None:
    set_by_ray = {"NNODES": "3", "NODE_RANK": "0", "CUDA_VISIBLE_DEVICES": "2"}
    nodes = [changed(node, within="ray", variables=set_by_ray) for node in pair()]
    assert kinds(nodes[0], nodes[1] | {"gpus": ["NVIDIA H200"] * 4}) == []


def test_an_interface_that_is_not_there_is_down_or_has_no_address_is_found() -> None:
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        assert planted(variables={name: "ens5"}) == [f"fail interface-missing {name}"]
    down = planted(variables={"NCCL_SOCKET_IFNAME": "docker0"})
    assert "fail interface-down NCCL_SOCKET_IFNAME" in down
    bare = {"eth0": {"state": "up", "mtu": "9000", "speed": "100000", "address": "no"}}
    assert [f.split()[1] for f in planted(interfaces=bare)] == ["interface-bare"] * 2
    bare["eth0"]["address"] = ""
    assert planted(interfaces=bare) == [], "the system does not tell"


def test_nccls_ways_to_name_interfaces_are_understood_and_gloo_takes_names_alone() -> None:
    for text in ("eth", "=eth0", "^lo,docker", "^=lo,docker0", "ib0,eth0", "eth0,ib9"):
        assert planted(variables={"NCCL_SOCKET_IFNAME": text}) == [], text
    for text in ("eth", "eth0,ib9"):
        found = planted(variables={"GLOO_SOCKET_IFNAME": text})
        assert found == ["fail interface-missing GLOO_SOCKET_IFNAME"]


def test_each_node_may_name_an_interface_of_its_own_and_all_must_name_one() -> None:
    own = {"enp1s0": {"state": "up", "mtu": "9000", "speed": "100000"}}
    assert planted(interfaces=own, variables={"NCCL_SOCKET_IFNAME": "enp1s0"}) == []
    none = planted(variables={"NCCL_SOCKET_IFNAME": None})
    assert none == ["warn network-differs NCCL_SOCKET_IFNAME"]


def test_variables_of_the_network_that_differ_are_failures_where_two_ends_must_agree() -> None:
    for name in ("NCCL_IB_DISABLE", "NCCL_NET", "NCCL_ALGO", "NCCL_PROTO"):
        assert planted(variables={name: "1"}) == [f"fail network-differs {name}"]
    async_errors = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    for name in ("NCCL_P2P_DISABLE", async_errors, "GLOO_TIMEOUT", "OMP_NUM_THREADS"):
        assert planted(variables={name: "1"}) == [f"warn network-differs {name}"]
    assert planted(variables={"NCCL_DEBUG_SUBSYS": "NET"}) == [], "what is logged may differ"
    nodes = [changed(node, variables={"NCCL_HOSTID": node["host"]}) for node in pair()]
    changed(nodes[1], variables={"NCCL_IB_DISABLE": ""})
    assert kinds(*nodes) == [], "and so may a host's id; an empty variable is none"


def test_links_of_another_mtu_or_speed_are_found() -> None:
    slow = {"eth0": {"state": "up", "mtu": "1500", "speed": "10000"}}
    assert [found for found in planted(interfaces=slow) if "links-differ" in found] == [
        f"warn links-differ {library}_SOCKET_IFNAME: {what}"
        for library in ("GLOO", "NCCL")
        for what in ("mtu", "speed")
    ]
    for speed in ("-1", ""):
        unknown = {"eth0": {"state": "up", "mtu": "9000", "speed": speed}}
        assert planted(interfaces=unknown) == []
    nodes = [changed(node, variables={"NCCL_SOCKET_IFNAME": "^lo,docker"}) for node in pair()]
    changed(nodes[1], interfaces={"br-1": {"state": "up", "mtu": "1500", "speed": "10"}})
    assert kinds(*nodes) == [], "what an exclusion leaves may be unlike"


def test_a_host_whose_name_is_loopback_is_found_where_gloo_goes_by_it() -> None:
    first, second = (changed(node, variables={"GLOO_SOCKET_IFNAME": None}) for node in pair())
    assert kinds(first, second) == []
    second["addresses"] = ["127.0.1.1"]
    assert kinds(first, second) == ["warn host-loopback /etc/hosts"]
    assert planted(addresses=["127.0.1.1"]) == []


def test_loopback_is_for_nodes_of_one_machine_only() -> None:
    here = {"boot": "boot", "network": "4026531840", "addresses": ["127.0.1.1"]}
    by_lo = {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": ""}
    first, second = (changed(node, variables=by_lo, **here) for node in pair())
    assert kinds(first, second) == []
    second["network"] = "4026532000"
    found = {one.split()[1] for one in kinds(first, second)}
    assert found == {"host-loopback", "interface-loopback"}
    gloo = planted(variables={"GLOO_SOCKET_IFNAME": "lo"})
    assert gloo == ["fail interface-loopback GLOO_SOCKET_IFNAME"]
    leaves_lo = planted(variables={"NCCL_SOCKET_IFNAME": "^docker0"})
    assert leaves_lo == ["warn interface-loopback NCCL_SOCKET_IFNAME"]
    assert planted(variables={"NCCL_SOCKET_IFNAME": "eth0,lo"}) == []
