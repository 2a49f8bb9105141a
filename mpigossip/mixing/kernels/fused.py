"""The weighted sum on GPUs as one pass, bfloat16 of the wire decoded in it; and its encoding.

The roundings are those of the CPU's sum and of torch's conversion. Without CuPy torch's operations
do the same in several passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from mpigossip.mixing.kernels.elementwise import Pass, launch, usable

ENCODE = "c = narrow(x); y = wide(c)"
READ = (torch.float32, torch.bfloat16)


def combine(weights: Sequence[float], arrays: Sequence[torch.Tensor], out: torch.Tensor) -> bool:
    """:func:`mpigossip.mixing.combine.combine` on one GPU, float32; False where it can't be done.

    The arrays may also be bfloat16. ``out`` may be the memory of any of the float32 ones.
    """
    one_gpu = all(array.device == out.device and array.dtype in READ for array in arrays)
    beside = all(array.stride(-1) == 1 for array in (*arrays, out))
    if not (one_gpu and beside and out.dtype == torch.float32 and usable(out.device)):
        return False
    if not out.numel():
        return True
    uniform = all(weight == weights[0] for weight in weights)
    kinds = "".join("b" if array.dtype == torch.bfloat16 else "f" for array in arrays)
    terms = {f"x{k}": array for k, array in enumerate(arrays)}
    scales = {f"w{k}": weight for k, weight in enumerate(weights[:1] if uniform else weights)}
    launch(Pass(terms, scales, {}, {"y": out}, operation(kinds, uniform)))
    return True


def encode(values: torch.Tensor, codes: torch.Tensor) -> bool:
    """``codes`` (p,) = float32 ``values`` (p,) as bfloat16, which they become; False: not done."""
    if not usable(values.device):
        return False
    row, coded = values.unsqueeze(0), codes.unsqueeze(0)
    launch(Pass({"x": row}, {}, {}, {"c": coded, "y": row}, ENCODE))
    return True


@cache
def operation(kinds: str, uniform: bool) -> str:
    """The sum's statements in C: arrays x0, x1, …, of ``kinds`` "f" or "b", and weights w0, ….

    ``mul`` and ``add`` round each by itself: no compiler makes one of the two.
    """
    terms = [f"x{k}" if kind == "f" else f"wide(x{k})" for k, kind in enumerate(kinds)]
    if uniform:
        lines = [f"float s = {terms[0]}"]
        lines += [f"s = add(s, {term})" for term in terms[1:]]
        return "; ".join([*lines, "y = mul(s, w0)"])
    lines = [f"float s = mul({terms[0]}, w0)"]
    lines += [f"s = add(s, mul({term}, w{k}))" for k, term in enumerate(terms) if k]
    return "; ".join([*lines, "y = s"])
