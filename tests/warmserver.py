"""A process that has imported torch and forks for each command of tests/warmstub.py.

It has one thread only: a fork of more is undefined. The fork has the stub's arguments,
folder, environment and files. It is killed if its stub dies, and the stub gets its status.
"""

import atexit
import contextlib
import fcntl
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import struct
import sys
import threading
import types
from pathlib import Path

HEAVY = (
    "torch",
    "torch._dynamo",
    "h5py",
    "scipy.sparse.linalg",
    "networkx",
    "matplotlib.figure",
    "rich.table",
    "rich.console",
    "PIL.Image",
)
"""Modules of other packages; mpigossip, which may read the environment, is imported later."""


def receive(stub: socket.socket) -> tuple[dict, list[int]]:
    """Receive the command of a stub and the files that it has passed on."""
    head, files, _, _ = socket.recv_fds(stub, 4, 8)
    left = int.from_bytes(head, "little")
    text = b""
    while len(text) < left:
        if not (more := stub.recv(left - len(text))):
            raise ConnectionError("a stub was cut off")
        text += more
    return json.loads(text), files


def become(order: dict, files: list[int]) -> None:
    """Become the process that the stub stands for."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    above = [fcntl.fcntl(file, fcntl.F_DUPFD, max(order["files"]) + 1) for file in files]
    for file, wanted in zip(above, order["files"], strict=True):
        os.dup2(file, wanted, inheritable=True)
    for file in {*files, *above} - {*order["files"]}:
        os.close(file)
    os.chdir(order["folder"])
    os.getppid = lambda: order["parent"]
    os.environ.clear()
    os.environ.update(order["environment"])
    sys.executable = str(Path(sys.argv[1]).with_name("python"))  # its processes are forks, too


def run(arguments: list[str]) -> None:
    """Run `python -m MODULE …`, `python -c CODE …` or `python SCRIPT …`."""
    own = str(Path(__file__).parent)
    paths = [path for path in sys.path if path != own]
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [*given, *(path for path in paths if path not in given)]
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        sys.path.insert(0, "")
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(arguments[1], "<string>", "exec"), vars(main))
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
        runpy.run_path(arguments[0], run_name="__main__")


def start(
    listener: socket.socket,
    ready: selectors.BaseSelector,
    stubs: dict[int, socket.socket | None],
) -> tuple[dict, list[int]] | None:
    """Accept a stub and fork for it; return its command in the fork, and None in the server."""
    stub, _ = listener.accept()
    try:
        order, files = receive(stub)
    except OSError:  # it was killed
        stub.close()
        return None
    assert threads("self") == 1, "a thread has started: a fork is undefined"
    if (pid := os.fork()) == 0:
        for one in (stub, *filter(None, stubs.values())):
            one.close()
        for other in ready.get_map().values():
            drop(other.data if isinstance(other.data, list) else [])
        return order, files
    drop(files[:3])
    try:
        ready.register(died(stub), selectors.EVENT_READ, files[3:])
    except ProcessLookupError:
        drop(files[3:])
    stubs[pid] = stub
    ready.register(stub, selectors.EVENT_READ, pid)
    with contextlib.suppress(OSError):
        stub.sendall(pid.to_bytes(4, "little"))
    return None


def serve(address: str) -> tuple[dict, list[int]]:
    """Fork for each stub; return in the fork, with the command that it has to run."""
    for name in HEAVY:
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    stubs: dict[int, socket.socket | None] = {}
    wake, woken = socket.socketpair()
    woken.setblocking(False)
    signal.set_wakeup_fd(woken.fileno())
    with (
        wake,
        woken,
        socket.socket(socket.AF_UNIX) as listener,
        selectors.DefaultSelector() as ready,
    ):
        listener.bind(f"{address}.new")
        listener.listen(64)
        Path(f"{address}.new").rename(address)
        for source in (listener, wake, 0):  # 0 is a pipe of pytest, which closes when pytest ends
            ready.register(source, selectors.EVENT_READ)
        left_s = None  # time for running forks to end by themselves without pytest
        while left_s is None or stubs:
            result = ready.select(left_s)
            for pid in () if result else stubs:
                os.kill(pid, signal.SIGKILL)
            for key, _ in result:
                if key.fileobj == 0:
                    ready.unregister(0)
                    left_s = 20
                elif key.fileobj is listener:
                    if command := start(listener, ready, stubs):
                        return command
                elif isinstance(key.data, list):
                    ready.unregister(key.fileobj)
                    drop([key.fileobj, *key.data])
                elif key.fileobj is wake:
                    wake.recv(4096)
                    reap(stubs, ready)
                elif stubs.get(key.data) is key.fileobj:  # the stub is gone
                    os.kill(key.data, signal.SIGKILL)
                    stubs[key.data] = None
                    ready.unregister(key.fileobj)
                    key.fileobj.close()
    sys.exit(0)


def threads(pid: int | str) -> int:
    """Return the threads of a process, including the threads of C libraries."""
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


def died(stub: socket.socket) -> int:
    """Return a file that can be read when the stub's process has ended.

    The socket of its launcher stays open here until then: MPICH kills all ranks when it closes, and
    the exit code of the first dead rank becomes the exit code of the job.
    """
    pid, _, _ = struct.unpack("3i", stub.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return os.pidfd_open(pid)


def drop(files: list[int]) -> None:
    """Close the descriptors."""
    for file in files:
        os.close(file)


def reap(stubs: dict[int, socket.socket | None], ready: selectors.BaseSelector) -> None:
    """Send the exit status of ended forks to their stubs."""
    while stubs and (ended := os.waitpid(-1, os.WNOHANG))[0]:
        if stub := stubs.pop(ended[0]):
            ready.unregister(stub)
            with contextlib.suppress(OSError):
                stub.sendall(ended[1].to_bytes(4, "little"))
            stub.close()


def end(given: dict[str, str]) -> None:
    """End as Python does, but without finalizing torch's modules, which takes a second.

    Ranks, recognized by their first environment ``given``, finalize them: MPICH's launcher kills
    ranks that end at almost the same time.
    """
    if "mpi4py.MPI" in sys.modules and {"PMI_RANK", "OMPI_COMM_WORLD_RANK"} & given.keys():
        return
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(0)


if __name__ == "__main__":
    found = serve(sys.argv[1])
    become(*found)
    try:
        run(found[0]["arguments"])
    except SystemExit as left:
        if left.code:
            raise
    end(found[0]["environment"])
