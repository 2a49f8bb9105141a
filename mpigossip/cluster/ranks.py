"""The ranks of a job: MPI start-up, the launcher's check, deadlines, agreement, abort on error.

`world()` starts MPI and returns a `World`; `SingleProcess` has the same interface without MPI.
Importing this module does not import MPI.
"""

import contextlib
import multiprocessing
import os
import socket
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from mpigossip.cluster import deadline, process, uncaught
from mpigossip.cluster.agreement import Communicator, with_timeout
from mpigossip.cluster.deadline import Deadline, WaitTimeoutError, sharp_timers
from mpigossip.cluster.launcher import (
    LaunchError,
    check_alone,
    check_launcher,
    check_library,
    launcher_ranks,
    no_mpi,
)
from mpigossip.cluster.nodes import group_ranks
from mpigossip.cluster.process import TIMEOUT_S, exit_handler
from mpigossip.cluster.waits import WaitMonitor
from mpigossip.cluster.world import Nodes
from mpigossip.cluster.world import SingleProcess as SingleProcess
from mpigossip.config.errors import FAILED, Failure

if TYPE_CHECKING:
    from mpi4py import MPI
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

keep_alive: list[Any] = []
"""What had to be left behind after a loss: MPI may write there, and some of it can't be freed."""


class World(Communicator):
    """The ranks of a program: made by :func:`mpigossip.world` and closed by its ``with`` block.

    `rank`, `size`: number of this rank, and how many there are. `hosts`: host name of each rank.
    `nodes`: `nodes.count` nodes, `nodes.per_node` ranks in each. `comm`: mpi4py's communicator, a
    duplicate of MPI.COMM_WORLD. While it is open, an exception that nobody catches, in
    any thread of any rank, aborts the whole job and says on which rank and host. A rank that
    leaves the `with` block with an exit code other than 0 gives the others `process.LEAVE_S`
    seconds to end too, then aborts the job: none is left hanging.

    Where MPI is `fault_tolerant` and the job `survives`, `shrink` makes this the world of those
    that outlived the loss of a rank; they get new numbers, and `names` are the numbers that they
    began with.
    """

    whole = True

    def __init__(self, comm: "MPI.Intracomm", timeout_s: float = TIMEOUT_S):
        from mpi4py import MPI

        process.own_mpi()
        host = MPI.Get_processor_name() or socket.gethostname()
        self.comm = comm
        self.rank = comm.rank
        self.size = comm.size
        self._told_as = f"on {host}"
        self._roll = None
        # A call of MPI that doesn't return is reported by a thread, whose exception ends the job
        # only with these hooks: install them before the first such call.
        self._hooks = (sys.excepthook, threading.excepthook)
        if self.size > 1:
            sys.excepthook = self._uncaught
            threading.excepthook = self._uncaught_in_thread
        own = with_timeout(comm, timeout_s).Dup()
        super().__init__(own.plain, tuple(own.allgather(host)), timeout_s)
        self.launched = bool(launcher_ranks(os.environ))
        self.fault_tolerant = fault_tolerant(MPI.Get_library_version(), os.environ)
        self.original_ranks = tuple(range(self.size))
        self.nodes = Nodes.of_ranks(self)
        self._first = (self.comm.group, self.hosts)
        # agreements are begun at steps, which ranks of a user's loop may miss
        self._agreement_comm = self.duplicate()
        # MPI would match what a rank that closes calls with another rank's barrier
        self._closing = self.duplicate()
        self._open = True
        self.resources = contextlib.ExitStack()
        self.after_close = contextlib.ExitStack()
        self._roll = (
            None
            if self.size == 1
            else WaitMonitor(with_timeout(comm, timeout_s).Dup().plain, self.hosts)
        )
        deadline.monitor = self._roll
        deadline.ordered_calls = 0

    def group_into_nodes(self, ranks_per_node: int | str) -> None:
        """Make the ranks into nodes: as many of a host as that, or all of it ("host").

        JobError on every rank where they can't be.
        """
        self.nodes = group_ranks(self, ranks_per_node)

    def is_rank_failure(self, error: BaseException) -> bool:
        return self.survives and is_rank_failure(error)

    def shrink(self) -> None:
        """Goes on with the survivors: all of them call it, also those that saw nothing yet.

        Every communicator of this world is revoked, which brings the others out of their waits.
        WaitTimeoutError where a survivor doesn't come.
        """
        process.check_process()
        comm = shrunken([comm for comm in self._family if comm], self.timeout_s)
        keep_alive.append((self._family, self._pending_agreements))
        self._agreement_comm = comm.Dup()
        self._family = [comm, self._agreement_comm]
        self._pending_agreements = []
        self.comm = comm
        self.rank = comm.rank
        self.size = comm.size
        self.nodes = Nodes.of_ranks(self)
        group, hosts = self._first
        self.original_ranks = tuple(comm.group.Translate_ranks(group=group))
        self.hosts = tuple(hosts[name] for name in self.original_ranks)
        self.shrunk = True
        exit_handler.survivors = comm
        keep_alive.append(self._roll)
        self._roll = deadline.monitor = (
            None if self.size == 1 else WaitMonitor(comm.Dup(), self.hosts, False)
        )

    def node_group(self, backend: str | None = None) -> "ProcessGroup":
        """Return the torch process group of this rank's node, for DDP; collective.

        It is the world of torch.distributed, whose ranks are those in the node.

        :param backend: of torch.distributed; None: "nccl" where there are GPUs, else "gloo"
        :raises JobError: where torch.distributed was initialized with other ranks
        """
        from mpigossip.cluster.process_groups import node_group

        return node_group(self, backend, self.timeout_s)

    def node_mesh(self, backend: str | None = None) -> "DeviceMesh":
        """Return :meth:`node_group` as a DeviceMesh of one dimension, "node"; collective.

        :param backend: as for :meth:`node_group`
        """
        import torch
        from torch.distributed.device_mesh import DeviceMesh

        group = self.node_group(backend)
        device = "cpu" if torch.distributed.get_backend(group) == "gloo" else "cuda"
        return DeviceMesh.from_group(group, device, mesh_dim_names=("node",))

    def abort(self, code: int = 1) -> None:
        """End all ranks of the job at once with exit code ``code``; any rank may call it."""
        process.check_process()
        process.abort(self.comm, code)

    def close(self) -> None:
        """Free the communicators; collective, done by the ``with`` block; can be called again."""
        if self._open:
            process.check_process()
            self._open = False
            self.resources.close()
            if not self.shrunk:
                with deadline.announce_end(deadline.steps_done, what="world"):
                    self.drain_agreements()
            sys.excepthook, threading.excepthook = self._hooks
            self.after_close.close()
            if deadline.monitor is self._roll:
                deadline.monitor = None
            if not self.shrunk:
                if self._roll is not None:
                    self._roll.close(self.timeout_s)
                for comm in (self._agreement_comm, self._closing, self.comm):
                    comm.Free()

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
            exit_handler.code = uncaught.code(error)
            exit_handler.cause = f"{kind.__name__}: {error}"

    def _uncaught(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if process.is_fork():  # its exceptions end no other process
            self._hooks[0](kind, error, trace)
            return
        exit_handler.code = uncaught.code(error)
        every = None if self._roll is None else uncaught.errors_of_all_ranks(self._roll, error)
        if every is None:  # some go on, or wait for this one, whose word ends the job
            uncaught.takes_turn(self.rank)
            if self._roll is None or self._roll.claim_report():
                uncaught.write_stderr(uncaught.format_error(error, self._name))
        else:  # the first of each kind says it
            if every.index(every[self.rank]) == self.rank:
                who = "" if len(set(every)) == 1 else self._name
                uncaught.write_stderr(uncaught.format_error(error, who, f"all {self.size} ranks"))
            if not isinstance(error, Failure):  # exchanges may be open, which MPI would wait for
                uncaught.exit_now(exit_handler.code)
            uncaught.takes_turn(self.rank)
        self.abort(exit_handler.code)

    def _uncaught_in_thread(self, args: threading.ExceptHookArgs) -> None:
        if process.is_fork():
            self._hooks[1](args)
            return
        if args.exc_type is SystemExit or args.exc_value is None:
            return
        name = args.thread.name if args.thread else "a thread"
        uncaught.write_stderr(
            uncaught.format_error(args.exc_value, self._name, where=f" in {name}")
        )
        self.abort(1)

    @property
    def _name(self) -> str:
        return f"rank {self.rank} of {self.size} {self._told_as}"


def world(timeout_s: float = TIMEOUT_S) -> World:
    """Starts MPI, unless it runs already, and joins all ranks of the job; call it on every rank.

    Under a launcher (srun, mpirun) the world has its ranks; without one, a world of one.
    `timeout_s` limits waiting in `barrier` and `agree`. LaunchError where MPI can't be loaded, or
    where several processes were started that MPI doesn't join.
    """
    try:
        return _world(timeout_s)
    except LaunchError as error:
        sys.excepthook = uncaught.once(error)
        raise
    except WaitTimeoutError as error:  # the end of MPI would wait, too
        from mpi4py import MPI

        uncaught.write_stderr(f"mpigossip.world(): {error}; ending the job")
        process.abort(MPI.COMM_WORLD, FAILED)
        raise


def _world(timeout_s: float) -> World:
    process.check_process()
    if "mpi4py.MPI" not in sys.modules:
        process.before_mpi(timeout_s=timeout_s)
    try:
        import mpi4py

        if "mpi4py.MPI" not in sys.modules:
            mpi4py.rc.initialize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise no_mpi(error) from error
    ours = not MPI.Is_initialized()
    if ours:
        check_library(MPI.Get_library_version(), os.environ)
        process.start_mpi()
    with _threads_end_the_job(MPI.COMM_WORLD):
        exit_handler.prepare(ours, with_timeout(MPI.COMM_WORLD, timeout_s))
    check_launcher(MPI.COMM_WORLD.size, MPI.Get_library_version(), os.environ)
    check_alone(MPI.COMM_WORLD.size, os.environ, multiprocessing.current_process()._identity)
    restore = sharp_timers()
    made = World(MPI.COMM_WORLD, timeout_s)
    made.after_close.callback(restore)
    process.started()
    return made


@contextlib.contextmanager
def _threads_end_the_job(comm: "MPI.Intracomm") -> Iterator[None]:
    """Abort the job by an exception in a thread, until the world has installed its own hook."""
    before = threading.excepthook
    name = f"rank {comm.rank} of {comm.size} on {os.uname().nodename}"

    def hook(args: threading.ExceptHookArgs) -> None:
        thread = args.thread.name if args.thread else "a thread"
        if args.exc_value is not None:
            uncaught.write_stderr(
                uncaught.format_error(args.exc_value, name, where=f" in {thread}")
            )
        process.abort(comm, FAILED)

    threading.excepthook = hook
    try:
        yield
    finally:
        threading.excepthook = before


# -- going on without a rank: User Level Failure Mitigation, as Open MPI 5 has it ------------------
#
# After the death of a process, calls that need it raise ERR_PROC_FAILED; whoever sees that revokes
# the communicators, which brings the others out of their waits with ERR_REVOKED; then all survivors
# shrink the communicator. Measured with Open MPI 5.0.11: 1 to 20 ms. MPICH 5.0 has none of it.


def fault_tolerant(library: str, env: Mapping[str, str]) -> bool:
    """Return whether this MPI was started so that survivors of a loss can go on.

    Not by srun: at the first loss Slurm's PMIx plugin cancels the step (22.05, whatever
    `--kill-on-bad-exit` and `--no-kill` say).
    """
    if "SLURM_STEP_ID" in env and "PRTE_LAUNCHED" not in env:
        return False
    asked = env.get("OMPI_MCA_mpi_ft_enable", "").lower()
    return "Open MPI" in library and asked in ("1", "true", "yes", "t", "y", "enabled")


def is_rank_failure(error: BaseException) -> bool:
    """Whether an exception says that a process failed, or that another one has seen it fail."""
    from mpi4py import MPI

    lost = (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED)
    return isinstance(error, MPI.Exception) and error.Get_error_class() in lost


def shrunken(comms: "Sequence[MPI.Intracomm]", timeout_s: float) -> "MPI.Intracomm":
    """Revokes all, and makes the first one's survivors a communicator; collective over them.

    In a thread that can be given up: Open MPI 5.0 has no Ishrink, and a survivor may be away.
    WaitTimeoutError at the time limit.
    """
    from mpi4py import MPI

    for comm in comms:
        comm.Revoke()
    found: list[Any] = []

    def work() -> None:
        try:
            found.append(comms[0].Shrink())
        except BaseException as error:  # noqa: BLE001 - handed over to the waiting thread
            found.append(error)

    threading.Thread(target=work, name="mpigossip-shrink", daemon=True).start()
    Deadline(timeout_s).wait(
        lambda: found, lambda: "a rank was lost, and not all others came to go on without it"
    )
    comm = found[0]
    if isinstance(comm, BaseException):
        raise comm
    comm.Set_errhandler(MPI.ERRORS_RETURN)
    return comm
