"""Find NaN and infinite values in the state of a node."""

import math
from typing import Any

import numpy as np

CHECKED = ("parameters", "arrays/state/", "arrays/torch/", "pieces/state/")
"""Prefixes of the datasets that have to be finite, beside the statistics of norms: other buffers
may be masks with −∞, and a user's own state anything."""
NORMS = ("running_mean", "running_var")


def not_finite(state: Any) -> str:
    """Return what of a `checkpoint.NodeState` is NaN or infinite, and where; "" for nothing."""
    for name, array in state.stored().items():
        if array.dtype.kind != "f" or not (name.startswith(CHECKED) or name.endswith(NORMS)):
            continue
        with np.errstate(all="ignore"):
            if math.isfinite(array.sum()):  # one pass; large values may overflow: then look at each
                continue
        if len(wrong := np.flatnonzero(~np.isfinite(array))):
            first = _parameter(state, wrong[0]) if array.shape == state.parameters.shape else ""
            return f"{len(wrong):,} NaN or infinite values in {name}{first}"
    return ""


def _parameter(state: Any, at: int) -> str:
    """Return which parameter has this element of an array shaped like all of them."""
    ends = np.cumsum([math.prod(shape) for shape in state.shapes])
    if state.slot is not None:  # its first element depends on the slots before
        return f" of slot {state.slot}"
    return f", the first in {state.names[np.searchsorted(ends, at, side='right')]}"
