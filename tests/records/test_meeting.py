"""Nodes that write and move in any order, checked against the truth."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ckptsync.records.io import next_number
from ckptsync.records.manifest import Manifest
from ckptsync.records.manifest_groups import (
    StoredManifest,
    better_location,
    choose_location,
    explain_conflict,
    live_manifests,
    moved_manifest,
)
from tests.records.test_manifest_groups import S, entry, known, manifest, of_rank, shard

NODES = ("a", "b", "c", "d")
SAVES = (0, 1, 2)


@dataclass(frozen=True)
class Move:
    node: str
    old: str
    new: str


def take(node: str, save: int, *, late: bool, ids: bool) -> Manifest:
    """What a node has of a save: its rank's shard, and perhaps a file that came a minute later.

    Saves are 1,000 s apart.
    """
    at = (1 + save) * 1_000 * S + NODES.index(node) * S // 4
    files = [shard(NODES.index(node), f"save {save}", at)]
    files += [entry(f"late-{node}", f"save {save}", at + 60 * S)] if late else []
    return manifest(
        node, *files, ranks=(NODES.index(node),), save=f"{save}-of-the-saves" if ids else ""
    )


class Meeting(RuleBasedStateMachine):
    ids = False

    def __init__(self) -> None:
        super().__init__()
        self.known: list[StoredManifest] = []
        self.truth: dict[str, int] = {}
        self.pending: list[tuple[Manifest, int] | Move] = []

    def is_busy(self, node: str) -> bool:
        """A node is one worker, which does one thing at a time: it races with others, never with
        itself.
        """
        return any(node == (p.node if isinstance(p, Move) else p[0].node) for p in self.pending)

    def next_number(self, node: str, location: str) -> int:
        return next_number((k.name for k in self.known), location, "manifest", node)

    def write(self, m: Manifest, save: int) -> None:
        name = f"run/.ckptsync/{m.location}/manifest-{m.node}-{m.n}-{len(self.known):016x}.json"
        self.known.append(StoredManifest(name, m))
        self.truth[name] = save

    @rule(node=st.sampled_from(NODES), save=st.sampled_from(SAVES), late=st.booleans())
    def a_node_decides_by_what_it_sees_now(self, *, node: str, save: int, late: bool) -> None:
        if self.is_busy(node):
            return
        planned = take(node, save, late=late, ids=self.ids)
        self.pending.append((replace(planned, location=choose_location(planned, self.known)), save))

    @rule(data=st.data())
    @precondition(lambda self: self.pending)
    def and_writes_when_it_may_be_out_of_date(self, data: st.DataObject) -> None:
        self.commit(self.pending.pop(data.draw(st.integers(0, len(self.pending) - 1))))

    def commit(self, deed: tuple[Manifest, int] | Move) -> None:
        if isinstance(deed, Move):
            self.move(deed)
            return
        m, save = deed
        named = {
            f
            for k in live_manifests(self.known)
            if (k.manifest.node, k.manifest.location) == (m.node, m.location)
            for f in k.manifest.files
        }
        if not named.issuperset(m.files):
            self.write(replace(m, n=self.next_number(m.node, m.location)), save)

    @rule(data=st.data())
    @precondition(lambda self: self.known)
    def a_node_thinks_of_moving(self, data: st.DataObject) -> None:
        at = data.draw(
            st.sampled_from(
                sorted({(k.manifest.node, k.manifest.location) for k in live_manifests(self.known)})
            )
        )
        self.plan_move(*at)

    def plan_move(self, node: str, location: str) -> bool:
        better = better_location(node, location, self.known)
        if better != location and not self.is_busy(node):
            self.pending.append(Move(node, location, better))
        return better != location

    def move(self, move: Move) -> None:
        mine = [
            k
            for k in live_manifests(self.known)
            if (k.manifest.node, k.manifest.location) == (move.node, move.old)
        ]
        if mine:
            self.write(
                moved_manifest(mine, move.new, self.next_number(move.node, move.new)),
                self.truth[mine[0].name],
            )

    @invariant()
    def no_location_that_is_said_to_hold_one_save_holds_two(self) -> None:
        for location in {k.manifest.location for k in self.known}:
            held = {
                self.truth[k.name]
                for k in live_manifests(self.known)
                if k.manifest.location == location
            }
            assert len(held) <= 1 or explain_conflict(location, self.known)

    def teardown(self) -> None:
        while self.pending:
            self.commit(self.pending.pop(0))
        for _ in range(60):
            homes = sorted(
                {(k.manifest.node, k.manifest.location) for k in live_manifests(self.known)}
            )
            if not sum(self.plan_move(*home) for home in homes):
                break
            while self.pending:
                self.commit(self.pending.pop(0))
        else:
            raise AssertionError("moving does not end")
        self.every_save_is_in_one_location_of_its_own()

    def every_save_is_in_one_location_of_its_own(self) -> None:
        at = {(self.truth[k.name], k.manifest.location) for k in live_manifests(self.known)}
        assert len(at) == len({save for save, _ in at}) == len({location for _, location in at})
        assert all(explain_conflict(location, self.known) == "" for _, location in at)


class MeetingWithIds(Meeting):
    ids = True


QUICK = settings(
    stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestMeeting = Meeting.TestCase
TestMeeting.settings = QUICK
TestMeetingWithIds = MeetingWithIds.TestCase
TestMeetingWithIds.settings = QUICK


PARTS = [(node, save) for save in ("one", "two") for node in ("a", "b", "c")]


@given(st.permutations(PARTS))
def test_two_jobs_at_one_moment_never_end_as_one_model(order: list[tuple[str, str]]) -> None:
    """Whatever the order, by the time all have come no location with both is said to be one
    save.
    """
    seen: list[Manifest] = []
    for node, save in order:
        m = of_rank("abc".index(node), f"{save}-{node}", save)
        seen.append(replace(m, location=choose_location(m, known(*seen))))
    for location in {m.location for m in seen}:
        held = {m.node.partition("-")[0] for m in seen if m.location == location}
        assert len(held) == 1 or explain_conflict(location, known(*seen))
