import pytest

from ckptsync.doctor.compare import alone, compare
from tests.doctor_nodes import kinds, pair, planted


@pytest.mark.parametrize(
    ("name", "value"),
    [("NNODES", "3"), ("MASTER_ADDR", "10.0.0.9"), ("MASTER_PORT", "29501"), ("RDZV_ID", "job"), ("USE_RAY", "1")],
)
def test_what_must_be_equal_is_found_where_it_is_not(name: str, value: str) -> None:
    assert ("fail", "launch-differs", name) in planted(variables={name: value}, master={"addresses": ["10.0.0.9"]})


@pytest.mark.parametrize("name", ["NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_what_a_node_is_not_told_is_found_on_that_node_alone_too(name: str) -> None:
    assert ("fail", "launch-missing", name) in planted(variables={name: None}) or name == "NNODES"
    second = pair()[1]
    del second["variables"][name]
    assert [(f.kind, f.subject) for f in alone(second)] == ([] if name == "NNODES" else [("launch-missing", name)])


def test_a_node_without_nnodes_beside_one_that_has_it_is_found() -> None:
    assert planted(variables={"NNODES": None}) == [("fail", "launch-differs", "NNODES"), ("fail", "launch-missing", "NNODES")]


def test_two_nodes_of_one_rank_and_a_rank_that_is_too_high_are_found() -> None:
    twice = [(f.kind, f.nodes) for f in compare([pair()[0], pair()[1] | {"variables": pair()[0]["variables"]}])]
    assert ("node-rank", ("n0", "n1")) in twice
    assert planted(variables={"NODE_RANK": "2"}) == [("fail", "node-rank", "NODE_RANK")]
    assert planted(variables={"NODE_RANK": "one"}) == [("fail", "node-rank", "NODE_RANK")]


def test_a_node_that_told_nothing_and_one_too_many_are_found() -> None:
    assert kinds(pair()[0]) == [("fail", "nodes-missing", "NNODES")]
    first = pair()[0]
    del first["variables"]["MASTER_PORT"]
    assert [subject for _, _, subject in kinds(first)] == ["MASTER_PORT", "NNODES"], "and what it lacks itself"
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
    nodes = [n | {"master": {"addresses": [address], "is_here": True, "port": "free"}} for n in pair()]
    assert kinds(*nodes) == [("fail", "master-loopback", "MASTER_ADDR")] * 2
    assert [f.kind for f in alone(nodes[1])] == ["master-loopback"]


def test_a_master_that_is_not_known_or_does_not_answer_is_found() -> None:
    assert planted(master={"addresses": []}) == [("fail", "master-unknown", "MASTER_ADDR")]
    for answer in ("silent", "unreachable"):
        assert planted(master={"port": answer}) == [("fail", "master-unreachable", "MASTER_ADDR")]


def test_node_0_without_the_masters_address_or_with_its_port_taken_is_found() -> None:
    first, second = pair()
    assert kinds(first | {"master": first["master"] | {"is_here": False, "port": "refused"}}, second) == [
        ("fail", "master-elsewhere", "MASTER_ADDR")
    ]
    assert kinds(first | {"master": first["master"] | {"port": "taken"}}, second) == [("fail", "port-taken", "MASTER_PORT")]


def test_an_elastic_launch_numbers_its_nodes_itself() -> None:
    nodes = [
        n | {"variables": {"NNODES": "1:4", "RDZV_ID": "job", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}} for n in pair()
    ]
    assert kinds(*nodes) == []


def test_what_ray_tells_its_workers_is_no_launch() -> None:
    told = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "40001", "WORLD_SIZE": "2", "NODE_RANK": "0"}
    nodes = [n | {"variables": told | {"NODE_RANK": str(rank)}} for rank, n in enumerate(pair())]
    assert kinds(*nodes) == []
    alone_in_ray = nodes[0] | {
        "variables": told | {"MASTER_ADDR": "127.0.0.1"},
        "master": {"addresses": ["127.0.0.1"], "is_here": True},
    }
    assert kinds(alone_in_ray) == []


def test_where_no_variable_says_anything_nothing_is_judged() -> None:
    assert kinds(*(n | {"variables": {}, "master": {}} for n in pair())) == []


def test_rays_own_processes_are_not_launched_by_variables() -> None:
    nodes = [
        n | {"within": "ray", "variables": {**n["variables"], "NNODES": "3", "NODE_RANK": "0", "CUDA_VISIBLE_DEVICES": "2"}}
        for n in pair()
    ]
    nodes[1]["gpus"] = ["NVIDIA H200"] * 4
    assert kinds(*nodes) == []


def named(*, host: str, rank: int = 0) -> dict[str, object]:
    """n0, told of itself by its own name, which Debian takes for loopback."""
    node = pair()[0]
    node["variables"] |= {"MASTER_ADDR": "gpu0", "NODE_RANK": str(rank)}
    return node | {"host": host, "master": {"addresses": ["127.0.1.1"], "is_here": True, "port": "free"}}


def test_node_0_may_be_told_of_itself_by_its_own_name_whatever_that_is_there() -> None:
    second = pair()[1]
    second["variables"]["MASTER_ADDR"] = "gpu0"
    assert kinds(named(host="gpu0.cluster"), second) == []
    assert alone(named(host="gpu0")) == ()
    for other in (named(host="gpu7"), named(host="gpu0", rank=1)):
        assert [f.kind for f in alone(other)] == ["master-loopback"]


def test_one_master_by_name_here_and_by_address_there_is_one() -> None:
    assert planted(variables={"MASTER_ADDR": "gpu0"}) == []
    assert ("fail", "launch-differs", "MASTER_ADDR") in planted(
        variables={"MASTER_ADDR": "gpu1"}, master={"addresses": ["10.0.0.2"]}
    )


def test_a_switch_is_on_or_off_however_it_is_written() -> None:
    nodes = [n | {"variables": {**n["variables"], "FORCE_TORCHRUN": text}} for n, text in zip(pair(), ("1", "true"), strict=True)]
    assert kinds(*nodes) == []
    nodes[1]["variables"]["FORCE_TORCHRUN"] = "0"
    assert kinds(*nodes) == [("fail", "launch-differs", "FORCE_TORCHRUN")]


def test_what_no_node_is_told_may_stand_on_a_command_line_but_llamafactory_has_none() -> None:
    def without(*libraries: str) -> list[dict[str, object]]:
        nodes = pair()
        for node in nodes:
            del node["variables"]["NODE_RANK"]
            node["versions"] = {name: v for name, v in node["versions"].items() if name not in libraries}
        return nodes

    assert {f[:2] for f in kinds(*without())} == {("fail", "launch-missing")}
    assert {f[:2] for f in kinds(*without("llamafactory"))} == {("warn", "launch-missing")}
