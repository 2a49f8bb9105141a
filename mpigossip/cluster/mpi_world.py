"""World of all ranks of a job, its start, and its end after an error or a rank failure.

:func:`open_world` starts MPI and returns a :class:`MPIWorld`. Its interface is the class `World`
(module `world`), which is also a world of one process without MPI. Importing this module does not
import MPI.
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

from mpigossip.cluster import exception_reports, local_devices, process
from mpigossip.cluster.communicator import Communicator, with_timeout
from mpigossip.cluster.deadline import (
    Deadline,
    WaitTimeoutError,
    announce_end,
    sharp_timers,
    this_rank,
)
from mpigossip.cluster.endings import ACTIONS, Action, Cause, Others
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
from mpigossip.config.errors import FAILED

if TYPE_CHECKING:
    from mpi4py import MPI
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

keep_alive: list[Any] = []
"""Objects that are no longer used after a rank failure, but must not be deleted.

MPI may still write to them, and some of them cannot be freed.
"""


NODE_GROUP_S = 3600.0
"""Default time limit, in seconds, of a collective call of a node's torch process group."""
NOTICE_S = 5.0
"""Seconds for which a rank waits until MPI reports a failed rank, after an unspecific error."""
LONGEST_TIMEOUT_S = 1e8
"""Largest time limit, in seconds, that is passed to torch, which cannot represent infinity."""


class MPIWorld(Communicator):
    """World of all ranks of a program, opened by :func:`mpigossip.world` in a ``with`` block.

    Its attributes include `rank` and `size` of this world, `hosts` with the host name of each rank,
    `nodes` (`nodes.count` nodes of `nodes.per_node` ranks each), and `comm`, an mpi4py communicator
    that duplicates MPI.COMM_WORLD.

    While a world of several ranks is open, an uncaught exception in any thread of any rank ends the
    whole job, with a message that names the rank and the host, or all ranks if they end by the same
    exception. If a rank leaves the ``with`` block with an exit code other than 0, the other ranks
    have `process.LEAVE_S` seconds to end, too. Afterwards, that rank aborts the job, so that no
    rank hangs.

    If MPI is `fault_tolerant` and the job `survives`, `shrink` turns this into the world of the
    survivors of a rank failure. They get new ranks; `original_ranks` are their ranks at the start.
    """

    whole = True

    def __init__(self, comm: "MPI.Intracomm", timeout_s: float = TIMEOUT_S):
        from mpi4py import MPI

        process.own_mpi()
        host = MPI.Get_processor_name() or socket.gethostname()
        self.comm = comm
        self.rank = comm.rank
        self.size = comm.size
        self._location = f"on {host}"
        self._monitor = None
        # If a call of MPI does not return, a thread reports it. Its exception ends the job only
        # with these hooks, so install them before the first such call.
        self._hooks = (sys.excepthook, threading.excepthook)
        if self.size > 1:
            sys.excepthook = self._uncaught
            threading.excepthook = self._uncaught_in_thread
        own_comm = with_timeout(comm, timeout_s).Dup()
        described = own_comm.allgather((host, local_devices.seen_gpus()))
        hosts, gpus_by_rank = zip(*described, strict=True)
        local_devices.compare_gpus(hosts, gpus_by_rank)
        super().__init__(own_comm.plain, hosts, timeout_s)
        self.launched = bool(launcher_ranks(os.environ))
        self.fault_tolerant = fault_tolerant(MPI.Get_library_version(), os.environ)
        self.original_ranks = tuple(range(self.size))
        self.nodes = Nodes.of_ranks(self)
        self._first = (self.comm.group, self.hosts)
        # Agreements are started at steps, and some ranks of a custom loop may miss a step.
        self._agreement_comm = self.duplicate()
        # On the same communicator, MPI would match the collective call of a rank that closes with
        # another rank's barrier.
        self._closing = self.duplicate()
        self._open = True
        self.resources = contextlib.ExitStack()
        self.after_close = contextlib.ExitStack()
        self._monitor = (
            None
            if self.size == 1
            else WaitMonitor(
                with_timeout(comm, timeout_s).Dup().plain,
                self.hosts,
                threaded=threads_may_call_mpi(),
            )
        )
        this_rank.monitor = self._monitor
        this_rank.ordered_calls = 0

    def group_into_nodes(self, ranks_per_node: int | str) -> None:
        """Group the ranks of each host into nodes; collective.

        :param ranks_per_node: number of consecutive ranks of a host that form a node; "host": all
            ranks of a host
        :raises JobError: on all ranks, if the ranks cannot be grouped like this
        """
        self.nodes = group_ranks(self, ranks_per_node)

    def is_rank_failure(self, error: BaseException) -> bool:
        if not self.survives:
            return False
        return is_rank_failure(error) or (is_unspecific(error) and self._misses_a_rank())

    def _misses_a_rank(self) -> bool:
        """Return whether MPI reports a failed rank of this world within `NOTICE_S` seconds."""

        def has_failed_ranks() -> bool:
            self.comm.Iprobe()  # lets MPI notice failures
            failed = self.comm.Get_failed()
            count = failed.size
            failed.Free()
            return count > 0

        try:
            Deadline(NOTICE_S).wait(has_failed_ranks, lambda: "MPI reports no failed rank")
        except WaitTimeoutError:
            return False
        except Exception as error:
            return is_rank_failure(error)
        return True

    def shrink(self) -> None:
        """Continue with the survivors of a rank failure; all survivors have to call this.

        The first call revokes all communicators of this world. This ends the waits of survivors
        that have not noticed the failure with an error, after which they have to call this, too.

        :raises WaitTimeoutError: if a survivor does not call this within the time limit
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
        self.isolated = False
        exit_handler.survivors = comm
        keep_alive.append(self._monitor)
        self._monitor = this_rank.monitor = (
            None
            if self.size == 1
            else WaitMonitor(comm.Dup(), self.hosts, False, threads_may_call_mpi())
        )

    def node_group(
        self, backend: str | None = None, timeout_s: float = NODE_GROUP_S
    ) -> "ProcessGroup":
        """Return the torch process group of this rank's node, for DDP; collective.

        The group consists of the ranks of this node, and a rank in it is a local rank. If the
        program has not initialized torch.distributed, this call does; with "nccl", :meth:`device`
        then becomes the current device, and the group uses it.

        :param backend: backend of torch.distributed; None: "nccl" if there are GPUs, otherwise
            "gloo"
        :param timeout_s: seconds that a collective call of this group may take, at least the time
            limit of the world. Afterwards, the watchdog of NCCL ends the process, and gloo raises
            an error. The default is long, because a rank may evaluate while others wait
        :raises JobError: on all ranks, if torch.distributed was initialized with other ranks
        """
        from mpigossip.cluster.process_groups import node_group

        limit = min(max(timeout_s, self.timeout_s), LONGEST_TIMEOUT_S)
        return node_group(self, backend, limit)

    def node_mesh(
        self, backend: str | None = None, timeout_s: float = NODE_GROUP_S
    ) -> "DeviceMesh":
        """Return :meth:`node_group` as a DeviceMesh of one dimension, "node"; collective.

        :param backend: as for :meth:`node_group`
        :param timeout_s: as for :meth:`node_group`
        """
        import torch
        from torch.distributed.device_mesh import DeviceMesh

        group = self.node_group(backend, timeout_s)
        device = "cpu" if torch.distributed.get_backend(group) == "gloo" else "cuda"
        return DeviceMesh.from_group(group, device, mesh_dim_names=("node",))

    def abort(self, code: int = 1) -> None:
        """End all ranks immediately with exit code ``code``; any rank may call this alone."""
        process.check_process()
        process.abort(self.comm, code)

    def close(self) -> None:
        """Close the resources of the world and free its communicators; collective.

        The ``with`` block calls this at its end, unless an exception leaves it. The wait for the
        other ranks has no time limit. After a rank failure, the communicators are not freed.
        """
        if self._open:
            process.check_process()
            self._open = False
            self.resources.close()
            if not self.shrunk:
                with announce_end(this_rank.steps, what="world"):
                    self.drain_agreements()
            sys.excepthook, threading.excepthook = self._hooks
            self.after_close.close()
            if this_rank.monitor is self._monitor:
                this_rank.monitor = None
            if not self.shrunk:
                if self._monitor is not None:
                    self._monitor.close(self.timeout_s)
                for comm in (self._agreement_comm, self._closing, self.comm):
                    comm.Free()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        _: TracebackType | None,
    ) -> None:
        # While an exception propagates, the hooks must stay, and collective calls are impossible.
        if kind is None:
            self.close()
        else:
            exit_handler.code = exception_reports.code(error)
            exit_handler.cause = f"{kind.__name__}: {error}"

    def _uncaught(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if process.is_fork():  # an exception of a fork ends no other process
            self._hooks[0](kind, error, trace)
            return
        exit_handler.code = exception_reports.code(error)
        error_keys = (
            None
            if self._monitor is None
            else exception_reports.errors_of_all_ranks(self._monitor, error)
        )
        others = Others.of(error_keys)
        if error_keys is None:
            exception_reports.wait_turn(self.rank)
            reports = self._monitor is None or self._monitor.claim_report()
        else:  # the first rank of each kind of exception reports it
            reports = error_keys.index(error_keys[self.rank]) == self.rank
        if reports:
            name = "" if others is Others.SAME_ERROR else self._name
            exception_reports.write_stderr(
                exception_reports.format_error(error, name, f"all {self.size} ranks")
            )
        if ACTIONS[Cause.of(error), others] is Action.FINALIZE:
            exception_reports.exit_with_watchdog(exit_handler.code)
        if error_keys is not None:
            exception_reports.wait_turn(self.rank)
        self.abort(exit_handler.code)

    def _uncaught_in_thread(self, args: threading.ExceptHookArgs) -> None:
        if process.is_fork():
            self._hooks[1](args)
            return
        if args.exc_type is SystemExit or args.exc_value is None:
            return
        name = args.thread.name if args.thread else "a thread"
        exception_reports.write_stderr(
            exception_reports.format_error(args.exc_value, self._name, where=f" in {name}")
        )
        self.abort(1)

    @property
    def _name(self) -> str:
        return f"rank {self.rank} of {self.size} {self._location}"


def open_world(timeout_s: float = TIMEOUT_S) -> MPIWorld:
    """Return the world of all ranks of the job, after starting MPI; call it on every rank.

    Under a launcher (srun, mpirun) the world has the launcher's ranks; otherwise it has one rank.

    If some ranks do not call this within the time limit, the job is aborted.

    :param timeout_s: seconds that each wait for other ranks may take
    :raises LaunchError: if MPI cannot be loaded, or does not join processes that were started
        together
    :raises JobError: if this process is a fork of a process that has opened a world
    """
    try:
        return _open_world(timeout_s)
    except LaunchError as error:
        sys.excepthook = exception_reports.once(error)
        raise
    except WaitTimeoutError as error:  # MPI_Finalize would wait, too
        from mpi4py import MPI

        exception_reports.write_stderr(f"mpigossip.world(): {error}; ending the job")
        process.abort(MPI.COMM_WORLD, FAILED)
        raise


def _open_world(timeout_s: float) -> MPIWorld:
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
    opened = MPIWorld(MPI.COMM_WORLD, timeout_s)
    opened.after_close.callback(restore)
    process.started()
    return opened


def threads_may_call_mpi() -> bool:
    """Return whether MPI provides THREAD_MULTIPLE."""
    from mpi4py import MPI

    return MPI.Query_thread() == MPI.THREAD_MULTIPLE


@contextlib.contextmanager
def _threads_end_the_job(comm: "MPI.Intracomm") -> Iterator[None]:
    """Return a context manager in which an uncaught exception of any thread aborts the job.

    It covers the collective call before the world installs hooks of its own.
    """
    before = threading.excepthook
    name = f"rank {comm.rank} of {comm.size} on {os.uname().nodename}"

    def hook(args: threading.ExceptHookArgs) -> None:
        thread = args.thread.name if args.thread else "a thread"
        if args.exc_value is not None:
            exception_reports.write_stderr(
                exception_reports.format_error(args.exc_value, name, where=f" in {thread}")
            )
        process.abort(comm, FAILED)

    threading.excepthook = hook
    try:
        yield
    finally:
        threading.excepthook = before


# -- continuing without a rank: User Level Failure Mitigation, as in Open MPI 5 --------------------
#
# After a process has failed, calls that need it raise ERR_PROC_FAILED. A rank that sees this error
# revokes the communicators, which ends the waits of other ranks with ERR_REVOKED. All survivors
# then shrink the communicator. This takes 1 to 20 ms, measured with Open MPI 5.0.11. MPICH 5.0 does
# not support it.


def fault_tolerant(library: str, env: Mapping[str, str]) -> bool:
    """Return whether this MPI was started so that survivors can continue after a rank failure.

    This requires Open MPI with the setting `OMPI_MCA_mpi_ft_enable`. If srun has started the ranks
    itself, the result is False: at the first failure, Slurm's PMIx plugin cancels the step (version
    22.05, regardless of `--kill-on-bad-exit` and `--no-kill`).

    :param library: version string of the MPI library
    :param env: environment variables
    """
    if "SLURM_STEP_ID" in env and "PRTE_LAUNCHED" not in env:
        return False
    requested = env.get("OMPI_MCA_mpi_ft_enable", "").lower()
    return "Open MPI" in library and requested in ("1", "true", "yes", "t", "y", "enabled")


def is_rank_failure(error: BaseException) -> bool:
    """Return whether ``error`` is an error of MPI due to a rank failure.

    MPI has detected the failure in this rank, or another rank has revoked the communicator.
    """
    from mpi4py import MPI

    failure_classes = (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED)
    return isinstance(error, MPI.Exception) and error.Get_error_class() in failure_classes


def is_unspecific(error: BaseException) -> bool:
    """Return whether ``error`` is an error of MPI without a class that names the cause.

    In rare cases, a call of Open MPI ends with such an error because another rank was killed.
    """
    from mpi4py import MPI

    return isinstance(error, MPI.Exception) and error.Get_error_class() == MPI.ERR_OTHER


def shrunken(comms: "Sequence[MPI.Intracomm]", timeout_s: float) -> "MPI.Intracomm":
    """Revoke all ``comms`` and return a communicator of the survivors of the first; collective.

    Open MPI 5.0 has no non-blocking form of Shrink. A thread therefore calls Shrink, and is
    abandoned if a survivor does not call this function.

    :param comms: communicators to revoke; the first one contains all ranks
    :param timeout_s: time limit in seconds
    :raises WaitTimeoutError: if not all survivors call this within the time limit
    :raises MPI.Exception: if Shrink fails
    """
    from mpi4py import MPI

    for comm in comms:
        comm.Revoke()
    results: list[Any] = []

    def work() -> None:
        try:
            results.append(comms[0].Shrink())
        except BaseException as error:  # noqa: BLE001 - handed over to the waiting thread
            results.append(error)

    threading.Thread(target=work, name="mpigossip-shrink", daemon=True).start()
    Deadline(timeout_s).wait(
        lambda: results, lambda: "a rank has failed, and not all survivors have called shrink()"
    )
    comm = results[0]
    if isinstance(comm, BaseException):
        raise comm
    comm.Set_errhandler(MPI.ERRORS_RETURN)
    return comm
