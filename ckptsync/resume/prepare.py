"""Agree on one checkpoint with the training's other nodes, and get it.

A training must begin on all nodes with the same save, or on none.  Each node writes what it could
begin with, waits for the records of the others, and chooses by them (`choose`).  It downloads the
checkpoint, and writes that it is ready.  Only when all nodes are ready does each rename directories
in its output directory.  If one node fails, or does nothing for too long, no node begins, and all
raise the same error.

A node can be killed at any moment.  Started again in the same attempt, it finds its own record and
the decision, and continues the download.
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
_SLOWEST = 10  # the longest pause between two listings, as a multiple of `PrepareOptions.poll`
_SIGN_EVERY = 30.0  # seconds between two signs of a node that downloads, at most
_MOST_TRIES = 3


def _ignore(_text: str) -> None:
    """Say nothing."""


@dataclass(frozen=True, slots=True)
class PrepareOptions:
    """How a node prepares to begin.

    Attributes:
        store: the store; without it only the checkpoints of the output directory count.
        run: the run's name in the store.
        trust: whether a checkpoint must be VERIFIED, or only complete.
        wait: seconds without a sign of any node after which the attempt has failed; a node that
            downloads gives signs.
        keep_newer: leave checkpoints that are newer than the chosen one, or torn, where they are.
        require: raise Incomplete if there is no checkpoint to begin with.
        node: download only what this node needs, as `ckptsync pull --node`, if the nodes of the
            attempt are those that sent the checkpoint; otherwise a launcher may give a rank to
            another node.  Empty: download everything.
        threads: the threads of the download.
        poll: seconds between the first two listings of the attempt's records; then rarer.
        say: gets sentences for the log.
        progress: gets the bytes of the download.

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
    """The checkpoint that a training begins with.

    ``checkpoint`` and ``step`` are None if it begins from the beginning.  ``text`` is one sentence
    for the log: which checkpoint was chosen, and why.
    """

    checkpoint: Path | None
    step: int | None
    text: str


def prepare(output_dir: Path, attempt: Attempt, options: PrepareOptions) -> Start:
    """Return the checkpoint that every node of an attempt begins with, once all nodes have it.

    It lies in ``output_dir`` then, and newer or torn checkpoints there are moved aside.  If the
    nodes have none in common, `Start.checkpoint` is None, unless ``require`` or a checkpoint that
    is not verified yet makes that an error.  The same attempt of several nodes gives the same
    answer on every node, however often it is called.  One node alone writes no records, and chooses
    among the checkpoints of now.

    If one node cannot begin, every node raises an error of the same class.

    Raises:
        Incomplete: if a node does not join in time, or ``require`` finds no checkpoint.
        ConfigError: if a training writes into ``output_dir``, the records of nodes contradict each
            other, several nodes have no store, or the store and ``output_dir`` overlap.
        StoreError, Unsupported, Corrupt: if the store, a record or a file cannot be read.

    """
    output_dir = output_dir.absolute()
    if options.store is not None:
        check_outside(options.store, output_dir)
    elif attempt.nnodes > 1:
        raise ConfigError(
            f"{attempt.nnodes} nodes agree on a checkpoint through a store, and none is named",
            hint="name it: --store URL, or -c FILE",
        )
    preparation = _Preparation(output_dir, attempt, options)
    return preparation.run_alone() if attempt.nnodes == 1 else preparation.run_with_nodes()


@dataclass(frozen=True, slots=True)
class _LocalCopy:
    """The chosen checkpoint on this machine; all fields are empty without one.

    ``current``: where it lies now; ``final``: where the training will find it.  ``occupant``: the
    device and inode of another save that lies at ``final``.  ``pointers``: files such as ``latest``
    to write beside it, and their contents.
    """

    current: Path | None = None
    final: Path | None = None
    occupant: tuple[int, int] | None = None
    pointers: tuple[tuple[str, bytes], ...] = ()


class _NameTaken(ConfigError):
    """The directory of the checkpoint's name exists, and holds another save."""


class _Preparation:
    """Prepares one node for one attempt; notes for the log collect in `_notes`."""

    def __init__(self, output_dir: Path, attempt: Attempt, options: PrepareOptions) -> None:
        """Keep the arguments; read nothing."""
        self._output_dir, self._attempt, self._options = output_dir, attempt, options
        self._checkpoints: tuple[LocalCheckpoint, ...] = ()
        self._notes: list[str] = []
        self._unresumable = ""  # the newest complete checkpoint, and what of it resuming lacks
        self._nodes = {attempt.node}

    def run_alone(self) -> Start:
        """Put the checkpoint that the only node begins with in its place; return the start.

        Downloads it if only the store has it, and moves newer ones aside.  Raises ConfigError if a
        training writes into the directory, Incomplete without a checkpoint that is required,
        StoreError.
        """
        self._judge_output_dir()
        records = {self._attempt.node: self._await_own_record()}
        choice = choose(records)
        self._check_required(choice, records)
        copy = self._get_checkpoint(choice)
        self._move_into_place(copy, self._list_aside(choice))
        return self._describe_start(choice, copy, records)

    def run_with_nodes(self) -> Start:
        """Return the checkpoint that all nodes begin with, in its place on this node.

        Record this node, wait for the others twice: until all joined, and until all are ready.
        Then delete records of old attempts, if allowed.  Raise the same error on all nodes if one
        of them cannot begin; an error after all are ready is this node's alone.
        """
        store = self._options.store
        assert store is not None
        records = AttemptRecords(store, self._options.run, self._attempt)
        try:
            self._judge_output_dir()
            state = self._join(records)
            self._nodes = set(state.nodes)
            choice = choose(state.nodes)
            self._check_required(choice, state.nodes)
            with self._reported_download(records):
                copy = self._get_checkpoint(choice)
            aside = self._wait_until_ready(records, choice)
        except CkptsyncError as e:
            end = self._close(records, e)
            end.raise_error()
            raise
        self._move_into_place(copy, aside)
        with contextlib.suppress(CkptsyncError):  # a node may lack the right to delete
            forget_old_attempts(store, self._options.run, self._attempt.name)
        return self._describe_start(choice, copy, state.nodes)

    def _close(self, records: AttemptRecords, error: CkptsyncError) -> End:
        """Write that the attempt has failed, unless it ended before; return its end for all nodes.

        If the store cannot be reached, return this node's own error as the end.
        """
        own = failed(self._attempt.node, error)
        try:
            return records.close(own)
        except CkptsyncError:
            return End(self._attempt.node, str(error), error.hint, error.exit_code)

    def _judge_output_dir(self) -> None:
        """Read the checkpoints of the output directory into `_checkpoints`.

        Raises ConfigError if a training writes there, ConfigError or StoreError if it cannot be
        read.
        """
        check_idle(self._output_dir)
        self._checkpoints = judge_output_dir(self._output_dir, self._attempt.node)

    def _await_own_record(self) -> NodeRecord:
        """Return the record of what this node could begin with.

        While a newer checkpoint is complete but not verified, a verifier may be reading it: wait
        for that, at most half of ``wait`` seconds.  Notes what was not waited for.  Raises
        StoreError.
        """
        until, announced = time.monotonic() + self._options.wait / 2, ""
        record, unverified = self._read_own()
        while unverified and time.monotonic() < until:
            if unverified != announced:
                announced = unverified
                self._options.say(f"waits until {announced}, which is complete, is verified")
            time.sleep(min(self._options.poll * _SLOWEST, self._options.wait / 8))
            record, unverified = self._read_own()
        if unverified and record.candidates:
            self._notes.append(f"{unverified} is newer and complete, but no verifier has read it")
        if self._unresumable:
            self._notes.append(self._unresumable)
        return record

    def _read_own(self) -> tuple[NodeRecord, str]:
        """Return this node's record as of now, and a newer checkpoint without verification, or "".

        Reads the store, if there is one; notes the newest checkpoint that lacks what resuming
        needs. Raises StoreError.
        """
        store, run = self._options.store, self._options.run
        summaries = read_catalogue(store, run=run).summaries if store is not None else ()
        run_summaries = [summary for summary in summaries if summary.run == run]
        local = [checkpoint.save for checkpoint in self._checkpoints if checkpoint.is_whole]
        is_verified = self._options.trust == "verified"
        candidates = list_candidates(run_summaries, local, is_verified=is_verified)
        unverified = find_unverified(run_summaries, local, candidates)
        recorded_unverified = "" if candidates else unverified
        self._unresumable = find_unresumable(run_summaries)
        return NodeRecord(
            self._attempt.node, self._attempt.nnodes, candidates, recorded_unverified
        ), unverified

    def _check_required(self, choice: Candidate | None, records: Mapping[str, NodeRecord]) -> None:
        """Raise Incomplete without a choice if ``require`` is set, or a verifier may give one.

        The latter: a node has recorded a complete checkpoint that is not verified.
        """
        if choice is not None:
            return
        name = self._options.run or self._output_dir
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

    def _join(self, records: AttemptRecords) -> AttemptState:
        """Write this node's record if it is missing; wait; return the state once all have joined.

        A node that was started again keeps its record, and says if newer saves are ignored.  Raises
        what `_wait` raises, and ConfigError if the attempt has all its nodes without this one.
        """
        state = records.read()
        if self._attempt.node not in state.nodes:
            own = self._await_own_record()
            # a node too many must not write a record, which would count for ever
            check_nodes({**state.nodes, own.node: own}, self._attempt.nnodes)
            records.join(own)
        elif newer := self._warn_of_newer(state):
            self._options.say(newer)
        self._options.say(f"waits for {self._attempt.nnodes} nodes in attempt {self._attempt.name}")

        def is_complete(state: AttemptState) -> bool:
            """Return whether every node has joined."""
            return len(state.nodes) == self._attempt.nnodes

        def missing(state: AttemptState) -> str:
            """Return which nodes have joined, for an error."""
            nodes = ", ".join(sorted(state.nodes))
            return f"only {len(state.nodes)} of {self._attempt.nnodes} nodes have come: {nodes}"

        return self._wait(records, is_complete, missing)

    def _warn_of_newer(self, state: AttemptState) -> str:
        """Return a warning that a reused attempt ignores newer saves; empty if there is none.

        Raises StoreError.
        """
        ids = {save.id for save in state.nodes[self._attempt.node].candidates}
        new = [save.checkpoint for save in self._read_own()[0].candidates if save.id not in ids]
        reused = f"attempt {self._attempt.name} was begun before"
        hint = "give each start of a training its own --attempt"
        return f"{reused} {new[-1]} was saved, and does not choose it: {hint}" if new else ""

    def _wait_until_ready(
        self, records: AttemptRecords, choice: Candidate | None
    ) -> tuple[tuple[str, str], ...]:
        """Write that this node is ready, wait until all are, and return what it moves aside.

        Also writes the attempt's end: the checkpoint, or an error.  Of several nodes' ends the
        first counts: raise its error, or ConfigError if it has another checkpoint.
        """
        own = records.set_ready(self._list_aside(choice))
        nnodes = self._attempt.nnodes

        def is_over(state: AttemptState) -> bool:
            """Return whether the attempt has ended, or all nodes are ready."""
            return state.end is not None or len(state.ready.keys() & state.nodes.keys()) == nnodes

        def missing(state: AttemptState) -> str:
            """Return which nodes are not ready, for an error."""
            nodes = ", ".join(sorted(state.nodes.keys() - state.ready.keys()))
            return f"without a sign for {self._options.wait:.0f} s: {nodes}"

        checkpoint = choice.checkpoint if choice else ""
        try:
            self._wait(records, is_over, missing)
            end = records.close(End(self._attempt.node, checkpoint=checkpoint))
        except CkptsyncError as e:
            end = self._close(records, e)  # another node may have written before that all are ready
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
        """Return the attempt's state once ``is_done`` says so of it; read the records until then.

        Raises the attempt's error if it has failed, ConfigError if nodes contradict each other,
        and Incomplete, with the text of ``missing``, after ``wait`` seconds without a sign.  A
        Transient of the store is raised only after that time, other errors of it at once.
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
    def _reported_download(self, records: AttemptRecords) -> Iterator[None]:
        """Within the block, write the download's progress into the store, as a sign for others.

        Replaces ``progress`` of `_options` until the block ends.  Writes every `_SIGN_EVERY`
        seconds at most, or each quarter of ``wait`` if that is shorter, and ignores StoreError.
        """
        options_before, last_write = self._options, [time.monotonic()]

        def show(done: int, total: int) -> None:
            """Write a sign if the last one is old, and pass the progress on."""
            now = time.monotonic()
            if now - last_write[0] > min(_SIGN_EVERY, options_before.wait / 4):
                last_write[0] = now
                with contextlib.suppress(CkptsyncError):  # a later sign may succeed
                    records.show_progress(done)
            if options_before.progress:
                options_before.progress(done, total)

        self._options = replace(options_before, progress=show)
        try:
            yield
        finally:
            self._options = options_before

    def _get_checkpoint(self, choice: Candidate | None) -> _LocalCopy:
        """Return the chosen checkpoint on this machine; an empty copy if none is chosen.

        If it is in the store, download it into the output directory, or into a staging directory
        if another save has its name.  Download the best checkpoint that it refers to if that is
        absent; a failure of this is a note.  Files of other saves are not changed.  Raises
        Incomplete if the checkpoint has changed, or another download of it stands still; Corrupt
        if it is damaged in the store; ConfigError, StoreError.
        """
        if choice is None:
            return _LocalCopy()
        if not choice.location:
            return self._get_local(choice)
        store = self._options.store
        assert store is not None
        plan = self._plan(store, choice)
        copy = self._download(store, replace(plan, pointers={}), choice)
        copy = replace(copy, pointers=tuple(plan.pointers.items()))
        if copy.current and (best := absent_best(copy.current)):
            self._pull_best(store, best)
        return copy

    def _get_local(self, choice: Candidate) -> _LocalCopy:
        """Return the chosen checkpoint in the output directory; raise Incomplete if it changed.

        Judges the directory again, and keeps the result in ``_checkpoints``.  If the best
        checkpoint that it refers to is absent, downloads that one.
        """
        self._checkpoints = judge_output_dir(self._output_dir, self._attempt.node)
        local = next((c for c in self._checkpoints if c.save.id == choice.id), None)
        if local is None or not local.is_whole:
            why = (
                (local.torn or local.lacking)
                if local
                else "it is not there any more, or was changed"
            )
            raise Incomplete(f"{self._output_dir}: {choice.checkpoint}: {why}")
        if best := absent_best(local.path):
            self._pull_best(self._options.store, best)
        return _LocalCopy(local.path, local.path)

    def _series_dir(self, name: str) -> Path:
        """Return the directory with checkpoints of the same series, else the output directory."""
        series = series_and_step(name)[0]
        names = ((c.path, c.save.checkpoint) for c in self._checkpoints)
        same_series = (p for p, own in names if p.name == own and series_and_step(own)[0] == series)
        return next((path.parent for path in same_series), self._output_dir)

    def _plan(self, store: Store, choice: Candidate) -> PullPlan:
        """Return the plan of the download of the chosen save.

        Raise Incomplete if the location has changed or lacks files, Corrupt if it is damaged.
        """
        name = f"{self._options.run}/{choice.location}"
        state = read_location(store, self._options.run, choice.location).of(
            self._options.run, choice.location
        )
        if (
            state is None
            or save_id(choice.location, (k.name for k in state.manifests)) != choice.id
        ):
            raise Incomplete(f"{name}: it was changed since it was chosen", hint="begin again")
        senders = {stored.manifest.node for stored in state.manifests}
        node = self._options.node if senders == self._nodes else ""
        plan = plan_checkpoint(state, node)
        if plan.missing:
            why = "; ".join(plan.missing[:8])
            kind = Corrupt if state.status == "DAMAGED" else Incomplete
            raise kind(f"{name}: not all of its files are in the store: {why}")
        return plan

    def _download(self, store: Store, plan: PullPlan, choice: Candidate) -> _LocalCopy:
        """Download to the final place, or to a staging directory if another save has that place.

        Wait for another download of the same checkpoint; raise Incomplete if that stands still for
        ``wait`` seconds.  After a ConfigError it is tried again, three times in all.
        """
        final = self._series_dir(plan.name) / plan.name
        staging = staging_of(self._output_dir, choice.id)
        tries, size, deadline = 0, -1, 0.0
        while True:
            download = Download(final.parent, plan)
            try:
                if inode(staging / plan.name) is None:
                    with contextlib.suppress(_NameTaken):
                        return self._run_download(download, store, final)
                occupant = inode(final)
                download = Download(staging, plan, final if final.is_dir() else None)
                return replace(self._run_download(download, store, final), occupant=occupant)
            except Busy as e:  # a node that shares this directory downloads it
                if size < 0:
                    self._options.say(f"waits for another download of {plan.name}")
                if (downloaded := download.downloaded_bytes()) != size:
                    size, deadline = downloaded, time.monotonic() + self._options.wait
                elif time.monotonic() > deadline:
                    text = f"it has got nothing for {self._options.wait:.0f} s"
                    raise Incomplete(f"{e}: {text}", hint="stop the other download") from e
            except ConfigError:
                tries += 1
                if tries == _MOST_TRIES:  # else another node may just have put it there
                    raise
            time.sleep(self._options.poll)

    def _run_download(self, download: Download, store: Store, final: Path) -> _LocalCopy:
        """Run a download, and return where the checkpoint lies.

        Raises _NameTaken if another save has the final place, Busy if another process downloads the
        same, and the error of the file with the greatest exit code.
        """
        target = download.directory
        was_taken = inode(target) is not None
        try:
            done = download.run(store, self._options.progress, self._options.threads)
        except Busy:
            raise
        except ConfigError as e:
            if was_taken and target == final:
                raise _NameTaken(str(e), hint=e.hint) from e
            raise
        if done.failed:
            path, error = max(done.failed.items(), key=lambda item: item[1].exit_code)
            raise type(error)(f"{self._options.run}/{final.name}: {path}: {error}", hint=error.hint)
        return _LocalCopy(done.directory, final)

    def _pull_best(self, store: Store | None, best: str) -> None:
        """Download the best checkpoint, which the Trainer loads at its end, and note that.

        Never raises CkptsyncError: an error, no store, and a path that does not lie directly in the
        output directory, become notes.
        """
        path = Path(best).absolute()
        text = f"trainer_state.json names {best} as the best checkpoint, which is not here"
        if store is None or path.parent != self._output_dir:
            self._notes.append(f"{text}: load_best_model_at_end loads nothing")
            return
        try:
            checkpoint = find(store, PullRequest(f"{self._options.run}/{path.name}"))
            plan = replace(checkpoint.plan, pointers={})
            done = Download(self._output_dir, plan).run(store, None, self._options.threads)
            if done.failed:
                raise next(iter(done.failed.values()))
        except CkptsyncError as e:
            self._notes.append(f"{text}, and cannot be pulled: {e}")
            return
        self._notes.append(f"{path.name}, the best checkpoint, was pulled, too")

    def _list_aside(self, choice: Candidate | None) -> list[tuple[str, str]]:
        """Return the paths to move aside, each with its save's id.

        With ``keep_newer`` return none, and note their names.  Raises ConfigError or StoreError if
        the directory cannot be read.
        """
        newer = list_newer(judge_output_dir(self._output_dir, self._attempt.node), choice)
        if self._options.keep_newer:
            names = ", ".join(checkpoint.save.checkpoint for checkpoint in newer)
            if names:
                self._notes.append(f"{names} stay, since they are to be kept")
            return []
        return [(c.path.relative_to(self._output_dir).as_posix(), c.save.id) for c in newer]

    def _move_into_place(self, copy: _LocalCopy, aside: Collection[tuple[str, str]]) -> None:
        """Move checkpoints of ``aside`` aside, and put the chosen one and its pointers in place.

        A path is moved only if the same save still lies there; another save in the chosen one's
        place is moved, too.  Notes each move, and removes the staging directory.  Does nothing
        without an output directory, and waits for its lock.  Raises StoreError, and Incomplete if
        another process has removed the checkpoint.
        """
        if not self._output_dir.is_dir():
            return
        with locked(self._output_dir):
            paths = [
                c.path
                for c in judge_output_dir(self._output_dir, self._attempt.node)
                if (c.path.relative_to(self._output_dir).as_posix(), c.save.id) in aside
            ]
            # a node that shares this directory may have put the checkpoint there before
            is_staged = copy.current != copy.final and inode(copy.current) is not None
            if is_staged and copy.final and copy.occupant and inode(copy.final) == copy.occupant:
                paths.append(copy.final)
            for path in move_aside(self._output_dir, list(dict.fromkeys(paths))):
                self._notes.append(f"{path.name} was moved to {path.parent}")
            if copy.current and copy.final:
                if is_staged:
                    put_in_place(copy.current, copy.final)
                write_pointers(copy.final.parent, dict(copy.pointers))
            remove_staging(self._output_dir)
            if copy.final and inode(copy.final) is None:
                raise Incomplete(f"{copy.final}: removed by another process", hint="begin again")

    def _describe_start(
        self, choice: Candidate | None, copy: _LocalCopy, records: Mapping[str, NodeRecord]
    ) -> Start:
        """Return the start with its sentence for the log: the choice, why, and all notes."""
        where = f" of {self._options.run} in the store" if choice and choice.location else ""
        if choice is None:
            text = "begins from the beginning: there is no checkpoint that all nodes could resume"
        else:
            kind = "newest VERIFIED" if self._options.trust == "verified" else "newest complete"
            kind = kind if choice.location else "newest that is whole in the output directory"
            text = f"begins with {choice.checkpoint}{where}, the {kind}"
            text += f" of all {self._attempt.nnodes} nodes" if self._attempt.nnodes > 1 else ""
        notes = filter(None, (why_chosen(records, choice), *self._notes))
        text = "; ".join([text, *notes])
        return Start(copy.final, choice.step if choice else None, text)
