import pytest

from ckptsync.doctor.compare import alone
from ckptsync.doctor.findings import STORAGE
from tests.doctor_nodes import found, kinds, pair, planted


@pytest.mark.parametrize(("seconds", "level"), [(2.0, "warn"), (-2.0, "warn"), (31.0, "fail"), (-31.0, "fail")])
def test_a_clock_that_is_off_is_found_beside_the_store_and_beside_another_node(seconds: float, level: str) -> None:
    assert planted(clock=seconds) == [(level, "clock", "the clock")] * 2
    assert [(f.level, f.kind) for f in alone(pair()[0] | {"clock": seconds})] == [(level, "clock")]


def test_clocks_that_are_near_the_store_and_far_from_each_other_are_found() -> None:
    nodes = [n | {"clock": clock} for n, clock in zip(pair(), (-0.8, 0.8), strict=True)]
    assert [f.nodes for f in found(*nodes)] == [("n0", "n1")]


def test_a_clock_within_a_second_or_that_nobody_measured_is_no_fault() -> None:
    assert planted(clock=0.4) == planted(clock=None) == []


def test_machines_that_share_a_name_or_an_id_are_found() -> None:
    assert planted(host="gpu0") == [("warn", "identity-shared", "the host name")]
    assert planted(machine="0" * 32) == [("warn", "identity-shared", "/etc/machine-id")]
    assert planted(host="gpu0", machine="0" * 32, boot="boot-0") == [], "containers of one machine"


def test_another_output_directory_is_found() -> None:
    first, second = pair()
    second["places"] = {"/scratch/out": {"nonce": "nonce1", "seen": ["nonce1"]}}
    assert kinds(first, second) == [("warn", "output-differs", "output_dir")]
    one = [n | {"boot": "boot", "network": "4026531840"} for n in (first, second)]
    assert kinds(*one) == [], "two nodes on one machine cannot have one directory each under one name"


def test_one_path_that_is_one_disk_for_some_nodes_only_is_found() -> None:
    first, second = pair()
    third = pair()[1] | {"node": "n2", "host": "gpu2", "machine": "2" * 32, "boot": "boot-2", "addresses": ["10.0.0.3"]}
    third["places"] = {"/data/out": {"nonce": "nonce2", "seen": ["nonce0", "nonce2"]}}
    for node, rank in ((first, 0), (second, 1), (third, 2)):
        node["variables"] |= {"NNODES": "3", "NODE_RANK": str(rank)}
    (one,) = found(first, second, third)
    assert (one.kind, one.level, one.exit_code, one.what) == (
        "disk-differs",
        "fail",
        STORAGE,
        "one disk for n0, n2, another for n1",
    )
    third["places"]["/data/out"]["seen"] = ["nonce2"]
    assert found(first, second, third) == []


def test_a_shared_disk_is_sound_but_with_save_on_each_node() -> None:
    shared = {"/data/out": {"nonce": "nonce1", "seen": ["nonce0", "nonce1"]}}
    assert planted(places=shared) == []
    assert planted(places=shared, training={"save_on_each_node": "true"}) == [("fail", "disk-shared", "/data/out")]
    assert planted(training={"save_on_each_node": "true"}) == []


def test_another_base_model_is_found() -> None:
    assert planted(model={"digest": "fedcba9876543210"}) == [("warn", "model-differs", "the base model")]
    assert planted(model={"digest": ""}) == [("warn", "model-differs", "the base model")]


def test_a_path_that_is_a_servers_for_one_node_and_a_local_disk_for_the_other_is_found() -> None:
    assert planted(places={"/data/out": {"nonce": "nonce1", "seen": ["nonce1"], "server": "nfs4"}}) == [
        ("fail", "disk-differs", "/data/out")
    ]
    shared = {"/data/out": {"nonce": "nonce1", "seen": ["nonce0", "nonce1"], "server": "fuse.bindfs"}}
    assert planted(places=shared) == [], "it was tried"


def test_two_machines_whose_names_lead_to_one_address_are_found() -> None:
    bridged = [n | {"addresses": ["172.17.0.2"]} for n in pair()]
    assert kinds(*bridged) == [("warn", "identity-shared", "the address of the host's name")]
    assert kinds(*(n | {"boot": "boot-0"} for n in bridged)) == [], "namespaces of one machine"
    assert kinds(*(n | {"addresses": ["127.0.1.1"]} for n in pair())) == []


def test_users_of_other_numbers_are_found_where_the_disk_is_one() -> None:
    shared = {"/data/out": {"nonce": "nonce1", "seen": ["nonce0", "nonce1"]}}
    assert planted(places=shared, uid=1001) == [("warn", "users-differ", "/data/out")]
    assert planted(uid=1001) == []
