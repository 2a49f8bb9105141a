"""`python -m tests.double [pytest's arguments]`: the tests for GPUs, on the double.

Needs a C++ compiler, for a guard of 30 lines and to run kernels on this processor; tried on x86-64.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

HERE = Path(__file__).parent
TESTS = ["tests/test_gpu.py", "tests/double"]


def environment(folder: Path, devices: int = 8) -> dict[str, str]:
    """Return the environment of a process with the double; ``folder``: folder of compiled code."""
    home = Path(torch.__file__).parent
    flags = ["-O1", "-std=c++20", "-shared", "-fPIC", f"-I{home}/include", f"-L{home}/lib"]
    made = [HERE / "guard.cpp", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{home}/lib"]
    made += ["-o", folder / "guard.so"]
    subprocess.run(["c++", *flags, *made], check=True, timeout=300)
    path = [str(HERE / "site"), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "MPIGOSSIP_DOUBLE": str(devices),
        "MPIGOSSIP_DOUBLE_FOLDER": str(folder),
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
    }


def main(arguments: list[str]) -> int:
    """Run pytest and return its exit code."""
    with tempfile.TemporaryDirectory(prefix="mpigossip-double-") as folder:
        what = arguments if any("tests/" in a for a in arguments) else [*arguments, *TESTS]
        command = [sys.executable, "-m", "pytest", *what]
        env = environment(Path(folder), int(os.environ.get("MPIGOSSIP_DOUBLE", "8")))
        return subprocess.run(command, env=env, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
