"""Test of whether this MPI can send GPU memory.

First, the MPI library is asked whether it supports GPU memory; then puts or messages are tried.
This trial runs first in a subprocess, because such calls may crash. Without the variables of the
launcher, MPI starts there as a world of one rank, which sends to itself. This shows whether a
library or its build is broken. The trial then runs between the ranks, in a thread that can be
abandoned; a rank that fails informs all others at once.
"""

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from mpi4py import MPI

from mpigossip.cluster.collectives import close_window
from mpigossip.cluster.communicator import with_timeout
from mpigossip.cluster.deadline import world_ranks
from mpigossip.cluster.process import libraries
from mpigossip.mixing.device.memory import (
    TransportUnavailable,
    create,
    device_context,
    flush_rdma_writes,
    message_memory,
    private,
)
from mpigossip.mixing.exact_average import raw
from mpigossip.mixing.notifications import all_ranks, wait_all
from mpigossip.mixing.progress_thread import run_on_all_ranks

SEVERAL_GPUS = (1, 19)
"""First version of UCX that supports several GPUs in one process."""
PROBE = 1 << 16
"""Bytes of the test's messages, more than MPI libraries send along with the envelope."""
PROOF_S = 30.0
"""Time limit, in seconds, of each wait of the test. The subprocess, which has to start first, may
take twice as long."""
PROVING = "test of whether this MPI transfers GPU memory"
BEGUN = "begun"
ARRIVED = "arrived"
WRONG = "wrong: "
LAUNCHED = re.compile(
    "PMI|PRTE|SLURM|PALS|HYDRA|HYDI|FLUX|JSM|MPI_LOCAL|MV2_COMM|OMPI_(?!MCA_)"
    "|OMPI_MCA_(orte|prte|ess|pmix|plm|ras|rmaps|initial)"
)
"""Prefixes of the environment variables by which a launcher makes a program a rank of a job.
Variables that only set options of MPI do not match."""


def gpu_mpi_works(
    comm: MPI.Intracomm,
    devices: Sequence[torch.device],
    transport: str = "windows",
    timeout_s: float = PROOF_S,
) -> tuple[bool, str]:
    """Return whether MPI can send memory of all slots' devices on all ranks, with an explanation.

    The call is collective, and the first value is equal on all ranks. If there is a rank on which
    no query reports that the MPI library supports GPU memory, no rank tries to send GPU memory,
    because a put to GPU memory would then kill the process.

    :param comm: communicator of the nodes
    :param devices: devices of this rank's slots
    :param transport: transport to test: "windows" (puts) or "messages"
    :param timeout_s: time limit of each wait, in seconds
    """
    # `try_in_subprocess` may take this long
    comm = with_timeout(comm, max(2 * timeout_s, getattr(comm, "timeout_s", 0)))
    support = reported_gpu_support(comm)
    names = [name for name, yes in support.items() if yes]
    if not all(comm.allgather(bool(names))):
        return False, "this MPI reports no support for GPU memory"
    ucx = ucx_version()
    over = f" over UCX {'.'.join(map(str, ucx))}" if ucx else ""
    summary = f"GPU support is reported by {' and '.join(names)}{over}"
    gpu_count = len(set(devices))
    old = gpu_count > 1 and ucx and ucx[:2] < SEVERAL_GPUS
    refusal = (
        f"it supports one GPU per process, not {gpu_count}; use UCX 1.19 or later" if old else ""
    )
    note = ""
    if not (refused := _first(comm, refusal)):
        able, note = try_in_subprocess(devices, 2 * timeout_s, transport)
        refused = _first(comm, "" if able else note)
    refused = refused or try_between_ranks(comm, devices, timeout_s, transport)
    if refused:
        return False, f"{summary}, but {refused}"
    note = note and f" ({note})"
    what = "puts into" if transport == "windows" else "messages to"
    return True, f"{summary}, and {what} the memory of every slot arrived{note}"


def _first(comm: MPI.Intracomm, text: str) -> str:
    """Return the first text, in rank order, that is not empty; collective."""
    return next(filter(None, comm.allgather(text)), "")


# -- statement of the library --------------------------------------------------------------------


def reported_gpu_support(
    comm: MPI.Intracomm, environ: Mapping[str, str] = os.environ
) -> dict[str, bool]:
    """Return whether the MPI library reports support for GPU memory, by the name of the query.

    No query uses a GPU.

    :param comm: communicator whose info object is queried
    :param environ: environment variables
    """
    return {
        "mpi_memory_alloc_kinds": _info_says(comm),
        "MPIX_Query_cuda_support": _library_says(),
        "MPICH_GPU_SUPPORT_ENABLED": environ.get("MPICH_GPU_SUPPORT_ENABLED") == "1",
    }


def _info_says(comm: MPI.Intracomm) -> bool:
    info = comm.Get_info()
    kinds = info.Get("mpi_memory_alloc_kinds") or ""
    info.Free()
    return any(kind.split(":")[0] in ("cuda", "rocm") for kind in kinds.split(","))


def _library_says() -> bool:
    for path in libraries():
        if "/libmpi" not in path:
            continue
        try:
            library = ctypes.CDLL(path)
        except OSError:
            continue
        for name in ("MPIX_Query_cuda_support", "MPIX_Query_rocm_support"):
            if hasattr(library, name) and getattr(library, name)() == 1:
                return True
        answer = ctypes.c_int(0)
        if hasattr(library, "MPIX_GPU_query_support"):
            for kind in (0, 2):  # MPIX_GPU_SUPPORT_CUDA, MPIX_GPU_SUPPORT_HIP
                if library.MPIX_GPU_query_support(kind, ctypes.byref(answer)) == 0 and answer:
                    return True
    return False


def ucx_version() -> tuple[int, ...]:
    """Return the version of the UCX library in this process, such as (1, 19, 0); () without UCX."""
    if (library := _ucp()) is None:
        return ()
    numbers = [ctypes.c_uint() for _ in range(3)]
    library.ucp_get_version(*map(ctypes.byref, numbers))
    return tuple(number.value for number in numbers)


def ucx_is_threaded() -> bool | None:
    """Return whether UCX was built for several threads (`--enable-mt`); None if it is unknown.

    It is unknown without UCX in this process, and with UCX before 1.11.
    """
    library = _ucp()
    if library is None or not hasattr(library, "ucp_lib_query"):
        return None
    attributes = UcxAttributes(UcxAttributes.MAX_THREAD_LEVEL)
    failed = library.ucp_lib_query(ctypes.byref(attributes))
    return None if failed else attributes.max_thread_level == UcxAttributes.MULTI


class UcxAttributes(ctypes.Structure):
    """The structure ``ucp_lib_attr_t`` of UCX, up to its first attribute."""

    MAX_THREAD_LEVEL = 1
    """Bit of ``field_mask`` that requests the attribute."""
    MULTI = 2
    """Value UCS_THREAD_MODE_MULTI."""
    _fields_ = (("field_mask", ctypes.c_uint64), ("max_thread_level", ctypes.c_int))


def _ucp() -> ctypes.CDLL | None:
    """Return the UCX library that this process has loaded; None if there is none."""
    for path in libraries():
        if path.rpartition("/")[2].startswith("libucp"):
            return ctypes.CDLL(path)
    return None


def open_mpi_pml() -> str:
    """Return the name of Open MPI's component for messages, such as "ucx" or "ob1".

    Open MPI selects it in ``MPI_Init``. No function of MPI returns it, so it is read from the
    library's variable ``mca_pml_base_selected_component``. The name is empty with another MPI, and
    if the variable does not have the layout of Open MPI 4 and 5.
    """
    for path in libraries():
        if not path.rpartition("/")[2].startswith("libmpi.so"):
            continue
        with contextlib.suppress(ValueError):  # the library has no such variable
            component = PmlComponent.in_dll(ctypes.CDLL(path), "mca_pml_base_selected_component")
            if component.type == b"pml":
                return component.name.decode("ascii", "replace")
    return ""


class PmlComponent(ctypes.Structure):
    """The beginning of Open MPI's structure ``mca_base_component_t``."""

    _fields_ = (
        ("interface_version", ctypes.c_int * 3),
        ("project", ctypes.c_char * 16),
        ("project_version", ctypes.c_int * 3),
        ("type", ctypes.c_char * 32),
        ("type_version", ctypes.c_int * 3),
        ("name", ctypes.c_char * 64),
    )


# -- in a subprocess -----------------------------------------------------------------------------


def try_in_subprocess(
    devices: Sequence, timeout_s: float, transport: str = "windows"
) -> tuple[bool, str]:
    """Run the test in a subprocess; return whether it may be run in this process, and a message.

    The message is empty if the subprocess succeeds. If MPI can't start in the subprocess, nothing
    is known, and the first value is True, too.

    :param devices: devices of the slots
    :param timeout_s: time limit of the subprocess, in seconds
    :param transport: transport to test: "windows" (puts) or "messages"
    """
    program = f"from {__name__} import main; main()"
    names = list(dict.fromkeys(map(str, devices)))
    try:
        done = subprocess.run(
            [sys.executable, "-c", program, transport, *names],
            env=environment(os.environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        output = (late.stdout or b"").decode(errors="replace")
        return _judge(output, f"didn't end within {timeout_s:g} s")
    except OSError as error:
        return True, f"not tested in a subprocess: {error}"
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    last = f" ({lines[-1][:200]})" if lines else ""
    return _judge(done.stdout, f"ended with {_ending(done.returncode)}{last}")


def _judge(output: str, ending: str) -> tuple[bool, str]:
    lines = output.splitlines()
    problems = [line.removeprefix(WRONG) for line in lines if line.startswith(WRONG)]
    if ARRIVED in lines:
        return True, ""
    if BEGUN not in lines:  # MPI can't start as a world of one here, which proves nothing
        return True, f"not tested in a subprocess: MPI there {ending}"
    return False, f"in a subprocess {problems[0] if problems else f'it {ending}'}"


def _ending(code: int) -> str:
    try:
        return f"code {code}" if code >= 0 else signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables without the ones that join a process to a job's ranks.

    :param variables: environment variables
    """
    return {name: value for name, value in variables.items() if not LAUNCHED.match(name)}


def main() -> None:
    """Run the test in a world of one rank and print its progress.

    ``sys.argv`` holds the transport and the devices.
    """
    print(BEGUN, flush=True)
    transport, *names = sys.argv[1:]
    proof = Proof(MPI.COMM_SELF, [torch.device(name) for name in names], PROOF_S, transport)
    try:
        proof.run()
        print(ARRIVED)
    except RuntimeError as error:
        print(f"{WRONG}{error}")


# -- between ranks -------------------------------------------------------------------------------


def try_between_ranks(
    comm: MPI.Intracomm,
    devices: Sequence[torch.device],
    timeout_s: float,
    transport: str = "windows",
) -> str:
    """Test puts or messages from every slot to the same slot of the next rank; collective.

    Return what failed, or "" if nothing did; the text is equal on all ranks. The test duplicates
    ``comm``, because a rank that hangs never answers the calls of the others on its communicator.

    :param comm: communicator of the nodes
    :param devices: devices of this rank's slots
    :param timeout_s: time limit of each wait, in seconds
    :param transport: transport to test: "windows" (puts) or "messages"
    """
    proof = Proof(comm.Dup(), devices, timeout_s, transport)
    rank = world_ranks(comm, [comm.rank])[0]
    killed = f"mpigossip: rank {rank} ended in the {PROVING}; if nothing else ended the job, "
    killed += "set node.exchange=host to skip the test"
    with print_if_killed(killed):
        # the waits of the test itself are shorter, and name the late rank
        problem = run_on_all_ranks(
            comm, proof.run, lambda: proof.now, 2.5 * timeout_s + 5, devices[0], proof
        )
    if not problem:
        proof.comm.Free()
    return problem


@contextlib.contextmanager
def print_if_killed(text: str) -> Iterator[None]:
    """Return a context manager that prints ``text`` if this process is killed inside the block.

    A shell in a subprocess prints it. A launcher would name only the signal that killed the
    process.
    """
    command = ["sh", "-c", 'read over || echo "$0" >&2', text]
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            shell = subprocess.Popen(command, stdin=subprocess.PIPE)
            stack.callback(shell.communicate, b"\n")
        yield


class Proof:
    """Test with one window and one put for each slot, like the exchange, or with messages."""

    def __init__(
        self, comm: MPI.Intracomm, devices: Sequence[torch.device], timeout_s: float, transport: str
    ):
        self.comm = comm
        self._devices = devices
        self._timeout_s = timeout_s
        self._transport = transport
        self._left = (comm.rank - 1) % comm.size
        self._right = (comm.rank + 1) % comm.size
        self._memory: list[torch.Tensor] = []
        self._windows: list[MPI.Win] = []
        self._pending: list[MPI.Request] = []
        self.now = ""

    def run(self) -> None:
        """Run the whole test.

        :raises TransportUnavailable: if a call fails on this rank; the message names it
        :raises WaitTimeoutError: if another rank does not answer within the time limit
        """
        self._on_each_slot("an allocation", self._allocate)
        self._wait([self.comm.Ibarrier()])  # MPI_Win_create would wait without a time limit
        if self._transport == "windows":
            self._on_each_slot("MPI_Win_create", self._open)
            self._on_each_slot(last := "a put", self._put)
        else:
            self._on_each_slot(last := "a message", self._post)
        self._wait([*self._pending, self.comm.Ibarrier()])
        self._on_each_slot(last, self._compare)
        self._wait([self.comm.Ibarrier()])
        for window in self._windows:
            close_window(window, self.comm)

    def _on_each_slot(self, name: str, step: Callable[[int, torch.device], None]) -> None:
        for slot, device in enumerate(self._devices):
            location = f"{device}" + (f" (rank {self.comm.rank})" if self.comm.size > 1 else "")
            self.now = f"{name} of GPU memory on {location}"
            try:
                with device_context(device):
                    step(slot, device)
            except RuntimeError as error:
                text = f"{name} of GPU memory failed on {location}: {error}"
                raise TransportUnavailable(text) from error

    def _wait(self, requests: Sequence[MPI.Request]) -> None:
        def late(_) -> str:
            return f"{PROVING}: not all ranks answer"

        wait_all(dict(enumerate(requests)), self._timeout_s, late, all_ranks)

    def _allocate(self, slot: int, device: torch.device) -> None:
        allocate = private if self._transport == "windows" else message_memory
        self._memory.append(allocate(2 * PROBE, device))
        self._memory[slot][:PROBE].fill_(_pattern(self.comm.rank, slot))
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def _open(self, slot: int, device: torch.device) -> None:
        self._windows.append(create(raw(self._memory[slot]), self.comm))

    def _put(self, slot: int, device: torch.device) -> None:
        put(self._windows[slot], raw(self._memory[slot][:PROBE]), self._right)

    def _post(self, slot: int, device: torch.device) -> None:
        source, inbox = ([raw(part), MPI.BYTE] for part in self._memory[slot].split(PROBE))
        self._pending.append(self.comm.Irecv(inbox, self._left, slot))
        self._pending.append(self.comm.Isend(source, self._right, slot))

    def _compare(self, slot: int, device: torch.device) -> None:
        for window in self._windows[slot : slot + 1]:
            window.Sync()
        flush_rdma_writes(device)
        if not (self._memory[slot][PROBE:].cpu() == _pattern(self._left, slot)).all():
            raise TransportUnavailable("wrong data arrived")


def _pattern(rank: int, slot: int) -> int:
    return (rank + 7 * slot) % 251 + 1


def put(window: MPI.Win, source, rank: int) -> None:
    """Put into the second half of a window, and wait until the target has the data."""
    window.Put([source, MPI.BYTE], rank, [PROBE, PROBE, MPI.BYTE])
    window.Flush(rank)
