"""Agree on one checkpoint with the training's other nodes, and get it.

Each node writes what it could begin with, waits for the others' records, and chooses by them
(`choose`).  It gets what it needs, and says that it is ready.  Only when all are ready do
directories in the output directory change their names.  Where one node fails, or does nothing for
too long, no node begins, and all raise the same error.

A node that is killed at any moment and begins again in the same attempt continues: its record is
there already, so is the decision, and a download goes on.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ckptsync.catalogue.cached import read_catalogue
from ckptsync.catalogue.uncached import read_location
from ckptsync.checkpoint_dirs import series_and_step
from ckptsync.downloader.download import Busy, Download, Progress, write_pointers
from ckptsync.downloader.download_plan import PullPlan, plan_checkpoint
from ckptsync.downloader.find import PullRequest, absent_best, check_outside, find
from ckptsync.errors import CkptsyncError, ConfigError, Corrupt, Incomplete, Transient
from ckptsync.resume.attempt import Attempt
from ckptsync.resume.attempt_records import (
    AttemptRecords,
    AttemptState,
    End,
    failed,
    forget_old_attempts,
)
from ckptsync.resume.choose import (
    Candidate,
    NodeRecord,
    check_nodes,
    choose,
    find_unresumable,
    find_unverified,
    list_candidates,
    save_id,
    why_chosen,
)
from ckptsync.resume.local_checkpoints import (
    LocalCheckpoint,
    check_idle,
    inode,
    judge_output_dir,
    list_newer,
    locked,
    move_aside,
    put_in_place,
    remove_staging,
    staging_of,
)
from ckptsync.stores.contract import Store

ResumeTrust = Literal["verified", "complete"]
_SLOWEST = 10  # times `PrepareOptions.poll` between two listings where nothing happens
_SIGN = 30.0  # seconds between two signs of a node that downloads, at most
_MOST_TRIES = 3


def _ignore(_text: str) -> None:
    """Say nothing."""


@dataclass(frozen=True, slots=True)
class PrepareOptions:
    """How a node prepares to begin.

    ``store``: opened; without it the output directory alone is judged.  ``wait``: seconds without a
    sign of any other node after which the attempt has failed; a node that downloads gives signs.
    ``keep_newer``: leave directories that are newer than the chosen checkpoint, or torn, where they
    are.  ``require``: fail where there is nothing to begin with.  ``node``: get only what this node
    needs, as `ckptsync pull --node` does, if the very nodes that sent the checkpoint take part:
    with others, launchers may give ranks to other nodes.  Empty: get everything.
    ``threads``: of the download.  ``poll``: seconds between the first two listings of the
    attempt's records; later ones are rarer.  ``say`` gets sentences for the log, ``progress`` the
    bytes of the download.
    """

    store: Store | None
    run: str
    trust: ResumeTrust = "verified"
    wait: float = 300.0
    keep_newer: bool = False
    require: bool = False
    node: str = ""
    threads: int = 8
    poll: float = 0.5
    say: Callable[[str], None] = _ignore
    progress: Progress | None = None


@dataclass(frozen=True, slots=True)
class Start:
    """What a training begins with.

    ``checkpoint`` and ``step`` are None where it begins from the beginning.  ``text`` is one
    sentence for the log: what was chosen, and why.
    """

    checkpoint: Path | None
    step: int | None
    text: str


def prepare(output_dir: Path, attempt: Attempt, options: PrepareOptions) -> Start:
    """Return the checkpoint that every node of an attempt begins with, once all nodes have it.

    The same attempt of several nodes gives the same answer, on every node and however often it is
    called.  One node alone writes no records, and decides by what there is now.

    Raises the same class of error on every node where one cannot begin: Incomplete where a node is
    late, or there is nothing to begin with and ``require`` is set; ConfigError where nodes
    contradict each other; StoreError, Unsupported, Corrupt.
    """
    output_dir = output_dir.absolute()
    if options.store is not None:
        check_outside(options.store, output_dir)
    elif attempt.nnodes > 1:
        raise ConfigError(
            f"{attempt.nnodes} nodes agree on a checkpoint through a store, and none is named",
            hint="name it: --store URL, or -c FILE",
        )
    work = _Preparation(output_dir, attempt, options)
    return work.alone() if attempt.nnodes == 1 else work.together()


@dataclass(frozen=True, slots=True)
class _Got:
    """Where the chosen checkpoint lies now, and where it is to lie; both None without one.

    ``other``: device and inode of what lies there instead.
    """

    place: Path | None = None
    final: Path | None = None
    other: tuple[int, int] | None = None
    pointers: tuple[tuple[str, bytes], ...] = ()


class _OtherBytes(ConfigError):
    """A directory of the checkpoint's name is there, and holds something else."""


class _Preparation:
    """One node's way through one attempt."""

    def __init__(self, output_dir: Path, attempt: Attempt, options: PrepareOptions) -> None:
        self._out, self._attempt, self._options = output_dir, attempt, options
        self._here: tuple[LocalCheckpoint, ...] = ()
        self._notes: list[str] = []
        self._unresumable = ""  # the newest complete checkpoint, and what of it resuming lacks
        self._nodes = {attempt.node}

    def alone(self) -> Start:
        """Return what the only node begins with."""
        self._look()
        records = {self._attempt.node: self._own_record()}
        choice = choose(records)
        self._check_required(choice, records)
        got = self._get(choice)
        self._apply(got, self._list_aside(choice))
        return self._start(choice, got, records)

    def together(self) -> Start:
        """Return what all nodes begin with; raise the error of all where one cannot begin."""
        store = self._options.store
        assert store is not None
        records = AttemptRecords(store, self._options.run, self._attempt)
        try:
            self._look()
            state = self._join(records)
            self._nodes = set(state.nodes)
            choice = choose(state.nodes)
            self._check_required(choice, state.nodes)
            with self._signs(records):
                got = self._get(choice)
            aside = self._wait_until_ready(records, choice)
        except CkptsyncError as e:
            end = self._close(records, e)
            end.raise_error()
            raise
        self._apply(got, aside)
        with contextlib.suppress(CkptsyncError):  # who may not delete leaves them
            forget_old_attempts(store, self._options.run, self._attempt.name)
        return self._start(choice, got, state.nodes)

    def _close(self, records: AttemptRecords, error: CkptsyncError) -> End:
        """Write that the attempt has failed; return how it ended, for all nodes alike.

        Of a store that cannot be reached, this node's own error.
        """
        own = failed(self._attempt.node, error)
        try:
            return records.close(own)
        except CkptsyncError:
            return End(self._attempt.node, str(error), error.hint, error.exit_code)

    # What this node could begin with.

    def _look(self) -> None:
        """Judge what lies in the output directory.  Raises ConfigError where a training writes."""
        check_idle(self._out)
        self._here = judge_output_dir(self._out, self._attempt.node)

    def _own_record(self) -> NodeRecord:
        """Return what this node could begin with.

        Where what it would begin with, if it were verified, waits for that, look again for half of
        ``wait``: a verifier may be at it.
        """
        until, waited_for = time.monotonic() + self._options.wait / 2, ""
        record, unverified = self._read_own()
        while unverified and time.monotonic() < until:
            if unverified != waited_for:
                waited_for = unverified
                self._options.say(f"waits until {waited_for}, which is complete, is verified")
            time.sleep(min(self._options.poll * _SLOWEST, self._options.wait / 8))
            record, unverified = self._read_own()
        if unverified and record.candidates:
            self._notes.append(f"{unverified} is newer and complete, but no verifier has read it")
        if self._unresumable:
            self._notes.append(self._unresumable)
        return record

    def _read_own(self) -> tuple[NodeRecord, str]:
        """Return what this node could begin with now; and what is newer, but not verified yet."""
        store, run = self._options.store, self._options.run
        summaries = read_catalogue(store, run=run).summaries if store is not None else ()
        own = [one for one in summaries if one.run == run]
        local = [one.save for one in self._here if one.is_whole]
        is_verified = self._options.trust == "verified"
        candidates = list_candidates(own, local, is_verified=is_verified)
        unverified = find_unverified(own, local, candidates)
        of_record = "" if candidates else unverified
        self._unresumable = find_unresumable(own)
        return NodeRecord(
            self._attempt.node, self._attempt.nnodes, candidates, of_record
        ), unverified

    def _check_required(self, choice: Candidate | None, records: Mapping[str, NodeRecord]) -> None:
        """Raise Incomplete where there must be a checkpoint, and there is none to begin with."""
        if choice is not None:
            return
        name = self._options.run or self._out
        if unverified := next((r.unverified for r in records.values() if r.unverified), ""):
            raise Incomplete(
                f"{name}: no checkpoint is verified, and {unverified} is complete",
                hint="begin again when a verifier has read it, or trust it: --trust complete",
            )
        if self._options.require:
            raise Incomplete(
                f"{name}: there is no checkpoint to begin with",
                hint="without --require the training begins from the beginning",
            )

    # The records of all nodes.

    def _join(self, records: AttemptRecords) -> AttemptState:
        """Write this node's record, unless it is there; return the state once all nodes' are."""
        state = records.read()
        if self._attempt.node not in state.nodes:
            own = self._own_record()
            # one too many writes no record, which would count for ever
            check_nodes({**state.nodes, own.node: own}, self._attempt.nnodes)
            records.join(own)
        elif newer := self._newer_than(state):
            self._options.say(newer)
        self._options.say(f"waits for {self._attempt.nnodes} nodes in attempt {self._attempt.name}")

        def is_complete(state: AttemptState) -> bool:
            return len(state.nodes) == self._attempt.nnodes

        def missing(state: AttemptState) -> str:
            nodes = ", ".join(sorted(state.nodes))
            return f"only {len(state.nodes)} of {self._attempt.nnodes} nodes have come: {nodes}"

        return self._wait(records, is_complete, missing)

    def _newer_than(self, state: AttemptState) -> str:
        """Say that an attempt's name was used before, where more could be chosen by now."""
        ids = {one.id for one in state.nodes[self._attempt.node].candidates}
        new = [one.checkpoint for one in self._read_own()[0].candidates if one.id not in ids]
        begun = f"attempt {self._attempt.name} was begun before"
        hint = "give each start of a training its own --attempt"
        return f"{begun} {new[-1]} was saved, and does not choose it: {hint}" if new else ""

    def _wait_until_ready(
        self, records: AttemptRecords, choice: Candidate | None
    ) -> tuple[tuple[str, str], ...]:
        """Say that this node is ready, and wait until all are; return what it moves aside."""
        own = records.set_ready(self._list_aside(choice))
        nnodes = self._attempt.nnodes

        def is_over(state: AttemptState) -> bool:
            return state.end is not None or len(state.ready.keys() & state.nodes.keys()) == nnodes

        def missing(state: AttemptState) -> str:
            nodes = ", ".join(sorted(state.nodes.keys() - state.ready.keys()))
            return f"without a sign for {self._options.wait:.0f} s: {nodes}"

        checkpoint = choice.checkpoint if choice else ""
        try:
            self._wait(records, is_over, missing)
            end = records.close(End(self._attempt.node, checkpoint=checkpoint))
        except CkptsyncError as e:
            end = self._close(records, e)  # another node may have seen all ready before
        end.raise_error()
        if end.checkpoint != checkpoint:
            raise ConfigError(
                f"{end.node} begins with {end.checkpoint or 'nothing'}, and this node was to begin"
                f" with {checkpoint or 'nothing'}",
                hint="have the same ckptsync on all nodes, and begin another attempt",
            )
        return own.aside

    def _wait(
        self,
        records: AttemptRecords,
        is_done: Callable[[AttemptState], bool],
        missing: Callable[[AttemptState], str],
    ) -> AttemptState:
        """Read the records until they are as expected.

        Raises the attempt's error if it has failed, ConfigError where nodes contradict each other,
        and Incomplete after ``wait`` seconds in which no node did anything.
        """
        poll = min(self._options.poll, self._options.wait / 4)
        state, pause, deadline = AttemptState(), poll, time.monotonic() + self._options.wait
        while True:
            began, before = time.monotonic(), state
            try:
                state = records.read()
            except Transient:
                if began > deadline:
                    raise
            if state.end is not None:
                state.end.raise_error()
            check_nodes(state.nodes, self._attempt.nnodes)
            if is_done(state):
                return state
            if state.signs != before.signs:
                pause, deadline = poll, began + self._options.wait
            elif began > deadline:
                raise Incomplete(
                    f"attempt {self._attempt.name}: {missing(state)}",
                    hint="begin the training again on all nodes; --wait waits longer",
                )
            time.sleep(pause)
            pause = min(pause * 1.5, poll * _SLOWEST)

    @contextlib.contextmanager
    def _signs(self, records: AttemptRecords) -> Iterator[None]:
        """Have the download's progress be a sign for the other nodes, too."""
        before, last = self._options, [time.monotonic()]

        def show(done: int, total: int) -> None:
            now = time.monotonic()
            if now - last[0] > min(_SIGN, before.wait / 4):
                last[0] = now
                with contextlib.suppress(CkptsyncError):  # the next one tells
                    records.show_progress(done)
            if before.progress:
                before.progress(done, total)

        self._options = replace(before, progress=show)
        try:
            yield
        finally:
            self._options = before

    # Getting it.

    def _get(self, choice: Candidate | None) -> _Got:
        """Get the chosen checkpoint, without changing what lies in the output directory."""
        if choice is None:
            return _Got()
        if not choice.location:
            return self._get_local(choice)
        store = self._options.store
        assert store is not None
        plan = self._plan(store, choice)
        got = self._download(store, replace(plan, pointers={}), choice)
        got = replace(got, pointers=tuple(plan.pointers.items()))
        if got.place and (best := absent_best(got.place)):
            self._get_best(store, best)
        return got

    def _get_local(self, choice: Candidate) -> _Got:
        """Return the checkpoint that is whole in the output directory, if it is still the same."""
        self._here = judge_output_dir(self._out, self._attempt.node)
        one = next((one for one in self._here if one.save.id == choice.id), None)
        if one is None or not one.is_whole:
            why = (one.torn or one.lacking) if one else "it is not there any more, or was changed"
            raise Incomplete(f"{self._out}: {choice.checkpoint}: {why}")
        if best := absent_best(one.path):
            self._get_best(self._options.store, best)
        return _Got(one.path, one.path)

    def _home(self, name: str) -> Path:
        """Return where checkpoints of this series lie, else the output directory."""
        series = series_and_step(name)[0]
        names = ((one.path, one.save.checkpoint) for one in self._here)
        ours = (p for p, own in names if p.name == own and series_and_step(own)[0] == series)
        return next((path.parent for path in ours), self._out)

    def _plan(self, store: Store, choice: Candidate) -> PullPlan:
        """Plan the download of the very save that was chosen."""
        name = f"{self._options.run}/{choice.location}"
        seen = read_location(store, self._options.run, choice.location).of(
            self._options.run, choice.location
        )
        if seen is None or save_id(choice.location, (k.name for k in seen.manifests)) != choice.id:
            raise Incomplete(f"{name}: it was changed since it was chosen", hint="begin again")
        senders = {known.manifest.node for known in seen.manifests}
        node = self._options.node if senders == self._nodes else ""
        plan = plan_checkpoint(seen, node)
        if plan.missing:
            why = "; ".join(plan.missing[:8])
            kind = Corrupt if seen.status == "DAMAGED" else Incomplete
            raise kind(f"{name}: not all of its files are in the store: {why}")
        return plan

    def _download(self, store: Store, plan: PullPlan, choice: Candidate) -> _Got:
        """Download into the output directory, or beside it where another save has the name."""
        final = self._home(plan.name) / plan.name
        staging = staging_of(self._out, choice.id)
        tries, size, until = 0, -1, 0.0
        while True:
            download = Download(final.parent, plan)
            try:
                if inode(staging / plan.name) is None:
                    with contextlib.suppress(_OtherBytes):
                        return self._run(download, store, final)
                other, near = inode(final), final if final.is_dir() else None
                download = Download(staging, plan, near)
                return replace(self._run(download, store, final), other=other)
            except Busy as e:  # a node that shares this directory is at it
                if size < 0:
                    self._options.say(f"waits for another download of {plan.name}")
                if (now_there := download.downloaded_bytes()) != size:
                    size, until = now_there, time.monotonic() + self._options.wait
                elif time.monotonic() > until:
                    text = f"it has got nothing for {self._options.wait:.0f} s"
                    raise Incomplete(f"{e}: {text}", hint="stop the other download") from e
            except ConfigError:
                tries += 1
                if tries == _MOST_TRIES:  # else another node has put it there meanwhile
                    raise
            time.sleep(self._options.poll)

    def _run(self, download: Download, store: Store, final: Path) -> _Got:
        """Run a download.

        Raises _OtherBytes where something else has its place, and the error of the worst file.
        """
        target = download.directory
        was_taken = inode(target) is not None
        try:
            done = download.run(store, self._options.progress, self._options.threads)
        except Busy:
            raise
        except ConfigError as e:
            if was_taken and target == final:
                raise _OtherBytes(str(e), hint=e.hint) from e
            raise
        if done.failed:
            path, error = max(done.failed.items(), key=lambda one: one[1].exit_code)
            raise type(error)(f"{self._options.run}/{final.name}: {path}: {error}", hint=error.hint)
        return _Got(done.directory, final)

    def _get_best(self, store: Store | None, best: str) -> None:
        """Get the best checkpoint, which the Trainer loads at its end; note what became of it."""
        path = Path(best).absolute()
        text = f"trainer_state.json names {best} as the best checkpoint, which is not here"
        if store is None or path.parent != self._out:
            self._notes.append(f"{text}: load_best_model_at_end loads nothing")
            return
        try:
            found = find(store, PullRequest(f"{self._options.run}/{path.name}"))
            plan = replace(found.plan, pointers={})
            done = Download(self._out, plan).run(store, None, self._options.threads)
            if done.failed:
                raise next(iter(done.failed.values()))
        except CkptsyncError as e:
            self._notes.append(f"{text}, and cannot be pulled: {e}")
            return
        self._notes.append(f"{path.name}, the best checkpoint, was pulled, too")

    # Once all are ready.

    def _list_aside(self, choice: Candidate | None) -> list[tuple[str, str]]:
        """Return the paths of what is to be moved aside, each with the id of its save."""
        here = judge_output_dir(self._out, self._attempt.node)
        newer = list_newer(here, choice)
        if self._options.keep_newer:
            names = ", ".join(one.save.checkpoint for one in newer)
            if names:
                self._notes.append(f"{names} stay, since they are to be kept")
            return []
        return [(one.path.relative_to(self._out).as_posix(), one.save.id) for one in newer]

    def _apply(self, got: _Got, aside: Collection[tuple[str, str]]) -> None:
        """Move aside what is newer or torn, and put the checkpoint in its place.

        Raises StoreError.
        """
        if not self._out.is_dir():
            return
        with locked(self._out):
            paths = [
                one.path
                for one in judge_output_dir(self._out, self._attempt.node)
                if (one.path.relative_to(self._out).as_posix(), one.save.id) in aside
            ]
            # a node that shares this directory may have put the checkpoint there before
            is_staged = got.place != got.final and inode(got.place) is not None
            if is_staged and got.final and got.other and inode(got.final) == got.other:
                paths.append(got.final)
            for path in move_aside(self._out, list(dict.fromkeys(paths))):
                self._notes.append(f"{path.name} was moved to {path.parent}")
            if got.place and got.final:
                if is_staged:
                    put_in_place(got.place, got.final)
                write_pointers(got.final.parent, dict(got.pointers))
            remove_staging(self._out)
            if got.final and inode(got.final) is None:
                raise Incomplete(f"{got.final}: removed by another process", hint="begin again")

    def _start(
        self, choice: Candidate | None, got: _Got, records: Mapping[str, NodeRecord]
    ) -> Start:
        where = f" of {self._options.run} in the store" if choice and choice.location else ""
        if choice is None:
            text = "begins from the beginning: there is no checkpoint that all nodes could resume"
        else:
            kind = "newest VERIFIED" if self._options.trust == "verified" else "newest complete"
            kind = kind if choice.location else "newest that is whole in the output directory"
            text = f"begins with {choice.checkpoint}{where}, the {kind}"
            text += f" of all {self._attempt.nnodes} nodes" if self._attempt.nnodes > 1 else ""
        notes = [one for one in (why_chosen(records, choice), *self._notes) if one]
        text = "; ".join([text, *notes])
        return Start(got.final, choice.step if choice else None, text)
