"""Arrays of NumPy and torch that a program exchanges: their types, checks and weighted sums."""

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np
import torch

from mpigossip.cluster.world import World
from mpigossip.config import JobError
from mpigossip.mixing.combine import weighted_sum

NAMES = (
    *("float16", "float32", "float64"),
    *("int8", "int16", "int32", "int64", "uint8"),
)
"""Names of the dtypes that NumPy and torch share and that can be exchanged."""
TYPES: dict[Any, torch.dtype] = {
    torch.bfloat16: torch.bfloat16,
    **{np.dtype(name): getattr(torch, name) for name in NAMES},
    **{getattr(torch, name): getattr(torch, name) for name in NAMES},
}
"""Dtypes of NumPy and torch that can be exchanged, with the torch dtype of the same format."""
Weights = Mapping[int, float]
"""Weights of arrays in a sum, by the rank that has sent the array."""


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which arrays of ``dtype`` are summed.

    It is float32 for float16 and bfloat16; all other dtypes are summed in ``dtype`` itself.
    """
    return torch.float32 if dtype.is_floating_point and dtype.itemsize == 2 else dtype


class ArrayForm:
    """Kind (NumPy or torch), dtype, shape and device of all arrays of an exchange."""

    def __init__(self, like: Any, owner: str):
        """Store the form of an array.

        :param like: array whose form all others must have
        :param owner: name of the class that exchanges, for messages
        :raises JobError: if arrays of this form cannot be exchanged
        """
        if (
            getattr(like, "dtype", None) not in TYPES
            or not isinstance(like, np.ndarray | torch.Tensor)
            or not has_values(like)
        ):
            raise JobError(
                f"{owner}: the argument like is {describe(like)}: must be a dense numpy array or "
                "torch tensor of float16, bfloat16, float32, float64, uint8 or a signed integer "
                "type, in the processor's byte order and without a mask, such as "
                "numpy.asarray(x, numpy.float32)"
            )
        self.is_tensor = torch.is_tensor(like)
        self.numpy_dtype = like.dtype
        self.dtype = TYPES[like.dtype]
        self.shape = like.shape
        self.count = int(np.prod(like.shape))
        self.device: Any = like.device if self.is_tensor else torch.device("cpu")
        self._owner = owner

    @property
    def is_integer(self) -> bool:
        """True if the arrays hold integers, whose sums are exact."""
        return not self.dtype.is_floating_point

    def check(self, call: str, *arrays: Any, out: Any = None) -> None:
        """Check that the arrays of a call have this form.

        :param call: name of the call, for messages
        :param arrays: arrays to read
        :param out: array to write the result into; None: a new one
        :raises JobError: if an array has another form, or ``out`` cannot be written
        """
        for array in (*arrays, *([] if out is None else [out])):
            if not self._has_form(array):
                raise JobError(
                    f"{call}: an array is {describe(array)}; this {self._owner} was made for "
                    f"{'torch' if self.is_tensor else 'numpy'} arrays of {self.numpy_dtype} and "
                    f"shape {tuple(self.shape)}; convert the array, or make another {self._owner}"
                )
        if out is not None and (
            torch._debug_has_internal_overlap(out) == 1
            if self.is_tensor
            else not out.flags.writeable
        ):
            raise JobError(
                f"{call}: out is read-only or expanded (its elements share memory), so it "
                f"can't be written; pass out.{'clone' if self.is_tensor else 'copy'}()"
            )

    def _has_form(self, array: Any) -> bool:
        """Return whether an array has this kind, dtype and shape, and holds all of its values."""
        return (
            isinstance(array, torch.Tensor if self.is_tensor else np.ndarray | np.generic)
            and array.dtype == self.numpy_dtype
            and array.shape == self.shape
            and has_values(array)
        )

    def flatten(self, array: Any) -> torch.Tensor:
        """Return the values as a new contiguous tensor (p,) in host memory."""
        if self.is_tensor:
            return array.detach().to("cpu", copy=True).reshape(-1).contiguous()
        return torch.from_numpy(np.array(array, order="C", ndmin=1)).reshape(-1)

    def restore(self, flat: torch.Tensor, out: Any = None) -> Any:
        """Return the values of a tensor (p,) as an array of this form.

        :param flat: values in host memory
        :param out: array to write the values into; None: a new one
        """
        values = flat.view(self.shape)
        if self.is_tensor:
            if out is None:
                return values.to(self.device, copy=True)
            out.detach().copy_(values)
            return out
        if out is None:
            return values.numpy().copy()
        out[...] = values.numpy()
        return out


def check_world(owner: str, world: Any) -> None:
    """Check that a program has passed a world.

    :param owner: name of the class that exchanges, for messages
    :param world: object that was passed as the world
    :raises JobError: if it is no world
    """
    if not hasattr(world, "raise_together"):
        raise JobError(
            f"{owner}: world is a {type(world).__name__}: pass the result of mpigossip.world(), as "
            f'in {owner}(world, "ring", like=x)'
        )


def check_equal(world: World, arguments: dict[str, Any]) -> None:
    """Check that all ranks have given the same arguments; collective.

    :param world: all ranks
    :param arguments: arguments by name; all of them can be pickled
    :raises JobError: on all ranks, if an argument of a rank differs from rank 0's
    """
    first = world.broadcast(arguments)
    with world.raise_together(JobError):
        for name in arguments:
            if arguments[name] != first[name]:
                raise JobError(
                    f"{name} is {arguments[name]} here, but {first[name]} on rank 0: pass "
                    "the same value on all ranks"
                )


def check_weights(call: str, weights: Weights, ranks: Sequence[int], dtype: torch.dtype) -> None:
    """Check the weights that a program has passed to a call.

    :param call: name of the call, for messages
    :param weights: weights by rank
    :param ranks: ranks that may have a weight
    :param dtype: dtype of the arrays
    :raises JobError: if the weights are no dictionary, another rank has a weight, a weight is no
        finite number, or an integer array has a weight that is no integer
    """
    if not isinstance(weights, Mapping):
        raise JobError(
            f"{call}: weights is a {type(weights).__name__}; pass a dictionary {{rank: weight}} "
            f"with ranks of {sorted(ranks)}"
        )
    for rank, weight in weights.items():
        if rank not in ranks:
            raise JobError(
                f"{call}: rank {_shown(rank)} is given, which the graph does not connect to this "
                f"rank here; give ranks of {sorted(ranks)} only"
            )
        if not _is_finite(weight):
            raise JobError(
                f"{call}: the weight of rank {rank} is {_shown(weight)}: must be a finite number"
            )
        if not dtype.is_floating_point and not float(weight).is_integer():
            raise JobError(
                f"{call}: the weight of rank {rank} is {weight}, but the arrays hold integers, "
                "which have no average; give weights that are whole numbers"
            )


def _shown(value: Any) -> str:
    """Return a value as text, in quotation marks if it is a text."""
    return repr(value) if isinstance(value, str) else str(value)


def _is_finite(weight: Any) -> bool:
    """Return whether a weight is a finite number, or an array of NumPy or torch without axes."""
    if not isinstance(weight, Real) and getattr(weight, "shape", None) != ():
        return False
    try:
        return math.isfinite(weight)
    except (TypeError, ValueError, OverflowError):
        return False


def scale(array: torch.Tensor, weight: float) -> torch.Tensor:
    """Return ``weight · array``, rounded once to the dtype of the array, as a new array (p,)."""
    return combine([weight], [array])


def combine(weights: Sequence[float], arrays: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return ``Σ_k weights[k] · arrays[k]``, a new array (p,).

    Floating-point arrays are summed by :func:`weighted_sum`; float16 and bfloat16 are summed in
    float32, and the sum is rounded once. Sums of integers are exact, and wrap around where the
    result does not fit the dtype.

    :param weights: weights, which are whole numbers if the arrays hold integers
    :param arrays: arrays (p,) of equal dtype
    """
    dtype = arrays[0].dtype
    if not dtype.is_floating_point:
        # A weight that exceeds int64 has the same sum, modulo 2^64, as the wrapped one.
        factors = [(int(weight) + 2**63) % 2**64 - 2**63 for weight in weights]
        total = arrays[0] * factors[0]
        for factor, array in zip(factors[1:], arrays[1:], strict=True):
            total += array * factor
        return total
    rows = [array.to(sum_dtype(dtype)).view(1, -1) for array in arrays]
    return weighted_sum(list(map(float, weights)), rows, torch.empty_like(rows[0]))[0].to(dtype)


def has_values(array: Any) -> bool:
    """Return whether the array holds all of its values in memory, without a mask."""
    if torch.is_tensor(array):
        return array.layout == torch.strided and not array.is_meta
    return not isinstance(array, np.ma.MaskedArray)


def describe(array: Any) -> str:
    """Return the dtype, shape, type and location of an array, for messages."""
    if not hasattr(array, "dtype"):
        return f"a {type(array).__name__}"
    location = f", {array.layout} on {array.device}" if torch.is_tensor(array) else ""
    shape = tuple(getattr(array, "shape", ()))
    return f"{array.dtype} of shape {shape} ({type(array).__name__}{location})"
