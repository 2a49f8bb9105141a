"""Pools of MPI ranks: a test calls a module-level function on n ranks and gets n results."""

import contextlib
import os
import pickle
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path

from tests.launch import Launch, patience

KEPT = 24  # ranks that may sit idle at once: 1 + 2 + 3 + 4 + 6 + 8
STARTUP = 60.0  # seconds for all ranks of a pool to report
GRACE = 1.0  # seconds for the other ranks after the first failure


class RankError(AssertionError):
    """Failed call: the ranks that raised, the ranks that did not answer, and their last output."""


class Pool:
    """Pool of n ranks that wait for calls. A failure ends it: its ranks may be out of step."""

    def __init__(self, n: int):
        self.n = n
        key = secrets.token_bytes(16)
        self.launch: Launch | None = None
        self.links: dict[int, Connection] = {}
        self.pids: dict[int, int] = {}
        server = Path(__file__).with_name("rankserver.py")
        folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        try:
            with Listener(str(folder / "pool"), backlog=n, authkey=key) as listener:
                self.launch = Launch(
                    n,
                    [sys.executable, str(server), str(listener.address)],
                    env={"MPIGOSSIP_RANKS_KEY": key.hex()},
                    folder=folder,
                    warm=True,
                )
                self._accept(listener)
        except BaseException:
            self.kill()
            raise

    def _accept(self, listener: Listener) -> None:
        # The only way to give accept() a time limit; unchanged from Python 3.3 to 3.14.
        listener._listener._socket.settimeout(0.2)
        deadline = time.monotonic() + STARTUP
        while len(self.links) < self.n:
            try:
                link = listener.accept()
            except TimeoutError:
                code = self.launch.process.poll()
                if code is not None or time.monotonic() > deadline:
                    cause = f"exit code {code}" if code is not None else f"{STARTUP:g} s passed"
                    raise RankError(
                        f"{self.n} ranks did not start ({cause}); {len(self.links)} reported\n"
                        + self._tail(0)
                    ) from None
                continue
            rank, size, pid = link.recv()
            if size != self.n:
                raise RankError(
                    f"asked for {self.n} ranks, MPI says {size}: "
                    "the launcher and mpi4py's libmpi belong to different MPIs"
                )
            self.links[rank] = link
            self.pids[rank] = pid

    def call(self, function: Callable, args: tuple, kwargs: dict, timeout: float) -> list:
        """Return the results in rank order; on a failure, raise RankError and end this pool.

        :param timeout: seconds on an idle machine
        """
        timeout *= patience()
        name = f"{function.__module__}.{function.__qualname__}"
        mark = sum(map(len, self.launch.output()))
        message = pickle.dumps((function, args, kwargs))
        results, failures = self._collect(message, timeout)
        if len(results) == self.n:
            return [results[rank] for rank in range(self.n)]
        silent = sorted(set(range(self.n)) - set(results) - set(failures))
        self._ask_for_stacks(silent)
        text = [f"{name} on {self.n} ranks"]
        text += [f"rank {rank}: {what}" for rank, what in sorted(failures.items())]
        if silent:
            after = f"{GRACE:g} s after the failure" if failures else f"within {timeout:g} s"
            text.append(f"no answer {after} from ranks {silent}; killed")
        raise RankError("\n".join([*text, self._tail(mark)]))

    def _collect(self, message: bytes, timeout: float) -> tuple[dict, dict]:
        results: dict[int, object] = {}
        failures: dict[int, str] = {}
        for link in self.links.values():
            with contextlib.suppress(OSError):  # a rank has died since the last call
                link.send_bytes(message)
        waiting = {link: rank for rank, link in self.links.items()}
        deadline = time.monotonic() + timeout
        while waiting and (left := deadline - time.monotonic()) > 0:
            for link in wait(list(waiting), left):
                rank = waiting.pop(link)
                try:
                    good, value = pickle.loads(link.recv_bytes())
                except (EOFError, OSError):
                    good = False
                    value = "died"
                if good:
                    results[rank] = value
                else:
                    failures[rank] = value
                    deadline = min(deadline, time.monotonic() + GRACE)
        return results, failures

    def _ask_for_stacks(self, ranks: list[int]) -> None:
        """Let ranks that do not answer write their stacks (faulthandler) to the log."""
        stacks = lambda: "".join(self.launch.output()).count("most recent call first")  # noqa: E731
        wanted = stacks() + len(ranks)
        until = time.monotonic() + 5
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids[rank], signal.SIGQUIT)
        while ranks and stacks() < wanted and time.monotonic() < until:
            time.sleep(0.05)
        time.sleep(0.3 if ranks else 0)  # the remaining ranks

    def _tail(self, mark: int, lines: int = 60) -> str:
        text = "".join(self.launch.output())[mark:].splitlines()[-lines:]
        return "\n".join(["output of the ranks:", *text]) if text else "the ranks printed nothing"

    def kill(self) -> None:
        """End all ranks now; further calls have no effect."""
        for link in self.links.values():
            link.close()
        if self.launch is not None:
            self.launch.close()


class Ranks:
    """Pools by size for `ranks(n)(function, *args)`, started at first use; old ones are closed."""

    def __init__(self):
        self.pools: dict[int, Pool] = {}

    def __call__(self, n: int) -> Callable[..., list]:
        """Return a caller of `function(comm, *args, **kwargs)` on n ranks; `timeout` is in s."""

        def call(function: Callable, *args, timeout: float = 60, **kwargs) -> list:
            __tracebackhide__ = True
            pool = self._pool(n)
            try:
                return pool.call(function, args, kwargs, timeout)
            except BaseException:  # also after the time limit of a test, or Ctrl-C during the call
                self.pools.pop(n).kill()
                raise

        return call

    def _pool(self, n: int) -> Pool:
        pool = self.pools.pop(n, None)
        while pool is None and self.pools and sum(self.pools) + n > KEPT:
            self.pools.pop(next(iter(self.pools))).kill()
        self.pools[n] = pool or Pool(n)  # last in the dict: used last
        return self.pools[n]

    def close(self) -> None:
        """End every pool."""
        while self.pools:
            self.pools.popitem()[1].kill()
