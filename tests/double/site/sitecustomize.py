"""Python began with this folder on its path: the double stands in the place of CUDA and CuPy."""

import ctypes
import os

if folder := os.environ.get("MPIGOSSIP_DOUBLE_FOLDER"):
    ctypes.CDLL(f"{folder}/guard.so")  # before torch: it asks once whether there is an accelerator
    from tests.double import cuda, cupy, hooks, tensors

    for part in (tensors, cuda, cupy, hooks):
        part.install()
