"""`python -m tests.double [pytest's arguments]`: the tests for GPUs, on the double.

Needs a C++ compiler, for a guard of 50 lines and to run kernels on this processor.
"""

import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import torch

HERE = Path(__file__).parent


def guard(folder: Path) -> Path:
    """Compiled against the torch at hand."""
    home, made = Path(torch.__file__).parent, folder / "guard.so"
    flags = ["-O1", "-std=c++20", "-shared", "-fPIC", f"-I{home / 'include'}"]
    there = [f"-L{home / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{home / 'lib'}"]
    subprocess.run(["c++", *flags, HERE / "guard.cpp", *there, "-o", made], check=True, timeout=300)
    return made


def environment(folder: Path, devices: int = 8, **more: str) -> dict[str, str]:
    """What a process begins with that is to find the double in CUDA's place."""
    path = [str(HERE / "site"), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]
    return os.environ | more | {
        "MPIGOSSIP_DOUBLE_GUARD": str(guard(folder)), "MPIGOSSIP_DOUBLE": str(devices),
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
    }  # fmt: skip


def main(arguments: list[str]) -> int:
    """Run pytest; its exit code."""
    if sysconfig.get_platform() != "linux-x86_64":
        print("the double is tried on x86-64 Linux only")
    with tempfile.TemporaryDirectory(prefix="mpigossip-double-") as folder:
        what = arguments if any("tests/" in a for a in arguments) else [*arguments, *TESTS]
        command = [sys.executable, "-m", "pytest", *what]
        return subprocess.run(command, env=environment(Path(folder)), check=False).returncode


TESTS = ["tests/test_gpu.py", "tests/double"]

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
