"""An algorithm's ``send`` or ``receive`` as one pass over a GPU's shard.

The function runs as it is written, but under a mode in which torch's elementwise operations are
noted in place of being done. What was noted becomes one kernel: each array is read at most
once and written at most once, with the wire's bfloat16 codes where there are some. Noting is done
anew in every step, so that a step's numbers and branches are those of the step; kernels are kept
by their text. What can't be noted is left to torch, nothing having been done by then.

Untested where there is no GPU; the texts are run on the CPU in the tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet

import torch

from mpigossip.mixing.kernels.elementwise import launch, usable
from mpigossip.mixing.kernels.tracing import CannotNote, Noted, identity

WORTHWHILE = 1 << 20
"""Elements of a shard from which a pass over memory takes longer than noting and launching."""


class Coded(tuple):
    """An outbox of vectors, then scalars, with room beside it for the vectors' bfloat16 codes."""

    codes: tuple[torch.Tensor, ...] = ()
    """one (1, p) a vector; the vectors become what the codes say"""
    written = False
    """whether a pass has filled them"""


def send(method: Callable, x, g, state, out, step, *, local: bool) -> Any:
    """``method(x, g, state, out, step)``, in one pass where that can be; the state.

    ``local``: nothing will travel, so that nothing is to be encoded.
    """
    codes = () if local else getattr(out, "codes", ())
    done = _once(method, x, (x, g, state, out, step), 3, codes)
    if done is None:
        return method(x, g, state, out, step)
    if codes:
        out.written = True
    return done[0]


def receive(method: Callable, x, g, state, sent, mixed, step) -> Any:
    """``method(x, g, state, sent, mixed, step)``, in one pass where that can be; the state.

    The gradient isn't needed afterwards, and its memory not written.
    """
    done = _once(method, x, (x, g, state, sent, mixed, step), None, (), (g,))
    return method(x, g, state, sent, mixed, step) if done is None else done[0]


_plain: WeakSet[Callable] = WeakSet()
"""Functions that turned out to be none for a pass."""


def _once(
    method: Callable,
    x: torch.Tensor,
    arguments: Sequence[Any],
    out: int | None,
    codes: Sequence[torch.Tensor],
    spent: Sequence[torch.Tensor] = (),
) -> tuple[Any] | None:
    """The state that the function returns, its arrays written; None where it wasn't done.

    ``out``: which of the arguments is the outbox.
    """
    if not _worth(x) or arguments[-1].skipped or method in _plain:
        return None
    noted = Noted(x)
    # small arrays are computed at once, in copies until it is sure that all can be noted
    own = {2, out}
    given = [noted.copied(value) if k in own else value for k, value in enumerate(arguments)]
    try:
        with noted:
            state = method(*given)
        outbox = arguments[out] if out is not None else ()
        made = noted.kernel(dict(zip(map(identity, outbox), codes, strict=False)), spent)
        state = noted.given_back(state)
    except CannotNote:
        _plain.add(method)
        return None
    if made is not None:
        launch(made)
    for original, copy in noted.copies:
        original.copy_(copy)
    return (state,)


def _worth(x: torch.Tensor) -> bool:
    """Whether a pass is possible and gains something."""
    return (
        x.is_cuda
        and x.dtype == torch.float32
        and x.numel() >= WORTHWHILE
        and x.stride(-1) == 1
        and usable(x.device)
    )
