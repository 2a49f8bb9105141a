"""Test whether link(2) is atomic on a file system, as a training of members requires.

    python tools/labs/link_races.py FOLDER             # on two hosts at once, on one new folder
    python tools/labs/link_races.py FOLDER --shared    # the same, as two users

The processes compete for 200 names: for each name, all processes try to link a file of their own to
it at the same moment. One process listens on a TCP port, and sends the others a message when they
have to start. Exactly one process has to succeed for each name, and all processes have to read the
same content. The exit code is 0 if link(2) is atomic, 1 if it is not, and 2 if the test can't tell,
for example because one process was always first.
"""

import argparse
import contextlib
import json
import os
import random
import secrets
import socket
import sys
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

NAMES = 200
WAIT_S = 120.0
SHARE = 0.05
"""Smallest fraction of the names that each process has to get. Otherwise they did not compete."""
DELAY_S = 3e-4
"""Longest random delay of a link, in seconds, so that no process is always first."""
GOOD = 0
BROKEN = 1
UNKNOWN = 2
TEXTS = {GOOD: "good", BROKEN: "BROKEN: members must not use this folder", UNKNOWN: "no verdict"}


class Report(NamedTuple):
    """Results of one process."""

    name: str
    """Name of the process, which is the content of each file that it links."""
    user: int
    """Number of the user who runs it."""
    won: list[int]
    """Numbers of the names for which its call of link(2) succeeded."""
    seen: list[str]
    """Content that it has read under each name."""
    errors: list[str]
    """Errors of link(2), except for existing names, and of reading."""


def judge(reports: list[Report], shared: bool = False) -> tuple[int, str]:
    """Judge the results of all processes; return an exit code and the reason for it.

    :param reports: results of all processes
    :param shared: whether at least two users must have started the processes
    """
    if errors := [error for one in reports for error in one.errors]:
        return BROKEN, errors[0]
    if len({tuple(one.seen) for one in reports}) > 1:
        return BROKEN, "the processes read different contents under the same name"
    seen = reports[0].seen
    for one in reports:
        if wrong := [k for k in one.won if seen[k] != one.name]:
            return BROKEN, f"{len(wrong)} names that {one.name} linked have other contents"
    counts = Counter(seen)
    if unknown := counts.keys() - {one.name for one in reports}:
        return BROKEN, f"a name has the content {min(unknown)!r}, which no process wrote"
    won = " : ".join(str(counts[one.name]) for one in reports)
    if len(reports) < 2 or min(counts[one.name] for one in reports) < SHARE * len(seen):
        return UNKNOWN, (
            f"the processes did not compete ({won} names): start them again on idle hosts"
        )
    if shared and len({one.user for one in reports}) < 2:
        return UNKNOWN, "one user started all processes: with --shared, start one as another user"
    return GOOD, f"{len(reports)} processes won {won} names, and all read the same"


class Peers:
    """Connections between the processes: one process is connected to each of the others.

    This first process is the one whose name sorts first.

    :param root: folder of the test
    :param me: name of this process
    :param count: number of processes
    :raises TimeoutError: if fewer processes have started within WAIT_S seconds
    """

    def __init__(self, root: Path, me: str, count: int):
        self.end = time.monotonic() + WAIT_S
        listener = socket.create_server(("", 0))
        token = secrets.token_hex(16)
        address = [socket.gethostname(), listener.getsockname()[1], token]
        publish(root / "here" / me, json.dumps(address))
        names = self._wait_for(root / "here", count)
        self.first = names[0] == me
        if self.first:
            listener.settimeout(WAIT_S)
            self.streams = [self._accept(listener, token) for _ in names[1:]]
        else:
            host, port, token = json.loads((root / "here" / names[0]).read_text())
            self.streams = [stream_of(socket.create_connection((host, port), WAIT_S))]
            self.send(token)
        listener.close()

    def _wait_for(self, folder: Path, count: int) -> list[str]:
        """Wait until ``count`` processes have published a file; return their names in order.

        :raises TimeoutError: if fewer processes have started within WAIT_S seconds
        """
        while len(names := sorted(path.name for path in folder.glob("[!.]*"))) < count:
            if time.monotonic() > self.end:
                raise TimeoutError(
                    f"only {len(names)} of {count} processes (--processes) have started within "
                    f"{WAIT_S:g} s: start the others on other hosts, with the same folder"
                )
            time.sleep(0.05)
        return names[:count]

    @staticmethod
    def _accept(listener: socket.socket, token: str):
        """Return the stream of the next connection that sends the secret token; ignore others."""
        while True:
            stream = stream_of(listener.accept()[0])
            if stream.readline().strip() == json.dumps(token):
                return stream

    def send(self, value) -> None:
        """Send a JSON value to each process to which this one is connected."""
        for stream in self.streams:
            stream.write(json.dumps(value) + "\n")
            stream.flush()

    def receive(self) -> list:
        """Receive one JSON value from each process to which this one is connected."""
        return [json.loads(stream.readline()) for stream in self.streams]

    def start(self) -> None:
        """Wait until all processes call this function; return in all at nearly the same time."""
        if self.first:
            self.receive()
            self.send("go")
        else:
            self.send("ready")
            self.receive()


def stream_of(connection: socket.socket):
    """Return a text stream of a connection that sends each line without delay."""
    connection.settimeout(WAIT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection.makefile("rw")


def publish(path: Path, text: str) -> None:
    """Write a file that all users can read; it gets its name ``path`` when it is complete."""
    temporary = path.with_name(f".{path.name}")
    write(temporary, text)
    temporary.rename(path)


def write(path: Path, text: str) -> None:
    """Write a file that all users can read, and flush it to the disk."""
    with path.open("x") as file:
        file.write(text)
        file.flush()
        os.fchmod(file.fileno(), 0o644)
        os.fsync(file.fileno())


def make_folder(folder: Path, like: Path) -> None:
    """Make a folder with the permissions of the folder ``like``, unless it exists."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir()
        folder.chmod(like.stat().st_mode & 0o7777)


def race(root: Path, me: str, peers: Peers) -> Report:
    """Compete for all names with the other processes, then read all names; return the results.

    :param root: folder of the test
    :param me: name of this process
    :param peers: connections to the other processes
    """
    make_folder(root / "own" / me, root)
    for k in range(NAMES):  # Each name needs a separate file: some file systems limit links.
        write(root / "own" / me / f"{k:04d}", me)
    won = []
    errors = []
    for k in range(NAMES):
        own = root / "own" / me / f"{k:04d}"
        name = root / "race" / f"{k:04d}"
        peers.start()
        until = time.perf_counter() + random.random() * DELAY_S
        while time.perf_counter() < until:
            pass
        try:
            os.link(own, name)
            won.append(k)
        except FileExistsError:
            pass  # A link may succeed although an error is reported, so only the content counts.
        except OSError as error:
            # sshfs reports EPERM, and not EEXIST, if the name exists.
            if not name.exists():
                errors.append(f"link: {error}")
    peers.start()
    seen = []
    for k in range(NAMES):
        try:
            seen.append((root / "race" / f"{k:04d}").read_text())
        except OSError as error:
            seen.append("")
            errors.append(f"read: {error}")
    return Report(me, os.getuid(), won, seen, errors)


def main() -> int:
    """Compete for the names, print the verdict, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--processes", type=int, default=2, help="number of processes (default: 2)")
    parser.add_argument("--shared", action="store_true", help="the processes belong to two users")
    options = parser.parse_args()
    root = options.folder
    me = f"{os.uname().nodename}-{os.getpid()}-{secrets.token_hex(4)}"
    root.mkdir(parents=True, exist_ok=True)
    for folder in ("race", "here", "own"):
        make_folder(root / folder, root)
    if any((root / "race").iterdir()):
        print(f"the folder {root} was used before: pass a new folder")
        return UNKNOWN
    try:
        peers = Peers(root, me, options.processes)
        own = race(root, me, peers)
        if peers.first:
            verdict = judge([own, *(Report(*one) for one in peers.receive())], options.shared)
            peers.send(verdict)
        else:
            peers.send(own)
            (verdict,) = peers.receive()
    except (OSError, ValueError) as error:  # Another process has ended early.
        print(f"{TEXTS[UNKNOWN]}: {error}")
        return UNKNOWN
    code, why = verdict
    print(f"{TEXTS[code]}: {why}")
    return code


if __name__ == "__main__":
    sys.exit(main())
