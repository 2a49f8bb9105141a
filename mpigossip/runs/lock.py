"""One job at a time in a run directory."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from mpigossip.config import JobError


@contextmanager
def locked(folder: Path, world) -> Iterator[None]:
    """Keep a second job out of the run directory; the lock's file names the job that has it.

    A file system without locks (some Lustre and NFS mounts) is survived without one.
    """
    handle = None
    with world.together(JobError):
        if world.rank == 0:
            handle = lock(folder)
    try:
        yield
    finally:
        if handle is not None:
            handle.close()


def lock(folder: Path) -> TextIO:
    """Take the lock of a run directory, released when closed; JobError names who has it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = (folder / "lock").open("a+")
    except OSError as error:
        raise JobError(
            [f'run.output: can\'t write into "{folder}": {error.strerror}; name another folder']
        ) from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        handle.seek(0)
        holder = handle.read().strip() or "another job"
        handle.close()
        raise JobError(
            [f'run.output: "{folder}" is in use by {holder}; wait for it, or name another folder']
        ) from None
    except OSError:
        return handle
    job = os.environ.get("SLURM_JOB_ID") or os.environ.get("PBS_JOBID")
    handle.truncate(0)
    handle.write(
        f"process {os.getpid()} on {socket.gethostname()}" + (f", job {job}" if job else "")
    )
    handle.flush()
    return handle
