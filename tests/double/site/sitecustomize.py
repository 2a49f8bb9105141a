"""Python began with this folder on its path: the double stands in the place of CUDA and CuPy."""

import os
import sys
from pathlib import Path

if "MPIGOSSIP_DOUBLE_GUARD" in os.environ:
    import ctypes

    # before torch: it asks once whether there is an accelerator
    ctypes.CDLL(os.environ["MPIGOSSIP_DOUBLE_GUARD"])
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
    from tests.double import cupy, hooks
    from tests.double.cuda import install

    install()
    cupy.install()
    hooks.install()
