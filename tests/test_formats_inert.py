"""Nothing in a pickle is run, whatever it names."""

from __future__ import annotations

import collections
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ckptsync.errors import Corrupt, Unsupported
from ckptsync.formats import machine
from ckptsync.formats.inert import Anybodys, Made, Name, Unknown, brief, loads, made, with_unknown
from tests import hostile_pickles
from tests.exhaustive import sampled
from tests.plain_files import Call, Global, torch_pickle

ROOT = Path(__file__).parents[1]


class Payload:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("protocol", range(2, 6))
def test_a_pickle_that_would_run_a_command_is_refused_by_the_name_of_it(tmp_path: Path, protocol: int) -> None:
    canary = tmp_path / "ran"
    with pytest.raises(Unsupported, match=r"(posix|nt)\.system"):
        loads(pickle.dumps({"weights": Payload(canary)}, protocol), {})
    assert not canary.exists()


def test_names_are_matched_whole() -> None:
    allowed = {Name("torch", "Size"): made}
    for module, name in [("torch", "Size.__class__"), ("torch.Size", ""), ("builtins", "getattr"), ("torch", "size")]:
        with pytest.raises(Unsupported):
            loads(torch_pickle(Global(module, name)), allowed)


@pytest.mark.parametrize("protocol", range(2, 6))
def test_where_anybodys_names_are_words_nothing_is_run_either(tmp_path: Path, protocol: int) -> None:
    canary = tmp_path / "ran"
    odd = [collections.deque([1]), collections.defaultdict(int, {"a": 1}), collections.Counter("ab"), canary]
    found, _ = loads(pickle.dumps({"weights": Payload(canary), "odd": odd}, protocol), Anybodys())
    assert not canary.exists()
    assert isinstance(found["weights"], Unknown)
    assert (found["weights"].name.name, found["weights"].args) == ("system", (f"touch {canary}",))
    assert [one.name.name for one in found["odd"]] == ["deque", "defaultdict", "Counter", "PosixPath"]


def test_an_object_of_nobodys_class_is_found_however_deep_it_lies() -> None:
    odd, known = Unknown(Name("own", "Class"), ()), Name("a", "b")
    for value in (odd, [1, (odd,)], {"a": {2: odd}}, {odd: 1}, Made(known, (odd,)), Made(known, (), {"x": odd}), {odd}):
        assert with_unknown({"ours": [1], "odd": value, "same": value}) == {"odd", "same"}
    endless: list[object] = [Made(known, (), {"x": {1}}), "text"]
    endless.append(endless)
    assert not with_unknown({"endless": endless})
    endless.append(odd)
    assert with_unknown({"endless": endless, odd: 1, "ours": 2}) == {"endless", odd}


def test_a_name_that_is_known_is_never_anybodys() -> None:
    data = torch_pickle([Call(Global("a.b", "C")), Call(Global("a.b", "D"))])
    known, other = loads(data, Anybodys({Name("a.b", "C"): made}))[0]
    assert (type(known), type(other)) == (Made, Unknown)
    with pytest.raises(Corrupt):
        loads(b"\x80\x02ca\nC\n)RK\x01a.", Anybodys({Name("a", "C"): made}))  # an item for what takes none


def test_an_allowed_name_becomes_its_arguments() -> None:
    found, _ = loads(torch_pickle(Call(Global("a.b", "C"), 1, "x")), {Name("a.b", "C"): made})
    assert isinstance(found, Made)
    assert (str(found.name), found.args) == ("a.b.C", (1, "x"))


def test_only_names_can_be_called() -> None:
    for data in (b"\x80\x02K\x01)R.", b"\x80\x02]K\x01R.", b"\x80\x02cx\ny\nK\x01R."):
        with pytest.raises((Corrupt, Unsupported)):
            loads(data, {Name("x", "y"): made})


def test_persistent_ids_are_refused_where_none_are_due() -> None:
    with pytest.raises(Unsupported, match="persistent"):
        loads(b"\x80\x02X\x01\x00\x00\x00aQ.", {})


def test_a_huge_memo_index_costs_nothing() -> None:
    found, _ = loads(b"\x80\x02Nr\xff\xff\xff\xff.", {})
    assert found is None


def test_a_value_is_shown_without_walking_into_it() -> None:
    endless: tuple[object, ...] = ()
    for _ in range(200):
        endless = (endless, endless)
    assert brief(endless) == "a tuple"
    assert brief((1, "x", None)) == "(1, 'x', None)"
    assert brief(10**5000) == "a int"
    assert len(brief("x" * 10**6)) < 100


def test_hostile_pickles_end_soon_and_take_memory_in_proportion_to_their_size() -> None:
    tried = sampled(hostile_pickles.MAKE, 4)
    program = [sys.executable, "-m", "tests.hostile_pickles", *tried]
    found = subprocess.run(program, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    rows = [line.split("\t") for line in found.stdout.splitlines()]
    assert [row[0] for row in rows] == tried
    assert not [row for row in rows if row[-1].startswith("died")]
    assert not [row for row in rows if int(row[3]) > 2 * machine.FLOOR + machine.FACTOR * int(row[1])]
    assert not [row for row in rows if row[-1] != "read" and not row[-1].startswith("Corrupt")]
