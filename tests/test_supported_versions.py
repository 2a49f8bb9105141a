"""Names and signatures of CuPy and torch for GPUs, in the oldest and newest supported version.

CuPy without a GPU: folders 14.0.0 and newest under $MPIGOSSIP_CUPY, each made by
`pip install --no-deps --target FOLDER cupy-cuda12x==14.0.0 cuda-pathfinder`.
"""

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

RUNTIME = "cuda.runtime."
CUPY = {
    "cuda.Memory": ["size"],
    "cuda.MemoryPointer": ["mem", "offset"],
    "cuda.Device": ["device"],
    "RawKernel": ["code", "name"],
    RUNTIME + "deviceSynchronize": [],
}
"""Parameters of each name, in order; further parameters have defaults."""
VALUES = {
    RUNTIME + "cudaDevAttrGPUDirectRDMAFlushWritesOptions": 117,
    RUNTIME + "cudaDevAttrGPUDirectRDMAWritesOrdering": 118,
}
LOOK = """
import functools, json, sys, cupy
asked, found = json.load(sys.stdin), {"version": cupy.__version__}
for name in asked:
    value = functools.reduce(getattr, name.split("."), cupy)
    found[name] = value.__doc__.splitlines()[0] if callable(value) else value
cupy.ndarray, cupy.cuda.Stream.from_external, cupy.cuda.runtime.CUDARuntimeError
json.dump(found, sys.stdout)
"""


def parameters(line):
    """Return the names in a Cython signature: `f(self, int a, bytes b=c) -> d`."""
    inside = line.partition("(")[2].rpartition(")")[0]
    given = [one for one in inside.split(", ") if one not in ("", "*")]
    names = [one.partition("=")[0].split()[-1] for one in given]
    needed = [one for one in given if "=" not in one]
    return [name for name in names if name != "self"], len(needed) - ("self" in names)


@pytest.mark.parametrize("end", ["14.0.0", "newest"])
def test_cupy_has_what_gpus_need(end):
    folder = Path(os.environ.get("MPIGOSSIP_CUPY", "/nowhere"), end)
    if not folder.is_dir():
        pytest.skip(f"no CuPy {end} in $MPIGOSSIP_CUPY: this file's first lines say how to get it")
    env = {name: value for name, value in os.environ.items() if "DOUBLE" not in name}
    env |= {"PYTHONPATH": str(folder)}
    command = [sys.executable, "-W", "ignore", "-c", LOOK]
    asked = json.dumps([*CUPY, *VALUES])
    done = subprocess.run(command, env=env, input=asked, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert end in ("newest", result["version"])
    for name, expected in CUPY.items():
        names, needed = parameters(result[name])
        assert names[: len(expected)] == expected and needed <= len(expected), (name, result[name])
    assert {name: result[name] for name in VALUES} == VALUES


TORCH = {
    "cuda.graph.__init__": ["cuda_graph", "pool", "stream", "capture_error_mode"],
    "cuda.Stream.__new__": ["device", "priority"],
    "cuda.Event.__new__": ["blocking"],
    "cuda.set_rng_state": ["new_state", "device"],
    "cuda.get_rng_state": ["device"],
    "cuda.is_bf16_supported": [],
    "cuda.stream": ["stream"],
    "cuda.default_stream": ["device"],
    "cuda.graph_pool_handle": [],
    "nn.Module.to": [],
}
NAMES = (
    "cuda.Stream.wait_stream",
    "cuda.Stream.record_event",
    "cuda.Event.query",
    "cuda.cudart",
    "cuda.set_stream",
    "cuda.CUDAGraph.replay",
    "cuda.mem_get_info",
    "from_dlpack",
    "backends.cudnn.benchmark",
    "are_deterministic_algorithms_enabled",
    "Tensor.record_stream",
    "Generator.graphsafe_set_state",
)


@pytest.mark.parametrize("end", ["2.11", "2.13"])
def test_torch_has_what_gpus_need(end):
    if torch.__version__.split("+")[0].rpartition(".")[0] != end:
        pytest.skip(f"torch {torch.__version__} is installed, not {end}")
    if "MPIGOSSIP_DOUBLE" in os.environ:
        pytest.skip("the double stands in torch's place")
    for name, expected in TORCH.items():
        value = torch
        for part in name.split("."):
            value = getattr(value, part)
        assert set(expected) <= set(inspect.signature(value).parameters), name
    for name in NAMES:
        value = torch
        for part in name.split("."):
            assert hasattr(value, part), name
            value = getattr(value, part)
