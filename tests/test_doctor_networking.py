import pytest

from tests.doctor_nodes import kinds, pair, planted


@pytest.mark.parametrize("name", ["NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"])
def test_an_interface_that_is_not_there_is_found(name: str) -> None:
    assert planted(variables={name: "ens5"}) == [("fail", "interface-missing", name)]


def test_an_interface_that_is_down_or_leads_nowhere_is_found() -> None:
    assert ("fail", "interface-down", "NCCL_SOCKET_IFNAME") in planted(variables={"NCCL_SOCKET_IFNAME": "docker0"})
    assert planted(variables={"GLOO_SOCKET_IFNAME": "lo"}) == [("fail", "interface-loopback", "GLOO_SOCKET_IFNAME")]


@pytest.mark.parametrize("text", ["eth", "=eth0", "^lo,docker", "^=lo,docker0", "ib0,eth0"])
def test_nccls_ways_to_name_interfaces_are_understood(text: str) -> None:
    assert planted(variables={"NCCL_SOCKET_IFNAME": text}) == []


def test_gloo_takes_names_and_no_prefixes() -> None:
    assert planted(variables={"GLOO_SOCKET_IFNAME": "eth"}) == [("fail", "interface-missing", "GLOO_SOCKET_IFNAME")]


def test_each_node_may_name_an_interface_of_its_own_and_all_must_name_one() -> None:
    own = {"enp1s0": {"state": "up", "mtu": "9000", "speed": "100000"}}
    assert planted(interfaces=own, variables={"NCCL_SOCKET_IFNAME": "enp1s0"}) == []
    assert planted(variables={"NCCL_SOCKET_IFNAME": None}) == [("warn", "network-differs", "NCCL_SOCKET_IFNAME")]


@pytest.mark.parametrize("name", ["NCCL_IB_DISABLE", "NCCL_NET", "NCCL_ALGO", "NCCL_PROTO"])
def test_two_ways_to_talk_are_a_failure(name: str) -> None:
    assert planted(variables={name: "1"}) == [("fail", "network-differs", name)]


@pytest.mark.parametrize("name", ["NCCL_P2P_DISABLE", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "GLOO_TIMEOUT", "OMP_NUM_THREADS"])
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
    without = [n | {"variables": {k: v for k, v in n["variables"].items() if k != "GLOO_SOCKET_IFNAME"}} for n in pair()]
    assert kinds(*without) == []
    without[1] |= {"addresses": ["127.0.1.1"]}
    assert kinds(*without) == [("warn", "host-loopback", "/etc/hosts")]
    assert planted(addresses=["127.0.1.1"]) == []


def test_two_nodes_on_one_machine_reach_each_other_by_loopback() -> None:
    here = {"boot": "boot", "network": "4026531840", "addresses": ["127.0.1.1"]}
    nodes = [n | here | {"variables": {**n["variables"], "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": ""}} for n in pair()]
    assert kinds(*nodes) == []
    nodes[1]["network"] = "4026532000"
    assert {kind for _, kind, _ in kinds(*nodes)} == {"host-loopback", "interface-loopback"}


def test_gloo_needs_each_interface_that_is_named_and_nccl_any() -> None:
    assert planted(variables={"GLOO_SOCKET_IFNAME": "eth0,ib9"}) == [("fail", "interface-missing", "GLOO_SOCKET_IFNAME")]
    assert planted(variables={"NCCL_SOCKET_IFNAME": "eth0,ib9"}) == []


def test_an_interface_whose_speed_nobody_knows_is_as_fast_as_any() -> None:
    for speed in ("-1", ""):
        assert planted(interfaces={"eth0": {"state": "up", "mtu": "9000", "speed": speed}}) == []


def test_what_is_left_by_exclusion_may_be_unlike() -> None:
    nodes = [n | {"variables": {**n["variables"], "NCCL_SOCKET_IFNAME": "^lo,docker"}} for n in pair()]
    nodes[1]["interfaces"] = {"br-1": {"state": "up", "mtu": "1500", "speed": "10"}, **nodes[1]["interfaces"]}
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
    assert planted(variables={"NCCL_SOCKET_IFNAME": "^docker0"}) == [("warn", "interface-loopback", "NCCL_SOCKET_IFNAME")]
