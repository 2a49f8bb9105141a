"""Proof that MPI moves GPU memory: a put or a message of every slot, in a thread of its own.

Ranks agree after each call that may fail on one of them, before any waits for what another one
was to send: a failure is told everywhere and at once, not by a deadline.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from mpi4py import MPI

from mpigossip.cluster.collectives import close_window, open_window
from mpigossip.cluster.deadline import LateError
from mpigossip.mixing.averages import raw
from mpigossip.mixing.device.memory import MemoryRefused, arrived_whole, current, ordered, private
from mpigossip.mixing.notifications import everybody, wait_all
from mpigossip.mixing.progress_thread import ProgressThread

PROBE = 1 << 16
"""Bytes of the proof's messages: above the size that libraries send along with the envelope."""
PROOF_S = 60.0
"""Seconds that each wait of the proof may take."""
_left: list = []
"""Windows and memory of proofs that failed: freeing them may fail as well, or hang."""


def arrives(
    comm: MPI.Intracomm, devices: Sequence[torch.device], timeout_s: float, way: str = "windows"
) -> str:
    """Return what is wrong with puts or messages from every slot to the right neighbour's.

    "": nothing. Collective, the same on all ranks. Runs in a thread of its own, given up after a
    while, as a flush that hangs never returns: that is an answer, too.
    """
    proof = Proof(comm, devices, timeout_s, way)
    threaded = MPI.Query_thread() == MPI.THREAD_MULTIPLE
    thread = ProgressThread(
        comm, threaded=threaded, poll=False, timeout_s=timeout_s, device=str(devices[0])
    )
    late = ""
    try:
        thread.wait(thread.submit(proof.run), "the proof that this MPI moves GPU memory")
    except (LateError, MPI.Exception, RuntimeError) as error:
        late = str(error)
        _left.append(proof)
    finally:
        thread.close()
    found = comm.allgather(late or proof.wrong)
    return next(filter(None, found), "")


class Proof:
    """One window a slot, as the exchange has them; :attr:`wrong` says what didn't work."""

    def __init__(
        self, comm: MPI.Intracomm, devices: Sequence[torch.device], timeout_s: float, way: str
    ):
        """``devices``: of the slots; on all ranks as many."""
        self._comm, self._devices, self._timeout_s = comm, devices, timeout_s
        self._way = way
        self._left, self._right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
        self._memory: list[torch.Tensor] = []
        self._windows: list[MPI.Win] = []
        self._received: list[MPI.Request] = []
        self._sent: list[MPI.Request] = []
        self.wrong = ""

    def run(self) -> None:
        """All of it, as far as it goes."""
        steps: list = [("an allocation", self._allocate)]
        if self._way == "windows":
            steps += [("MPI_Win_create", self._open), ("a put", self._put)]
        else:
            steps += [("a message", self._post)]
        for name, step in steps:
            if not self._agreed(name, step):
                _left.append((self._windows, self._memory))
                return
        self._wait([*self._received, *self._sent])
        self._wait([self._comm.Ibarrier()])
        self._agreed(steps[-1][0], self._compare)
        for window in self._windows:
            close_window(window, self._comm)

    def _agreed(self, name: str, step: Callable[[int, torch.device], None]) -> bool:
        """Do a step for every slot; whether it went well on all ranks."""
        slot = 0
        try:
            for slot, device in enumerate(self._devices):
                with current(device):
                    step(slot, device)
        except (MPI.Exception, RuntimeError) as error:
            where = f"{self._devices[slot]} (rank {self._comm.rank})"
            self.wrong = f"{name} of GPU memory failed on {where}: {error}"
        mine, all_of = np.array([bool(self.wrong)], np.int32), np.zeros(1, np.int32)
        self._wait([self._comm.Iallreduce(mine, all_of, MPI.MAX)])
        if all_of[0]:  # so all ranks come here
            self.wrong = next(filter(None, self._comm.allgather(self.wrong)))
        return not all_of[0]

    def _wait(self, requests: Sequence[MPI.Request]) -> None:
        def late(_) -> str:
            return "proof that this MPI moves GPU memory: not all ranks answer"

        wait_all(dict(enumerate(requests)), self._timeout_s, late, everybody)

    def _parts(self, slot: int) -> tuple[torch.Tensor, ...]:
        """Source, inbox and letter box."""
        return self._memory[slot].split(PROBE)

    def _allocate(self, slot: int, device: torch.device) -> None:
        ordered(device)
        self._memory.append(private(3 * PROBE, device))
        self._parts(slot)[0].fill_(_pattern(self._comm.rank, slot))
        synchronize(device)

    def _open(self, slot: int, device: torch.device) -> None:
        self._windows.append(open_window(MPI.Win.Create, raw(self._memory[slot]), self._comm))

    def _put(self, slot: int, device: torch.device) -> None:
        put(self._windows[slot], raw(self._parts(slot)[0]), self._right, PROBE)

    def _post(self, slot: int, device: torch.device) -> None:
        source, _, letter = self._parts(slot)
        self._received.append(self._comm.Irecv([raw(letter), MPI.BYTE], self._left, slot))
        self._sent.append(self._comm.Isend([raw(source), MPI.BYTE], self._right, slot))

    def _compare(self, slot: int, device: torch.device) -> None:
        for window in self._windows[slot : slot + 1]:
            window.Sync()
        arrived_whole(device)
        _, inbox, letter = (part.cpu() for part in self._parts(slot))
        windows = self._way == "windows"
        if not ((inbox if windows else letter) == _pattern(self._left, slot)).all():
            raise MemoryRefused(f"{'a put' if windows else 'a message'} brought wrong data")


def _pattern(rank: int, slot: int) -> int:
    return (rank + 7 * slot) % 251 + 1


def put(window: MPI.Win, source, rank: int, at: int) -> None:
    """A put that is complete at its target when this returns."""
    window.Put([source, MPI.BYTE], rank, [at, PROBE, MPI.BYTE])
    window.Flush(rank)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
