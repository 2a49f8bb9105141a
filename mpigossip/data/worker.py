"""Decoding in processes of their own: started as `python -m mpigossip.data.worker`.

The training process and a worker talk over a socket pair: (split, indices, key) goes there, what
went wrong or None comes back, and behind None the bytes of the decoded images, which the kernel
copies straight into the batch (a `Connection` would by way of two buffers of its own). A worker is
a fresh program, no fork, so that neither MPI nor CUDA of its parent are in it; it opens the data
set by itself, imports neither torch nor MPI, and ends when its parent's end of the socket closes.
"""

import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import traceback
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from mpigossip.data.images import Images, Recipe

LAUNCHER = ("PMI", "OMPI_", "PRTE_", "SLURM_", "PALS_", "HYDRA_", "HYDI_", "MPI_", "MPICH_")
"""Beginnings of variables by which a program would take itself for a rank of the job."""
GRACE_S = 5.0


class WorkerError(RuntimeError):
    """A decoding process ended, failed or doesn't answer."""


class Worker:
    """The parent's side of one decoding process."""

    def __init__(self, number: int, recipe: Recipe, timeout_s: float) -> None:
        self.number, self.timeout_s = number, timeout_s
        self.socket, child = socket.socketpair()
        with child:
            self.process = subprocess.Popen(
                [sys.executable, "-m", __spec__.name, str(child.fileno()), *_words(recipe)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[child.fileno()],
                env=_environment(),
            )
        self._connection = Connection(os.dup(self.socket.fileno()))
        self.broken = ""

    def ask(self, split: str, indices: np.ndarray, key: tuple[int, ...], out: np.ndarray) -> None:
        """Have samples decoded into `out`; raises WorkerError naming the worker."""
        if self.broken:  # part of an answer may still lie in the socket
            raise WorkerError(self.broken)
        what = f"{len(indices)} {split} samples, number {indices[0]} the first"
        try:
            self._connection.send((split, indices, key))
            if wrong := self._awaited().recv():
                raise WorkerError(f"decoding worker {self.number} failed at {what}:\n{wrong}")
            view = out.data.cast("B")
            while view:
                self._awaited()
                got = self.socket.recv_into(view)
                if got == 0:
                    raise EOFError("the other end closed the connection")
                view = view[got:]
        except TimeoutError as error:
            self.broken = (
                f"decoding worker {self.number} (process {self.process.pid}) gave nothing for "
                f"{self.timeout_s:g} s while decoding {what}; is the file system hanging? The "
                "limit is node.timeout_s"
            )
            raise WorkerError(self.broken) from error
        except (OSError, EOFError) as error:
            self.broken = (
                f"decoding worker {self.number} (process {self.process.pid}) ended "
                f"{self._ending()} while decoding {what}; with data.workers = 0 the training "
                "process decodes by itself"
            )
            raise WorkerError(self.broken) from error

    def _awaited(self) -> Connection:
        """The connection as soon as something has come; TimeoutError where nothing does."""
        if not self._connection.poll(self.timeout_s):
            raise TimeoutError
        return self._connection

    def hang_up(self) -> None:
        """Wake whoever waits for an answer; the process sees it and ends."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the process; one that doesn't within some seconds is killed."""
        self._connection.close()
        self.socket.close()
        try:
            self.process.wait(0 if self.broken else GRACE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _ending(self) -> str:
        try:
            code = self.process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            return "its connection"
        return f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"


class Processes:
    """A pool of workers; `submit` gives a piece of a batch to one that is free."""

    def __init__(self, recipe: Recipe, count: int, timeout_s: float) -> None:
        self.workers = [
            Worker(number, recipe._replace(cache="never"), timeout_s) for number in range(count)
        ]
        self._free: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for worker in self.workers:
            self._free.put(worker)
        self._threads = ThreadPoolExecutor(count, "decoding")

    def submit(
        self, split: str, indices: np.ndarray, key: tuple[int, ...], out: np.ndarray
    ) -> Future:
        """Start decoding samples into `out`."""
        return self._threads.submit(self._ask, split, indices, key, out)

    def close(self) -> None:
        """End all workers. A second call does nothing."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self.workers:
            worker.hang_up()
        self._threads.shutdown()
        while self.workers:
            self.workers.pop().close()

    def _ask(self, *what) -> None:
        worker = self._free.get()
        try:
            worker.ask(*what)
        finally:
            self._free.put(worker)


def _words(recipe: Recipe) -> list[str]:
    return [recipe.path, recipe.augment, str(recipe.image_size or 0), recipe.cache]


def _environment() -> dict[str, str]:
    """Return this environment without the launcher, without GPUs, one thread per process."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(LAUNCHER)}
    root = str(Path(__file__).parents[2])
    kept["PYTHONPATH"] = os.pathsep.join([root, *(path for path in sys.path if path)])
    return kept | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def main(descriptor: int, path: str, augment: str, image_size: int, cache: str) -> None:
    """Serve batches until the parent's end of the socket closes."""
    # The launcher sends a stop signal to every process of the job; the parent decides.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    link = socket.socket(fileno=descriptor)
    connection = Connection(os.dup(descriptor))
    images = Images(Recipe(path, augment, image_size or None, cache))
    while True:
        try:
            split, indices, key = connection.recv()
        except (EOFError, OSError):
            return
        try:
            answer, batch = None, np.ascontiguousarray(images.batch(split, indices, key))
        except Exception:
            answer, batch = traceback.format_exc(), None
        try:
            connection.send(answer)
            if batch is not None:
                link.sendall(batch.data.cast("B"))
        except OSError:
            return


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5])
