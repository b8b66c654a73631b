from ckptsync.doctor import probe
from ckptsync.doctor.nodes import Node, Place, grouped, read, told


def test_what_the_probe_gathers_is_read(tmp_path: object) -> None:
    raw = probe.gather([str(tmp_path)], "n0")
    node = read(raw)
    assert (node.name, node.host, node.python) == ("n0", raw["host"], raw["python"])
    assert node.gpus == tuple(raw["gpus"])
    assert node.places[str(tmp_path)].nonce in node.places[str(tmp_path)].seen
    assert node.limits["nofile"] > 0


def test_what_is_not_of_its_type_was_not_said() -> None:
    odd = {
        "node": "n",
        "uid": True,
        "cpus": "8",
        "versions": {"torch": 2, 3: "x"},
        "places": {"/a": {"nonce": 1, "seen": ["b", 2]}},
        "at": "now",
    }
    assert read(odd) == Node("n", versions={"torch": ""}, places={"/a": Place("", ("b",))})
    assert read([]).name == "?"  # type: ignore[arg-type]


def test_a_text_is_cut() -> None:
    assert len(read({"host": "x" * 5000}).host) == 1000


def test_nodes_are_grouped_by_what_they_say_and_named() -> None:
    nodes = [Node(f"n{n}", python="3.12" if n == 4 else "3.11") for n in range(5)]
    assert told(grouped(nodes, lambda n: n.python)) == "3.11 on n0, n1, n2 and 1 more; 3.12 on n4"
    assert told({"": ("n0",)}) == "none on n0"
