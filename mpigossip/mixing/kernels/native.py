"""The weighted sum as one pass, and waiting, in C; compiled once if there is a compiler.

Accelerators only: without them (no compiler, no cache folder, ``MPIGOSSIP_NATIVE=0``) torch's
operations give the same bits in several passes, and Python waits. The library lies in the user's
cache folder under a name that holds a hash of its source, so that another version builds its own.
One of the processes that share this folder builds it; the others wait (:mod:`build_lock`).
It is not loaded from where another user may write: then each process compiles a private copy.
"""

import contextlib
import ctypes
import hashlib
import os
import platform
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from mpigossip.mixing.kernels.build_lock import TOUCH_S, BuildLock

HERE = Path(__file__).parent
SOURCES = [HERE / "sum.c"] + [HERE / "wait.c"] * (sys.platform == "linux")
# contraction into fused multiply-add would change bits
FLAGS = ("-O3", "-ffp-contract=off", "-shared", "-fPIC")
STREAMED = 1 << 20
"""Elements of a result from which it is written past the cache, which wouldn't hold it."""
COMPILE_S = 60.0
"""Seconds that the compiler may take."""
WAIT_S = 150.0
"""Seconds that a process waits for another one that builds; a killed one is replaced before."""
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 2.0
"""Limits of the seconds between two looks at what another process builds. The pauses grow, since
each look lists the folder: thousands of ranks may wait that share a file server."""
PAUSE_GROWTH = 1.5


class NoKernel(RuntimeError):
    """Why the native sum isn't used here: the message says it."""


def combine(
    weights: Sequence[float], arrays: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]
) -> bool:
    """Compute :func:`mpigossip.mixing.combine.weighted_sum` into each of ``outs``.

    Return whether it was done.

    Only where every array is float32, on the CPU and contiguous. ``outs[0]`` may be the memory
    of any of the arrays.
    """
    if not _plain(arrays, outs):
        return False
    kernel = library()
    if kernel is None:
        return False
    sources = [a.data_ptr() for a in arrays]
    targets = [out.data_ptr() for out in outs]
    _call(kernel, weights, sources, targets, outs[0].numel())
    return True


def _plain(arrays: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> bool:
    shape = outs[0].shape
    for one in (*arrays, *outs):
        if one.dtype != torch.float32 or one.shape != shape or not one.is_contiguous():
            return False
        if not one.is_cpu:
            return False
    return True


def _call(
    kernel: Any, weights: Sequence[float], sources: list[int], targets: list[int], count: int
) -> None:
    terms = len(sources)
    kernel.mpigossip_sum(
        (ctypes.c_void_p * terms)(*sources),
        (ctypes.c_float * terms)(*weights),
        terms,
        list(weights).count(weights[0]) == terms,
        (ctypes.c_void_p * len(targets))(*targets),
        len(targets),
        ctypes.c_size_t(count),
        # what was just read is in the cache: writing it past the cache would be slower
        count >= STREAMED and targets[0] not in sources,
    )


@cache
def library() -> Any:
    """The loaded library, built if need be, or None; :func:`status` says why."""
    try:
        return _load()
    except NoKernel:
        return None


def status() -> str:
    """Return where the library is, or why there is none; for `mpigossip doctor`."""
    try:
        _load()
    except NoKernel as error:
        return f"not used, exchanges take longer: {error}"
    place = _place()
    return str(place) if _safe(place.parent) else f"a private copy: others may write to {place}"


def _load() -> Any:
    if os.environ.get("MPIGOSSIP_NATIVE") == "0":
        raise NoKernel("MPIGOSSIP_NATIVE=0")
    try:
        place = _place()
        cache = place.parent
        there = _safe(place.parent) and _safe(place)
    except (RuntimeError, OSError) as error:  # no home, or one that may not be entered
        raise NoKernel(f"no cache folder: {error}; XDG_CACHE_HOME names one") from error
    if not there:
        place = _build(place)
    try:
        kernel = ctypes.CDLL(str(place))
    except OSError as error:
        raise NoKernel(f"{place} can't be loaded ({error}); remove it") from error
    finally:
        if place.parent != cache:  # what is loaded stays mapped
            shutil.rmtree(place.parent, ignore_errors=True)
    if not _proven(kernel):
        raise NoKernel(f"{place} sums with other bits than torch; remove it, or set CC")
    if sys.platform == "linux":
        count = ctypes.c_int
        real = ctypes.c_double
        kernel.mpigossip_wait.argtypes = [ctypes.c_void_p] * 2 + [count] * 3 + [real] * 4
    return kernel


def _place() -> Path:
    """Return where the library of this source, compiler and processor family belongs."""
    text = b"".join(source.read_bytes() for source in SOURCES)
    text += repr((FLAGS, _compiler(), platform.machine())).encode()
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "mpigossip"
    return folder / f"native-{hashlib.sha256(text).hexdigest()[:16]}.so"


def _compiler() -> str:
    return os.environ.get("CC") or "cc"


def _safe(path: Path) -> bool:
    """Return whether a path exists and only this user and root may write to it."""
    found = path.stat() if path.exists() else None
    return bool(found and found.st_uid in (0, os.getuid()) and not found.st_mode & 0o022)


def _build(place: Path) -> Path:
    """Return where the library was built: in a private folder, if others may write to the cache.

    In the cache folder, one process builds and the others wait for it.
    """
    compiler = _compiler().split()
    if shutil.which(compiler[0]) is None:
        raise NoKernel(f'no compiler "{compiler[0]}" (CC names another)')
    try:
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if place.parent.stat().st_uid == os.getuid():
            if not _safe(place.parent):  # others may have written what lies there
                place.unlink(missing_ok=True)
            place.parent.chmod(0o700)
        if _safe(place.parent):
            return _build_once(place, compiler)
        return _compile(Path(tempfile.mkdtemp(prefix="mpigossip-")) / place.name, compiler)
    except OSError as error:
        raise NoKernel(f"could not build {place}: {error}") from error


def _build_once(place: Path, compiler: list[str]) -> Path:
    """Build the library, or wait until another process has built it."""
    lock = BuildLock(place)
    until = time.monotonic() + WAIT_S
    pause = FIRST_PAUSE_S
    # Its own generator leaves the one of the program, which may be seeded, as it is.
    draw = random.Random()
    while True:
        holds = lock.acquire()
        try:
            if _safe(place):
                return place
            if reason := lock.failure():
                raise NoKernel(reason)
            if holds:
                return _compile_for_others(place, compiler, lock)
        finally:
            lock.release()
        left = until - time.monotonic()
        if left <= 0:
            raise NoKernel(
                f"another process has not built {place} within {WAIT_S:g} s; remove "
                f"{place.name}.lock.* there"
            )
        # Ranks that started together don't look at the same moments.
        time.sleep(min(left, pause * draw.uniform(0.5, 1.0)))
        pause = min(LONGEST_PAUSE_S, PAUSE_GROWTH * pause)


def _compile_for_others(place: Path, compiler: list[str], lock: BuildLock) -> Path:
    """Compile; leave the reason of a failure to the processes that wait, which can't do better."""
    try:
        return _compile(place, compiler, lock.touch)
    except (NoKernel, OSError) as error:
        lock.fail(str(error))
        raise


def _compile(place: Path, compiler: list[str], touch: Callable[[], None] = lambda: None) -> Path:
    """Compile next to ``place`` and rename, so that no process loads an incomplete library.

    ``touch`` is called while the compiler runs.
    """
    with tempfile.TemporaryDirectory(dir=place.parent) as folder:
        built = Path(folder) / place.name
        command = [*compiler, *FLAGS, *map(str, SOURCES), "-o", str(built)]
        messages = Path(folder) / "messages"
        with messages.open("wb") as file:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=file
            )
        until = time.monotonic() + COMPILE_S
        while process.poll() is None:
            if time.monotonic() >= until:
                process.kill()
                process.wait()
                raise NoKernel(f"{compiler[0]} did not end within {COMPILE_S:g} s")
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(TOUCH_S)
            touch()
        if process.returncode:
            lines = messages.read_text(errors="replace").strip().splitlines()
            raise NoKernel(f"{compiler[0]} failed: {(lines or ['no message'])[0]}")
        built.chmod(0o755)
        return built.replace(place)


def _proven(kernel: Any) -> bool:
    """Whether it gives torch's bits on a sum of two and of three, with equal weights and not."""
    draw = torch.Generator().manual_seed(0)
    arrays = [torch.randn(67, generator=draw) for _ in range(3)]
    a, b, c = arrays
    expected = {
        (0.5, 0.5): (a + b) * 0.5,
        (1 / 3,) * 3: (a + b + c) * (1 / 3),
        (0.2, 0.5, 0.3): a * 0.2 + b * 0.5 + c * 0.3,
    }
    out = torch.empty(67)
    for weights, wanted in expected.items():
        sources = [array.data_ptr() for array in arrays[: len(weights)]]
        _call(kernel, weights, sources, [out.data_ptr()], 67)
        if not torch.equal(out, wanted):
            return False
    return True
