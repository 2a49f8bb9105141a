"""C library for the weighted sum in one pass, and for waiting; compiled once.

The library only saves time. Without it, PyTorch's operations compute bitwise identical sums in
several passes, and waits are loops in Python. It is not used if it can't be built or loaded, or if
the environment variable ``MPIGOSSIP_NATIVE`` is 0.

The library is in the user's cache folder, under a name that contains a hash of its source, so that
each version builds its own. One of the processes that share this folder builds it, and the others
wait (:mod:`build_lock`). If other users may write to the folder, no library that is there is
loaded. If the folder belongs to this user, it is made private; otherwise, each process compiles a
private copy.
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
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch

from mpigossip.mixing.kernels.build_lock import TOUCH_S, BuildLock

HERE = Path(__file__).parent
SOURCES = [HERE / "sum.c"] + [HERE / "wait.c"] * (sys.platform == "linux")
# Contraction into fused multiply-add would change the bits of the result.
FLAGS = ("-O3", "-ffp-contract=off", "-shared", "-fPIC")
STREAMED = 1 << 20
"""A result with at least this number of elements is written to memory without the cache, which
could not hold it, unless it replaces an array of the sum."""
CACHED_CALLS = 1024
"""Number of sums whose arguments for C are kept in memory."""
COMPILE_S = 60.0
"""Time limit of the compiler, in seconds."""
WAIT_S = 150.0
"""Seconds that a process waits for another one to build the library. A builder that is killed is
replaced earlier."""
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 2.0
"""First and longest pause, in seconds, between two checks whether another process has built the
library. The pauses grow because each check lists the folder, and thousands of waiting ranks may
share one file server."""
PAUSE_GROWTH = 1.5
"""Factor between two pauses."""


class NoKernel(RuntimeError):
    """Error that the native library can't be used; the message says why."""


def combine(
    weights: Sequence[float], arrays: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]
) -> bool:
    """Compute :func:`mpigossip.mixing.combine.weighted_sum` into each of ``outs``.

    :param weights: one weight for each array
    :param arrays: arrays of equal shape
    :param outs: arrays for the result, of the same shape; the first may share its memory with one
        of ``arrays``
    :return: whether the sum was computed. This requires the library, and contiguous float32 arrays
        on the CPU with equal shapes
    """
    if not _are_supported(arrays, outs):
        return False
    kernel = library()
    if kernel is None:
        return False
    sources = [a.data_ptr() for a in arrays]
    targets = [out.data_ptr() for out in outs]
    _call(kernel, weights, sources, targets, outs[0].numel())
    return True


def _are_supported(arrays: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> bool:
    """Return whether all arrays are contiguous, float32, on the CPU and of the same shape."""
    shape = outs[0].shape
    for array in (*arrays, *outs):
        if array.dtype != torch.float32 or array.shape != shape or not array.is_contiguous():
            return False
        if not array.is_cpu:
            return False
    return True


def _call(
    kernel: Any, weights: Sequence[float], sources: list[int], targets: list[int], count: int
) -> None:
    """Call the C function for a weighted sum of float32 arrays.

    :param kernel: native library
    :param weights: one weight for each array
    :param sources: addresses of the arrays
    :param targets: addresses to which the result is written
    :param count: number of elements of each array
    """
    arguments = _arguments(tuple(weights), tuple(sources), tuple(targets), count)
    kernel.mpigossip_sum(*arguments)


@lru_cache(CACHED_CALLS)
def _arguments(
    weights: tuple[float, ...], sources: tuple[int, ...], targets: tuple[int, ...], count: int
) -> tuple[Any, ...]:
    """Return the arguments of the C function; the parameters are described in :func:`_call`.

    Rounds repeat the same few sums, and making the arrays for C takes longer than a small sum.
    """
    terms = len(sources)
    return (
        (ctypes.c_void_p * terms)(*sources),
        (ctypes.c_float * terms)(*weights),
        terms,
        weights.count(weights[0]) == terms,
        (ctypes.c_void_p * len(targets))(*targets),
        len(targets),
        ctypes.c_size_t(count),
        # If the result replaces an array that was just read, its memory is in the cache, and
        # writing past the cache would be slower.
        count >= STREAMED and targets[0] not in sources,
    )


@cache
def library() -> Any:
    """Return the library, built if necessary; None if it can't be used (see :func:`status`)."""
    try:
        return _load()
    except NoKernel:
        return None


def status() -> str:
    """Return the path of the library, or a note on its state, for `mpigossip doctor`.

    The note says that a private copy is used, or why no library is used.
    """
    try:
        _load()
    except NoKernel as error:
        return f"not used, exchanges take longer: {error}"
    path = _library_path()
    return (
        str(path)
        if _is_private(path.parent)
        else f"a private copy: other users may write to {path}"
    )


def _load() -> Any:
    """Return the library, built and tested.

    :raises NoKernel: if it can't be built or loaded, or its sums differ from PyTorch's
    """
    if os.environ.get("MPIGOSSIP_NATIVE") == "0":
        raise NoKernel("MPIGOSSIP_NATIVE=0")
    try:
        path = _library_path()
        cache = path.parent
        is_built = _is_private(path.parent) and _is_private(path)
    except (RuntimeError, OSError) as error:
        # There is no home directory, or no permission to enter it.
        raise NoKernel(f"no cache folder: {error}; set XDG_CACHE_HOME") from error
    if not is_built:
        path = _build(path)
    try:
        kernel = ctypes.CDLL(str(path))
    except OSError as error:
        raise NoKernel(f"{path} can't be loaded ({error}); remove it") from error
    finally:
        # A library that is loaded stays mapped after its file is removed.
        if path.parent != cache:
            shutil.rmtree(path.parent, ignore_errors=True)
    if not _computes_torch_bits(kernel):
        raise NoKernel(f"{path} computes other bits than torch; remove it, or set CC")
    if sys.platform == "linux":
        count = ctypes.c_int
        real = ctypes.c_double
        kernel.mpigossip_wait.argtypes = [ctypes.c_void_p] * 2 + [count] * 3 + [real] * 4
    return kernel


def _library_path() -> Path:
    """Return the path of the library for this source, compiler and processor family."""
    text = b"".join(source.read_bytes() for source in SOURCES)
    text += repr((FLAGS, _compiler(), platform.machine())).encode()
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "mpigossip"
    return folder / f"native-{hashlib.sha256(text).hexdigest()[:16]}.so"


def _compiler() -> str:
    """Return the command of the C compiler."""
    return os.environ.get("CC") or "cc"


def _is_private(path: Path) -> bool:
    """Return whether a path exists and only this user and root may write to it."""
    info = path.stat() if path.exists() else None
    return bool(info and info.st_uid in (0, os.getuid()) and not info.st_mode & 0o022)


def _build(path: Path) -> Path:
    """Build the library and return its path.

    The path is ``path``, where one process builds and the others wait for it. If the cache folder
    can't be made private, it is in a new private folder instead.

    :param path: path of the library in the cache folder
    :raises NoKernel: if there is no compiler, or the library can't be built
    """
    compiler = _compiler().split()
    if shutil.which(compiler[0]) is None:
        raise NoKernel(f'there is no compiler "{compiler[0]}"; set CC to another')
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.parent.stat().st_uid == os.getuid():
            # Other users may have written the library that is there.
            if not _is_private(path.parent):
                path.unlink(missing_ok=True)
            path.parent.chmod(0o700)
        if _is_private(path.parent):
            return _build_once(path, compiler)
        return _compile(Path(tempfile.mkdtemp(prefix="mpigossip-")) / path.name, compiler)
    except OSError as error:
        raise NoKernel(
            f"could not build {path}: {error}; set XDG_CACHE_HOME to a folder that you can write to"
        ) from error


def _build_once(path: Path, compiler: list[str]) -> Path:
    """Build the library, or wait until another process has built it; return its path.

    :param path: path of the library in the cache folder
    :param compiler: words of the compiler's command
    :raises NoKernel: if this process or the other one can't build it, or takes longer than `WAIT_S`
    """
    lock = BuildLock(path)
    until = time.monotonic() + WAIT_S
    pause = FIRST_PAUSE_S
    # The global generator must not be used, because the program may have seeded it.
    draw = random.Random()
    while True:
        holds = lock.acquire()
        try:
            if _is_private(path):
                return path
            if reason := lock.failure():
                raise NoKernel(reason)
            if holds:
                return _compile_for_others(path, compiler, lock)
        finally:
            lock.release()
        remaining = until - time.monotonic()
        if remaining <= 0:
            raise NoKernel(
                f"another process has not built {path} within {WAIT_S:g} s; remove "
                f"{path.name}.lock.* in its folder"
            )
        # The pauses are random, so that ranks that start together do not list the folder together.
        time.sleep(min(remaining, pause * draw.uniform(0.5, 1.0)))
        pause = min(LONGEST_PAUSE_S, PAUSE_GROWTH * pause)


def _compile_for_others(path: Path, compiler: list[str], lock: BuildLock) -> Path:
    """Compile the library while this process holds the lock; return its path.

    If it fails, pass the reason to the waiting processes, which would fail in the same way.

    :raises NoKernel: if the compiler fails
    :raises OSError: if a file can't be written
    """
    try:
        return _compile(path, compiler, lock.touch)
    except (NoKernel, OSError) as error:
        lock.fail(str(error))
        raise


def _compile(path: Path, compiler: list[str], touch: Callable[[], None] = lambda: None) -> Path:
    """Compile the library to a temporary file and rename it to ``path``; return ``path``.

    No process can therefore load an incomplete library.

    :param path: path of the library
    :param compiler: words of the compiler's command
    :param touch: function that is called again and again while the compiler runs
    :raises NoKernel: if the compiler fails, or runs for longer than `COMPILE_S`
    """
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        built = Path(folder) / path.name
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
                raise NoKernel(
                    f"{compiler[0]} did not end within {COMPILE_S:g} s; set CC to another compiler"
                )
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(TOUCH_S)
            touch()
        if process.returncode:
            lines = messages.read_text(errors="replace").strip().splitlines()
            raise NoKernel(
                f"{compiler[0]} failed: {(lines or ['no message'])[0]}; set CC to another compiler"
            )
        built.chmod(0o755)
        return built.replace(path)


def _computes_torch_bits(kernel: Any) -> bool:
    """Return whether the library's sums are bitwise identical to PyTorch's.

    The test sums two and three arrays with equal weights, and three with different ones.
    """
    draw = torch.Generator().manual_seed(0)
    # A program may have made another device than the CPU torch's default device.
    arrays = [torch.randn(67, generator=draw, device="cpu", dtype=torch.float32) for _ in range(3)]
    a, b, c = arrays
    expected = {
        (0.5, 0.5): (a + b) * 0.5,
        (1 / 3,) * 3: (a + b + c) * (1 / 3),
        (0.2, 0.5, 0.3): a * 0.2 + b * 0.5 + c * 0.3,
    }
    out = torch.empty(67, device="cpu", dtype=torch.float32)
    for weights, expected_sum in expected.items():
        sources = [array.data_ptr() for array in arrays[: len(weights)]]
        _call(kernel, weights, sources, [out.data_ptr()], 67)
        if not torch.equal(out, expected_sum):
            return False
    return True
