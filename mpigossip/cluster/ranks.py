"""The ranks of a job: MPI start-up, the launcher's check, deadlines, agreement, abort on error.

`world()` starts MPI and gives a `World`; `Alone` has the same interface without MPI. Importing
this module imports no MPI.
"""

import contextlib
import multiprocessing
import os
import socket
import sys
import threading
import traceback
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from mpigossip.cluster import deadline, process, ulfm, uncaught
from mpigossip.cluster.agreement import Agreement, Meetings, limited
from mpigossip.cluster.deadline import sharp_timers
from mpigossip.cluster.launcher import (
    LaunchError,
    check_alone,
    check_launcher,
    check_library,
    places,
)
from mpigossip.cluster.nodes import arranged
from mpigossip.cluster.process import TIMEOUT_S, ending
from mpigossip.cluster.waits import Roll
from mpigossip.cluster.world import Nodes
from mpigossip.config.errors import Failure

if TYPE_CHECKING:
    from mpi4py import MPI


class Alone:
    """One process without MPI, with the interface of `world.World`: what `simulate` uses."""

    rank = 0
    size = 1
    comm = None
    names: tuple[int, ...] = (0,)
    beside = (0, 1)
    launched = fault_tolerant = survives = diminished = False
    timeout_s = TIMEOUT_S

    def __init__(self) -> None:
        self.hosts: tuple[str, ...] = (socket.gethostname(),)
        self.nodes = Nodes.of_ranks(self)
        self.resources = contextlib.ExitStack()

    def gather(self, value: Any) -> list | None:
        """`[value]`."""
        return [value]

    def broadcast(self, value: Any) -> Any:
        """The value itself."""
        return value

    def start_agree(self, flag: int) -> Agreement:
        """An agreement that is ready at once."""
        return Agreement(np.array([flag]), None)

    def agree(self, flag: int) -> int:
        """The flag itself."""
        return int(flag)

    @contextlib.contextmanager
    def together(self, *mistakes: type[Exception]) -> Iterator[None]:
        """A block whose mistakes all ranks are to learn of; alone, nothing is added."""
        yield

    def barrier(self) -> None:
        """Nobody to wait for."""

    def duplicate(self) -> None:
        """No communicator."""

    def shrink(self) -> None:
        """Nobody was lost."""

    def arrange(self, ranks_per_node: int | str) -> None:
        """No ranks to make nodes of."""

    def lost_by(self, error: BaseException) -> bool:
        """Nobody to lose."""
        return False

    def abort(self, code: int = 1) -> None:
        """Ends this process at once."""
        os._exit(code)

    def close(self) -> None:
        """Closes `resources`."""
        self.resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class World(Meetings):
    """All ranks of this job. Made by `world()`, on every rank together; close it likewise.

    Attributes: `rank`, `size`, `hosts` (host name of each rank), `comm` (a duplicate of
    MPI.COMM_WORLD) and `resources` (an ExitStack of what is to be closed before it). While it is
    open, an exception that nobody catches, in any thread of any rank, aborts the whole job and
    says on which rank and host. A rank that leaves the `with` block with an exit code other than
    0 gives the others `process.LEAVE_S` seconds to end too, then aborts the job: none is left
    hanging.

    Where MPI is `fault_tolerant` (see `ulfm`) and the job `survives`, `shrink` makes this the
    world of those that outlived the loss of a rank; they get new numbers, and `names` are the
    numbers that they began with.
    """

    def __init__(self, comm: "MPI.Intracomm", timeout_s: float = TIMEOUT_S):
        from mpi4py import MPI

        host = MPI.Get_processor_name() or socket.gethostname()
        super().__init__(comm.Dup(), tuple(limited(comm, timeout_s).allgather(host)), timeout_s)
        self.launched = bool(places(os.environ))
        self.fault_tolerant = ulfm.fault_tolerant(MPI.Get_library_version(), os.environ)
        self.survives = self.diminished = False
        self.names = tuple(range(self.size))
        self.nodes = Nodes.of_ranks(self)
        self._first = (self.comm.group, self.hosts)
        # agreements are begun at steps, which ranks of a user's loop may miss
        self._votes = self.duplicate()
        # MPI would match what a rank that closes calls with another rank's barrier
        self._closing = self.duplicate()
        self._open = True
        self.resources = contextlib.ExitStack()
        self._roll = None if self.size == 1 else Roll(self.comm.Dup(), self.hosts)
        deadline.roll = self._roll
        self._hooks = (sys.excepthook, threading.excepthook)
        if self.size > 1:
            sys.excepthook = self._uncaught
            threading.excepthook = self._uncaught_in_thread

    def arrange(self, ranks_per_node: int | str) -> None:
        """Make the ranks into nodes: as many of a host as that, or all of it ("host").

        JobError on every rank where they can't be.
        """
        self.nodes = arranged(self, ranks_per_node)

    def lost_by(self, error: BaseException) -> bool:
        """Whether an exception means that a rank was lost and the others can go on."""
        return self.survives and ulfm.is_loss(error)

    def shrink(self) -> None:
        """Goes on with the survivors: all of them call it, also those that saw nothing yet.

        Every communicator of this world is revoked, which brings the others out of their waits.
        LateError where a survivor doesn't come.
        """
        comm = ulfm.shrunken([comm for comm in self._family if comm], self.timeout_s)
        ulfm.given_up.append((self._family, self._asked))
        self._votes = comm.Dup()
        self._family, self._asked = [comm, self._votes], []
        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        self.nodes = Nodes.of_ranks(self)
        group, hosts = self._first
        self.names = tuple(comm.group.Translate_ranks(group=group))
        self.hosts = tuple(hosts[name] for name in self.names)
        self.diminished, ending.survivors = True, comm
        ulfm.given_up.append(self._roll)
        self._roll = deadline.roll = None if self.size == 1 else Roll(comm.Dup(), self.hosts)

    def abort(self, code: int = 1) -> None:
        """Ends all ranks of the job at once."""
        process.abort(self.comm, code)

    def close(self) -> None:
        """Frees the communicator and restores the exception hooks; can be called again."""
        if self._open:
            self._open = False
            self.resources.close()
            if not self.diminished:
                with deadline.ends(deadline.steps, what="world"):
                    self.settle()
            sys.excepthook, threading.excepthook = self._hooks
            if deadline.roll is self._roll:
                deadline.roll = None
            if not self.diminished:
                if self._roll is not None:
                    self._roll.close(self.timeout_s)
                for comm in (self._votes, self._closing, self.comm):
                    comm.Free()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        _: TracebackType | None,
    ) -> None:
        # With an exception under way the hooks must stay, and nothing collective may be called.
        if kind is None:
            self.close()
        else:
            ending.code = uncaught.code(error)
            ending.cause = traceback.format_exception_only(error)[-1].strip()

    def _uncaught(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        ending.code = uncaught.code(error)
        every = None if self._roll is None else uncaught.ended_by_all(self._roll, error)
        if every is None:  # some go on, or wait for this one, whose word ends the job
            uncaught.takes_turn(self.rank)
            if self._roll is None or self._roll.speaks_first():
                uncaught.say(uncaught.told(error, self._name))
        else:  # the first of each kind says it
            if every.index(every[self.rank]) == self.rank:
                who = "" if len(set(every)) == 1 else self._name
                uncaught.say(uncaught.told(error, who, f"all {self.size} ranks"))
            if not isinstance(error, Failure):  # exchanges may be open, which MPI would wait for
                uncaught.leave(ending.code)
            uncaught.takes_turn(self.rank)
        self.abort(ending.code)

    def _uncaught_in_thread(self, args: threading.ExceptHookArgs) -> None:
        if args.exc_type is SystemExit or args.exc_value is None:
            return
        name = args.thread.name if args.thread else "a thread"
        uncaught.say(uncaught.told(args.exc_value, self._name, where=f" in {name}"))
        self.abort(1)

    @property
    def _name(self) -> str:
        return f"rank {self.rank} of {self.size} on {self.hosts[self.rank]}"


def world(timeout_s: float = TIMEOUT_S, kind: type[World] = World) -> World:
    """Starts MPI, unless it runs already, and joins all ranks of the job; call it on every rank.

    Under a launcher (srun, mpirun) the world has its ranks; without one, a world of one.
    `timeout_s` limits waiting in `barrier` and `agree`. LaunchError where MPI can't be loaded, or
    where several processes were started that MPI doesn't join. `kind`: what is made.
    """
    try:
        return _world(timeout_s, kind)
    except LaunchError as error:
        sys.excepthook = uncaught.once(error)
        raise


def _world(timeout_s: float, kind: type[World]) -> World:
    if "mpi4py.MPI" not in sys.modules:
        process.begin(timeout_s=timeout_s)
    try:
        import mpi4py

        if "mpi4py.MPI" not in sys.modules:
            mpi4py.rc.initialize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise LaunchError(
            f"MPI can't be loaded ({str(error).splitlines()[0]}); load the site's MPI module, or "
            "`pip install mpich`, or name the library: MPI4PY_LIBMPI=/path/to/libmpi.so. "
            "`mpigossip simulate` needs no MPI"
        ) from error
    sharp_timers()
    ours = not MPI.Is_initialized()
    if ours:
        check_library(MPI.Get_library_version(), os.environ)
        process.init()
    ending.prepare(finalize=ours)
    check_launcher(MPI.COMM_WORLD.size, MPI.Get_library_version(), os.environ)
    check_alone(MPI.COMM_WORLD.size, os.environ, multiprocessing.current_process()._identity)
    made = kind(MPI.COMM_WORLD, timeout_s)
    process.started()
    return made
