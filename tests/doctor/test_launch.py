"""Checks of launch variables, MASTER_ADDR and interfaces."""

import pytest

from ckptsync.doctor.checks import check_node, compare
from tests.doctor.nodes import kinds, pair, planted


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NNODES", "3"),
        ("MASTER_ADDR", "10.0.0.9"),
        ("MASTER_PORT", "29501"),
        ("RDZV_ID", "job"),
        ("USE_RAY", "1"),
    ],
)
def test_what_must_be_equal_is_found_where_it_is_not(name: str, value: str) -> None:
    assert ("fail", "launch-differs", name) in planted(variables={name: value}, master=["10.0.0.9"])


@pytest.mark.parametrize("name", ["NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_what_a_node_is_not_told_is_found_on_that_node_alone_too(name: str) -> None:
    assert ("fail", "launch-missing", name) in planted(variables={name: None}) or name == "NNODES"
    second = pair()[1]
    del second["variables"][name]
    assert [(f.kind, f.subject) for f in check_node(second)] == (
        [] if name == "NNODES" else [("launch-missing", name)]
    )


def test_a_node_without_nnodes_beside_one_that_has_it_is_found() -> None:
    assert planted(variables={"NNODES": None}) == [
        ("fail", "launch-differs", "NNODES"),
        ("fail", "launch-missing", "NNODES"),
    ]


def test_two_nodes_of_one_rank_and_a_rank_that_is_too_high_are_found() -> None:
    twice = [
        (f.kind, f.nodes)
        for f in compare([pair()[0], pair()[1] | {"variables": pair()[0]["variables"]}])
    ]
    assert ("node-rank", ("n0", "n1")) in twice
    assert planted(variables={"NODE_RANK": "2"}) == [("fail", "node-rank", "NODE_RANK")]
    assert planted(variables={"NODE_RANK": "one"}) == [("fail", "node-rank", "NODE_RANK")]


def test_a_node_that_told_nothing_and_one_too_many_are_found() -> None:
    assert kinds(pair()[0]) == [("fail", "nodes-missing", "NNODES")]
    first = pair()[0]
    del first["variables"]["MASTER_PORT"]
    assert [subject for _, _, subject in kinds(first)] == ["MASTER_PORT", "NNODES"], (
        "and what it lacks itself"
    )
    third = pair()[1] | {"node": "n2", "host": "gpu2", "machine": "2" * 32, "boot": "boot-2"}
    third["variables"] |= {"NODE_RANK": "7"}
    assert ("fail", "nodes-too-many", "NNODES") in kinds(*pair(), third)


def test_a_world_that_the_ranks_do_not_make_is_found() -> None:
    def nodes(world: str) -> list[dict[str, object]]:
        return [n | {"variables": n["variables"] | {"WORLD_SIZE": world}} for n in pair()]

    assert kinds(*nodes("12")) == [("fail", "world-size", "WORLD_SIZE")]
    assert kinds(*nodes("16")) == []
    assert kinds(*nodes("2")) == [], "some clusters count nodes in it"


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.1.1", "::1", "0.0.0.0"])
def test_a_master_that_no_other_node_reaches_is_found(address: str) -> None:
    nodes = [n | {"master": [address], "is_master": True, "port": "free"} for n in pair()]
    assert kinds(*nodes) == [("fail", "master-loopback", "MASTER_ADDR")] * 2
    assert [f.kind for f in check_node(nodes[1])] == ["master-loopback"]


def test_a_master_that_is_not_known_or_does_not_answer_is_found() -> None:
    assert planted(master=[]) == [("fail", "master-unknown", "MASTER_ADDR")]
    for answer in ("silent", "unreachable"):
        assert planted(port=answer) == [("fail", "master-unreachable", "MASTER_ADDR")]


def test_node_0_without_the_masters_address_or_with_its_port_taken_is_found() -> None:
    first, second = pair()
    assert kinds(first | {"is_master": False, "port": "refused"}, second) == [
        ("fail", "master-elsewhere", "MASTER_ADDR")
    ]
    assert kinds(first | {"port": "taken"}, second) == [("fail", "port-taken", "MASTER_PORT")]


def test_an_elastic_launch_numbers_its_nodes_itself() -> None:
    nodes = [
        n
        | {
            "variables": {
                "NNODES": "1:4",
                "RDZV_ID": "job",
                "MASTER_ADDR": "10.0.0.1",
                "MASTER_PORT": "29500",
            }
        }
        for n in pair()
    ]
    assert kinds(*nodes) == []


def test_what_ray_tells_its_workers_is_no_launch() -> None:
    told = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "40001", "WORLD_SIZE": "2", "NODE_RANK": "0"}
    nodes = [n | {"variables": told | {"NODE_RANK": str(rank)}} for rank, n in enumerate(pair())]
    assert kinds(*nodes) == []
    alone_in_ray = nodes[0] | {
        "variables": told | {"MASTER_ADDR": "127.0.0.1"},
        "master": ["127.0.0.1"],
        "is_master": True,
    }
    assert kinds(alone_in_ray) == []


def test_where_no_variable_says_anything_nothing_is_judged() -> None:
    assert kinds(*(n | {"variables": {}, "master": []} for n in pair())) == []


def test_rays_own_processes_are_not_launched_by_variables() -> None:
    nodes = [
        n
        | {
            "within": "ray",
            "variables": {
                **n["variables"],
                "NNODES": "3",
                "NODE_RANK": "0",
                "CUDA_VISIBLE_DEVICES": "2",
            },
        }
        for n in pair()
    ]
    nodes[1]["gpus"] = ["NVIDIA H200"] * 4
    assert kinds(*nodes) == []


def named(*, host: str, rank: int = 0) -> dict[str, object]:
    """n0, told of itself by its own name, which Debian takes for loopback."""
    node = pair()[0]
    node["variables"] |= {"MASTER_ADDR": "gpu0", "NODE_RANK": str(rank)}
    return node | {
        "host": host,
        "master": ["127.0.1.1"],
        "is_master": True,
        "port": "free",
    }


def test_node_0_may_be_told_of_itself_by_its_own_name_whatever_that_is_there() -> None:
    second = pair()[1]
    second["variables"]["MASTER_ADDR"] = "gpu0"
    assert kinds(named(host="gpu0.cluster"), second) == []
    assert check_node(named(host="gpu0")) == ()
    for other in (named(host="gpu7"), named(host="gpu0", rank=1)):
        assert [f.kind for f in check_node(other)] == ["master-loopback"]


def test_one_master_by_name_here_and_by_address_there_is_one() -> None:
    assert planted(variables={"MASTER_ADDR": "gpu0"}) == []
    assert ("fail", "launch-differs", "MASTER_ADDR") in planted(
        variables={"MASTER_ADDR": "gpu1"}, master=["10.0.0.2"]
    )


def test_a_switch_is_on_or_off_however_it_is_written() -> None:
    nodes = [
        n | {"variables": {**n["variables"], "FORCE_TORCHRUN": text}}
        for n, text in zip(pair(), ("1", "true"), strict=True)
    ]
    assert kinds(*nodes) == []
    nodes[1]["variables"]["FORCE_TORCHRUN"] = "0"
    assert kinds(*nodes) == [("fail", "launch-differs", "FORCE_TORCHRUN")]


def test_what_no_node_is_told_may_stand_on_a_command_line_but_llamafactory_has_none() -> None:
    def without(*libraries: str) -> list[dict[str, object]]:
        nodes = pair()
        for node in nodes:
            del node["variables"]["NODE_RANK"]
            node["versions"] = {
                name: v for name, v in node["versions"].items() if name not in libraries
            }
        return nodes

    assert {f[:2] for f in kinds(*without())} == {("fail", "launch-missing")}
    assert {f[:2] for f in kinds(*without("llamafactory"))} == {("warn", "launch-missing")}


@pytest.mark.parametrize("name", ["NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"])
def test_an_interface_that_is_not_there_is_found(name: str) -> None:
    assert planted(variables={name: "ens5"}) == [("fail", "interface-missing", name)]


def test_an_interface_that_is_down_or_leads_nowhere_is_found() -> None:
    assert ("fail", "interface-down", "NCCL_SOCKET_IFNAME") in planted(
        variables={"NCCL_SOCKET_IFNAME": "docker0"}
    )
    assert planted(variables={"GLOO_SOCKET_IFNAME": "lo"}) == [
        ("fail", "interface-loopback", "GLOO_SOCKET_IFNAME")
    ]


@pytest.mark.parametrize("text", ["eth", "=eth0", "^lo,docker", "^=lo,docker0", "ib0,eth0"])
def test_nccls_ways_to_name_interfaces_are_understood(text: str) -> None:
    assert planted(variables={"NCCL_SOCKET_IFNAME": text}) == []


def test_gloo_takes_names_and_no_prefixes() -> None:
    assert planted(variables={"GLOO_SOCKET_IFNAME": "eth"}) == [
        ("fail", "interface-missing", "GLOO_SOCKET_IFNAME")
    ]


def test_each_node_may_name_an_interface_of_its_own_and_all_must_name_one() -> None:
    own = {"enp1s0": {"state": "up", "mtu": "9000", "speed": "100000"}}
    assert planted(interfaces=own, variables={"NCCL_SOCKET_IFNAME": "enp1s0"}) == []
    assert planted(variables={"NCCL_SOCKET_IFNAME": None}) == [
        ("warn", "network-differs", "NCCL_SOCKET_IFNAME")
    ]


@pytest.mark.parametrize("name", ["NCCL_IB_DISABLE", "NCCL_NET", "NCCL_ALGO", "NCCL_PROTO"])
def test_two_ways_to_talk_are_a_failure(name: str) -> None:
    assert planted(variables={name: "1"}) == [("fail", "network-differs", name)]


@pytest.mark.parametrize(
    "name",
    ["NCCL_P2P_DISABLE", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "GLOO_TIMEOUT", "OMP_NUM_THREADS"],
)
def test_other_variables_that_differ_are_warnings(name: str) -> None:
    assert planted(variables={name: "1"}) == [("warn", "network-differs", name)]


def test_what_is_logged_may_differ() -> None:
    assert planted(variables={"NCCL_DEBUG_SUBSYS": "NET"}) == []


def test_links_of_another_mtu_or_speed_are_found() -> None:
    slow = {"eth0": {"state": "up", "mtu": "1500", "speed": "10000"}}
    subjects = [subject for _, kind, subject in planted(interfaces=slow) if kind == "links-differ"]
    assert subjects == [
        "GLOO_SOCKET_IFNAME: mtu",
        "GLOO_SOCKET_IFNAME: speed",
        "NCCL_SOCKET_IFNAME: mtu",
        "NCCL_SOCKET_IFNAME: speed",
    ]


def test_a_host_that_takes_its_name_for_loopback_is_found_where_gloo_goes_by_it() -> None:
    without = [
        n | {"variables": {k: v for k, v in n["variables"].items() if k != "GLOO_SOCKET_IFNAME"}}
        for n in pair()
    ]
    assert kinds(*without) == []
    without[1] |= {"addresses": ["127.0.1.1"]}
    assert kinds(*without) == [("warn", "host-loopback", "/etc/hosts")]
    assert planted(addresses=["127.0.1.1"]) == []


def test_two_nodes_on_one_machine_reach_each_other_by_loopback() -> None:
    here = {"boot": "boot", "network": "4026531840", "addresses": ["127.0.1.1"]}
    nodes = [
        n
        | here
        | {"variables": {**n["variables"], "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": ""}}
        for n in pair()
    ]
    assert kinds(*nodes) == []
    nodes[1]["network"] = "4026532000"
    assert {kind for _, kind, _ in kinds(*nodes)} == {"host-loopback", "interface-loopback"}


def test_gloo_needs_each_interface_that_is_named_and_nccl_any() -> None:
    assert planted(variables={"GLOO_SOCKET_IFNAME": "eth0,ib9"}) == [
        ("fail", "interface-missing", "GLOO_SOCKET_IFNAME")
    ]
    assert planted(variables={"NCCL_SOCKET_IFNAME": "eth0,ib9"}) == []


def test_an_interface_whose_speed_nobody_knows_is_as_fast_as_any() -> None:
    for speed in ("-1", ""):
        assert planted(interfaces={"eth0": {"state": "up", "mtu": "9000", "speed": speed}}) == []


def test_what_is_left_by_exclusion_may_be_unlike() -> None:
    nodes = [
        n | {"variables": {**n["variables"], "NCCL_SOCKET_IFNAME": "^lo,docker"}} for n in pair()
    ]
    nodes[1]["interfaces"] = {
        "br-1": {"state": "up", "mtu": "1500", "speed": "10"},
        **nodes[1]["interfaces"],
    }
    assert kinds(*nodes) == []


def test_who_a_host_is_differs_and_an_empty_variable_is_none() -> None:
    nodes = [n | {"variables": {**n["variables"], "NCCL_HOSTID": n["host"]}} for n in pair()]
    nodes[1]["variables"]["NCCL_IB_DISABLE"] = ""
    assert kinds(*nodes) == []


def test_an_interface_without_an_address_is_found() -> None:
    bare = {"eth0": {"state": "up", "mtu": "9000", "speed": "100000", "address": "no"}}
    assert [f[1] for f in planted(interfaces=bare)] == ["interface-bare", "interface-bare"]
    bare["eth0"]["address"] = ""
    assert planted(interfaces=bare) == [], "the system does not tell"


def test_an_exclusion_that_leaves_lo_is_found_between_machines() -> None:
    assert planted(variables={"NCCL_SOCKET_IFNAME": "^docker0"}) == [
        ("warn", "interface-loopback", "NCCL_SOCKET_IFNAME")
    ]
