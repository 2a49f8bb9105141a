"""Replace `python ARGUMENTS` under a launcher: a fork of tests/warmserver.py does the work.

The server has imported torch, which takes a new process seconds. It gets arguments, folder,
environment and open files; this process waits, passes signals on,
and ends as the fork does.
"""

import contextlib
import json
import os
import signal
import socket
import sys


def forward(number, frame):
    """Pass a signal on; the fork may have ended, with its answer in flight."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


with socket.socket(socket.AF_UNIX) as server:
    server.connect(sys.argv[1])
    inherited = [0, 1, 2, *(int(os.environ[k]) for k in ("PMI_FD",) if k in os.environ)]
    order = {"arguments": sys.argv[2:], "folder": os.getcwd(), "files": inherited}  # noqa: PTH109
    order |= {"environment": dict(os.environ), "parent": os.getppid()}
    text = json.dumps(order).encode()
    socket.send_fds(server, [len(text).to_bytes(4, "little")], inherited)
    server.sendall(text)
    pid = int.from_bytes(server.recv(4), "little")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, forward)
    answer = server.recv(4)
# the server has ended without an answer: exit as if killed
status = int.from_bytes(answer, "little") if len(answer) == 4 else signal.SIGKILL
if os.WIFSIGNALED(status):
    if os.WTERMSIG(status) != signal.SIGKILL:
        signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
    os.kill(os.getpid(), os.WTERMSIG(status))
os._exit(os.WEXITSTATUS(status))
