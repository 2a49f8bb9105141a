"""Test whether a file system keeps the promises that members which join and leave need.

    python tools/labs/link_races.py FOLDER             # on two hosts at once, on one new folder
    python tools/labs/link_races.py FOLDER --shared    # the same, as two users

Each process links 200 names, each to a file of its own, at the same moment as the other processes:
one of them listens on a TCP port and starts all of them for each name. Each name then has to belong
to exactly one process, and all processes have to read the same content. The exit code is 0 if the
file system is good, 1 if it is broken, and 2 if there is no verdict, for example because one
process was always first.
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
"""Smallest fraction of the names that each process has to win, as a proof that they raced."""
DELAY_S = 3e-4
"""Longest random delay of a link after the start, so that no process is always first."""
GOOD = 0
BROKEN = 1
UNKNOWN = 2
TEXTS = {GOOD: "good", BROKEN: "BROKEN: members must not use this folder", UNKNOWN: "no verdict"}


class Report(NamedTuple):
    """The results of one process: its user, the names that it won, and the content of each name."""

    name: str
    user: int
    won: list[int]
    seen: list[str]
    errors: list[str]


def judge(reports: list[Report], shared: bool = False) -> tuple[int, str]:
    """Return an exit code, and why."""
    if errors := [error for one in reports for error in one.errors]:
        return BROKEN, errors[0]
    if len({tuple(one.seen) for one in reports}) > 1:
        return BROKEN, "the processes read different contents under the same name"
    seen = reports[0].seen
    for one in reports:
        if wrong := [k for k in one.won if seen[k] != one.name]:
            return BROKEN, f"{len(wrong)} names that {one.name} linked belong to others"
    counts = Counter(seen)
    if unknown := counts.keys() - {one.name for one in reports}:
        return BROKEN, f"a name has the content {min(unknown)!r}, which no process wrote"
    won = " : ".join(str(counts[one.name]) for one in reports)
    if len(reports) < 2 or min(counts[one.name] for one in reports) < SHARE * len(seen):
        return UNKNOWN, f"nothing raced ({won} names): start the processes on idle hosts again"
    if shared and len({one.user for one in reports}) < 2:
        return UNKNOWN, "all processes have one user: with --shared start one as another user"
    return GOOD, f"{len(reports)} processes won {won} names, and all read the same"


class Peers:
    """Connections between the processes: the first one accepts the connections of all others."""

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
        while len(names := sorted(path.name for path in folder.glob("[!.]*"))) < count:
            if time.monotonic() > self.end:
                raise TimeoutError(
                    "nobody else came: start a second process on another host, on the same folder"
                )
            time.sleep(0.05)
        return names[:count]

    @staticmethod
    def _accept(listener: socket.socket, token: str):
        while True:
            stream = stream_of(listener.accept()[0])
            if stream.readline().strip() == json.dumps(token):
                return stream

    def send(self, value) -> None:
        """Send a value to all others, or to the first one."""
        for stream in self.streams:
            stream.write(json.dumps(value) + "\n")
            stream.flush()

    def receive(self) -> list:
        """Receive a value from all others, or from the first one."""
        return [json.loads(stream.readline()) for stream in self.streams]

    def start(self) -> None:
        """Return in all processes at the same time, up to the time that a message takes."""
        if self.first:
            self.receive()
            self.send("go")
        else:
            self.send("ready")
            self.receive()


def stream_of(connection: socket.socket):
    """Return a text stream of a connection, which sends each line at once."""
    connection.settimeout(WAIT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection.makefile("rw")


def publish(path: Path, text: str) -> None:
    """Write a file for all users, and rename it when it is complete."""
    temporary = path.with_name(f".{path.name}")
    write(temporary, text)
    temporary.rename(path)


def write(path: Path, text: str) -> None:
    """Write a file, readable for all users, to the disk."""
    with path.open("x") as file:
        file.write(text)
        file.flush()
        os.fchmod(file.fileno(), 0o644)
        os.fsync(file.fileno())


def make(folder: Path, like: Path) -> None:
    """Make a folder with the permissions of another one."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir()
        folder.chmod(like.stat().st_mode & 0o7777)


def race(root: Path, me: str, peers: Peers) -> Report:
    """Link all names at the same time as the others; then read them."""
    make(root / "own" / me, root)
    for k in range(NAMES):  # some file systems allow few names for one file
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
            pass  # the content decides: the reply of a link that was done may be lost
        except OSError as error:
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
    """Race, then compare."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--processes", type=int, default=2, help="that take part (default: 2)")
    parser.add_argument("--shared", action="store_true", help="two users take part")
    options = parser.parse_args()
    root = options.folder
    me = f"{os.uname().nodename}-{os.getpid()}-{secrets.token_hex(4)}"
    root.mkdir(parents=True, exist_ok=True)
    for folder in ("race", "here", "own"):
        make(root / folder, root)
    if any((root / "race").iterdir()):
        print(f"{root} was used before: name a new folder")
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
    except (OSError, ValueError) as error:  # a process that ends early closes its connection
        print(f"{TEXTS[UNKNOWN]}: {error}")
        return UNKNOWN
    code, why = verdict
    print(f"{TEXTS[code]}: {why}")
    return code


if __name__ == "__main__":
    sys.exit(main())
