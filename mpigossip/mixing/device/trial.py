"""Test MPI_Put or messages of GPU memory in a subprocess, because they may crash.

Started as `python -m mpigossip.mixing.device.trial WAY DEVICE …`, without the launcher's variables:
MPI finds a world of one, which sends to itself. It shows what is broken in a library or in its
build; what happens between processes and hosts comes after it.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

BEGUN, ARRIVED, WRONG = "begun", "arrived", "wrong: "
LAUNCHED = re.compile(
    "PMI|PRTE|SLURM|PALS|HYDRA|HYDI|FLUX|JSM|MPI_LOCAL|MV2_COMM|OMPI_(?!MCA_)"
    "|OMPI_MCA_(orte|prte|ess|pmix|plm|ras|rmaps|initial)"
)
"""Beginnings of variables that make a program a rank of the job; what sets MPI up stays."""


def tried(devices: Sequence, timeout_s: float, way: str = "windows") -> tuple[bool, str]:
    """Whether there is anything against trying it here, and what was found."""
    names = list(dict.fromkeys(map(str, devices)))
    try:
        done = subprocess.run(
            [sys.executable, "-m", __spec__.name, way, *names], env=environment(os.environ),
            stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=timeout_s, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as late:
        said = (late.stdout or b"").decode(errors="replace")
        return _judged(said, f"didn't end within {timeout_s:g} s")
    except OSError as error:
        return True, f"not tried in a process of its own: {error}"
    how = f"ended with {_ending(done.returncode)}{_last(done.stderr)}"
    return _judged(done.stdout, how)


def _judged(said: str, how: str) -> tuple[bool, str]:
    lines = said.splitlines()
    wrong = [line.removeprefix(WRONG) for line in lines if line.startswith(WRONG)]
    if ARRIVED in lines:
        return True, ""
    if BEGUN not in lines:  # no world of one here: what it would show stays open
        return True, f"not tried in a process of its own: MPI in it {how}"
    return False, f"in a process of its own {wrong[0] if wrong else f'it {how}'}"


def _ending(code: int) -> str:
    try:
        return f"code {code}" if code >= 0 else signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def _last(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f" ({lines[-1][:200]})" if lines else ""


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """The variables of a program that is no rank of the job."""
    return {name: value for name, value in given.items() if not LAUNCHED.match(name)}


def main(way: str, names: Sequence[str]) -> None:
    """Send on every device named; says how far it came."""
    import torch
    from mpi4py import MPI

    from mpigossip.mixing.averages import raw
    from mpigossip.mixing.device.memory import current, private
    from mpigossip.mixing.device.proof import PROBE, put, synchronize

    print(BEGUN, flush=True)
    for device in map(torch.device, names):
        with current(device):
            memory = private(2 * PROBE, device)
            memory[:PROBE].fill_(37)
            synchronize(device)
            if way == "windows":
                window = MPI.Win.Create(raw(memory), 1, comm=MPI.COMM_SELF)
                window.Lock_all()
                put(window, raw(memory[:PROBE]), 0, PROBE)
                window.Sync()
            else:
                out, into = ([raw(part), MPI.BYTE] for part in memory.split(PROBE))
                MPI.COMM_SELF.Sendrecv(out, 0, recvbuf=into, source=0)
            if not bool((memory[PROBE:].cpu() == 37).all()):
                what = "a put into" if way == "windows" else "a message to"
                print(f"{WRONG}{what} memory of {device} brought wrong data")
                return
            if way == "windows":
                window.Unlock_all()
                window.Free()
    print(ARRIVED, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
