"""Writing of checkpoints: a background thread writes them from snapshots in memory."""

import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpigossip.cluster.communicator import CollectiveError
from mpigossip.cluster.world import World
from mpigossip.config import CheckpointSection
from mpigossip.config.errors import NonFiniteError
from mpigossip.config.readable import print_note
from mpigossip.store import StoreError, checkpoint
from mpigossip.store.checkpoint import Entry, NodeState

LAG = 4
"""Number of steps between two checks whether all ranks have written their files."""


@dataclass
class _Writing:
    step: int
    temporary: Path
    meta: Mapping[str, Any]
    files: Future
    commit: Future | None = None
    agreement: Any = None


class Saver:
    """Background writer of checkpoints; a new checkpoint waits until the last one is complete.

    A thread of each rank writes the files of its nodes into a temporary folder. Every `LAG` steps,
    the ranks find out by a non-blocking reduction whether all files are written. If so, the thread
    of rank 0 writes the manifest and renames the folder, which completes the checkpoint.
    """

    def __init__(self, world: World, folder: Path, job: str, settings: CheckpointSection):
        """Start the thread of this rank.

        :param world: ranks of the run
        :param folder: the run directory
        :param job: the job as TOML
        :param settings: section `[checkpoint]`: how many checkpoints to keep, and what to do if
            writing fails
        """
        self._world = world
        self._folder = folder
        self._job = job
        self._settings = settings
        self._continues = settings.on_error == "continue"
        self._pool = ThreadPoolExecutor(1, "checkpoint")
        self._now: _Writing | None = None
        self.last: Path | None = None
        """Newest complete checkpoint of this run, on rank 0."""

    def begin(
        self, step: int, states: Sequence[tuple[int, NodeState]], meta: Mapping[str, Any]
    ) -> None:
        """Start to write a checkpoint of the local nodes, or of a node's local slots; collective.

        :param step: number of steps done
        :param states: pairs (number of a node, its state). The states must not change until
            `finish` has returned
        :param meta: further entries of the manifest
        :raises JobError: as :meth:`finish`, for the last checkpoint or for this one
        :raises NonFiniteError: on all ranks, if a node had such values in the last checkpoint
        """
        self.finish()
        folder = None
        error = None
        if self._world.rank == 0:
            try:
                folder = checkpoint.begin(self._folder, step)
            except StoreError as exception:
                error = str(exception)
        folder, error = self._world.broadcast((folder, error))
        if error is not None:
            self._failed(step, [error])
            return
        files = self._pool.submit(_write, folder, states)
        self._now = _Writing(step, folder, meta, files)

    def poll(self, done: int) -> None:
        """Advance the checkpoint that is being written, without waiting for the disk.

        All ranks have to make this call, with equal ``done``.

        :param done: number of steps done; nothing new begins unless it is a multiple of `LAG`
        :raises JobError: on all ranks, if the files could not be written and `checkpoint.on_error`
            is "stop", unless the folder was removed meanwhile
        :raises NonFiniteError: on all ranks, if a node has infinite or NaN values
        """
        now = self._now
        if now is not None and now.commit is not None and now.commit.done():
            self.last = (not now.commit.exception() and now.commit.result()) or self.last
        if now is None or done % LAG or now.commit is not None:
            return
        agreement = now.agreement
        now.agreement = None
        if agreement is not None and agreement.read() == 0:
            self._gather(now)
        else:
            now.agreement = self._world.start_agree(int(not now.files.done()))

    def finish(self) -> None:
        """Wait until the checkpoint that is being written is complete; collective.

        :raises JobError: on all ranks, if it could not be written and `checkpoint.on_error` is
            "stop", unless its folder was removed meanwhile
        :raises NonFiniteError: on all ranks, if a node has infinite or NaN values
        """
        now = self._now
        if now is None:
            return
        if now.agreement is not None:
            now.agreement.read()
        if now.commit is None:
            self._gather(now)
        if now.commit is not None:
            error = None
            try:
                self.last = now.commit.result() or self.last
            except (OSError, StoreError) as exception:
                error = str(exception)
            error, gone = self._world.broadcast((error, _gone(now.temporary)))
            if error is not None:
                self._failed(now.step, [error], gone)
        self._now = None

    def _gather(self, now: _Writing) -> None:
        """Gather the manifest's entries on rank 0, whose thread then completes the checkpoint.

        Collective; this raises the errors of :meth:`finish`.
        """
        try:
            written: tuple[Sequence[Entry], Any] = (now.files.result(), None)
        except (OSError, StoreError, NonFiniteError) as exception:
            written = ((), exception)
        gathered = self._world.gather(written)
        errors = None if gathered is None else [error for _, error in gathered if error]
        errors, gone = self._world.broadcast((errors, _gone(now.temporary)))
        if errors:
            if self._world.rank == 0:
                shutil.rmtree(now.temporary, ignore_errors=True)
            self._now = None
            self._failed(now.step, errors, gone)
            return
        entries = [entry for part, _ in gathered or () for entry in part]
        now.commit = self._pool.submit(self._commit, now, entries)

    def _commit(self, now: _Writing, entries: Sequence[Entry]) -> Path | None:
        if self._world.rank != 0:
            return None
        path = checkpoint.commit(
            now.temporary, self._folder, now.step, entries, self._job, now.meta
        )
        try:
            checkpoint.prune(self._folder, self._settings.keep, self._settings.keep_every)
        except StoreError as error:  # The new checkpoint is complete: this must not end the run.
            print_note(f"an old checkpoint could not be removed: {error}; the run continues")
        return path

    def _failed(self, step: int, errors: Sequence[Any], gone: bool = False) -> None:
        """Raise an error or print a note, as the setting `checkpoint.on_error` says.

        All ranks do the same. If the state has infinite or NaN values, an error is raised
        regardless of the setting.

        :param step: number of steps done at the checkpoint
        :param errors: messages or exceptions, equal on all ranks
        :param gone: whether the checkpoint's folder was removed while it was written; training then
            continues regardless of the setting, unless a node has infinite or NaN values
        :raises NonFiniteError: if a node has infinite or NaN values
        :raises JobError: if `checkpoint.on_error` is "stop" and ``gone`` is false
        """
        error = max(errors, key=lambda candidate: isinstance(candidate, NonFiniteError))
        text = f"the checkpoint of step {step} could not be written: {error}"
        if isinstance(error, NonFiniteError):
            raise NonFiniteError(
                f"{text}. Earlier checkpoints are kept: lower the learning rate, and resume"
            )
        if not self._continues and not gone:
            raise CollectiveError(
                [
                    f"{text}. Earlier checkpoints are complete: free disk space and resume, or set "
                    'checkpoint.on_error = "continue", so that runs continue without it'
                ]
            )
        if self._world.rank == 0:
            print_note(f"{text}; training continues")

    def abandon(self) -> None:
        """Abandon the checkpoint that is being written, after a rank failure; not collective."""
        self._pool.shutdown()  # This waits for the disk, but not for other ranks.
        self._now = None

    def close(self) -> None:
        """Finish the checkpoint that is being written, and end the thread; collective."""
        self.finish()
        self._pool.shutdown()


def _write(folder: Path, states: Sequence[tuple[int, NodeState]]) -> list[Entry]:
    """Write the states of nodes, and return their entries.

    :raises NonFiniteError: before one is written, if a state has infinite or NaN values
    """
    for node, state in states:
        if problem := state.not_finite():
            raise NonFiniteError(f"node {node} has {problem}")
    return [checkpoint.write_node(folder, node, state) for node, state in states]


def _gone(folder: Path) -> bool:
    """Return whether the folder no longer exists; False if the file system gives another error."""
    try:
        folder.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        pass
    return False
