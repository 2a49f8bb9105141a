"""Lock of a run directory: only one job at a time writes to it."""

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from mpigossip.cluster.world import World
from mpigossip.config import JobError

SETTING = "run.output"


@contextmanager
def locked(folder: Path, world: World, setting: str = SETTING) -> Iterator[None]:
    """Return a context manager that prevents other jobs from using a run directory; collective.

    On file systems without locks (some Lustre and NFS mounts), it prevents nothing.

    :param folder: the run directory
    :param world: ranks of the run; rank 0 locks the folder
    :param setting: setting or parameter that named the folder, for messages
    :raises JobError: on all ranks, if another job has locked the folder, or if rank 0 can't write
        into it
    """
    handle = None
    with world.raise_together(JobError):
        if world.rank == 0:
            handle = lock(folder, setting)
    try:
        yield
    finally:
        if handle is not None:
            handle.close()


def lock(folder: Path, setting: str = SETTING) -> TextIO:
    """Lock a run directory, and create it if it does not exist; return the file "lock" in it.

    The directory is locked until that file is closed. On file systems without locks, the file is
    returned without a lock.

    :param folder: the run directory
    :param setting: setting or parameter that named the folder, for messages
    :raises JobError: if another job has locked the folder, or if the folder can't be written
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = (folder / "lock").open("a+")
    except OSError as error:
        raise JobError(
            f'{setting}: can\'t write into "{folder}": {error.strerror}; name another folder'
        ) from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        handle.seek(0)
        holder = handle.read().strip() or "another job"
        handle.close()
        raise JobError(
            f'{setting}: "{folder}" is in use by {holder}; wait for it, or name another folder'
        ) from None
    except OSError:
        return handle
    try:
        _sign(handle)
    except OSError as error:
        # close() tries to write the buffered text again, and fails again.
        with contextlib.suppress(OSError):
            handle.close()
        raise JobError(
            f'{setting}: can\'t write into "{folder}": {error.strerror}; make room there, or '
            "name another folder"
        ) from None
    return handle


def _sign(handle: TextIO) -> None:
    job = os.environ.get("SLURM_JOB_ID") or os.environ.get("PBS_JOBID")
    handle.truncate(0)
    handle.write(
        f"process {os.getpid()} on {socket.gethostname()}" + (f", job {job}" if job else "")
    )
    handle.flush()
