"""Muon as a local step: torch's own for the hidden matrices, AdamW for all other parameters."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch

from mpigossip.algorithms.base import Decay, Step
from mpigossip.algorithms.local import Local, Moments, adamw, zeros
from mpigossip.config import JobError
from mpigossip.config.limits import NotNegative, Positive


def muon(
    decayed: int,
    layout: Any = None,
    *,
    beta: Decay = 0.95,
    newton_schulz: Positive = 5,
    adjust: Literal["match_rms_adamw", "original"] = "match_rms_adamw",
    decoupled_decay: NotNegative = 0.0,
    adamw_for: tuple[str, ...] = (),
    beta1: Decay = 0.9,
    beta2: Decay = 0.95,
    eps: NotNegative = 1e-8,
) -> Local:
    """Step by Muon (Jordan et al. 2024), and by AdamW for all but the hidden matrices.

    Muon is `torch.optim.Muon`. It takes all matrices that are not embeddings:

    B ← β B + (1 − β) g;  x ← (1 − lr λ) x − lr s O(g + β (B − g)).

    O is approximately the nearest orthogonal matrix. All other parameters take AdamW. The state has
    the two arrays of AdamW; Muon uses the first of them in its columns.

    :param decayed: number of columns, counted from the first, that take the decay λ
    :param layout: parameter layout (`FlatParameters`); required for steps, because Muon takes whole
        matrices
    :param beta: β
    :param newton_schulz: number of Newton–Schulz iterations for O, in bfloat16
    :param adjust: "match_rms_adamw": s = 0.2 √max(rows, columns), so that one rate suits both
        optimizers; "original": s = √max(1, rows/columns)
    :param decoupled_decay: λ
    :param adamw_for: names of further matrices that take AdamW, such as those of an output layer,
        with "*" and "?" as wildcards
    :param beta1: β₁ of AdamW
    :param beta2: β₂ of AdamW
    :param eps: ε of AdamW
    :raises JobError: if torch has no Muon, or no matrix would take it
    """
    if layout is None:
        return Local(zeros(Moments), _unknown, whole=True)
    own = _hidden(layout, adamw_for)
    rest = _runs([place for k, place in enumerate(layout.column_ranges) if k not in own])
    others = [
        adamw(
            min(max(layout.decayed - run.start, 0), run.stop - run.start),
            beta1=beta1,
            beta2=beta2,
            eps=eps,
            decoupled_decay=decoupled_decay,
        )
        for run in rest
    ]
    settings = {"momentum": beta, "ns_steps": newton_schulz, "adjust_lr_fn": adjust}

    def adapt(x, g, state: Moments, step: Step, out):
        if out is not x:
            out.copy_(x)
        for run, local in zip(rest, others, strict=True):
            some = Moments(*(part[:, run] for part in state))
            local.adapt(x[:, run], g[:, run], some, step, out[:, run])
        for row in range(len(out)):
            arrays = out[row], g[row], state.first[row]
            _matrices(layout, own, *arrays, step.lr, decoupled_decay, settings)
        return state

    return Local(zeros(Moments), adapt, whole=True)


def _matrices(layout: Any, own: Sequence[int], x, g, momenta, lr, decay, settings: Any) -> None:
    """Take one step of torch's Muon in place for one row; the arrays are (P,)."""
    x, g, momenta = (layout.views(part) for part in (x, g, momenta))
    groups: list[dict[str, Any]] = [{"params": [], "weight_decay": one} for one in (decay, 0.0)]
    for k in own:
        x[k].grad = g[k]
        groups[layout.offsets[k] >= layout.decayed]["params"].append(x[k])
    optimizer = torch.optim.Muon([group for group in groups if group["params"]], lr, **settings)
    for k in own:
        optimizer.state[x[k]]["momentum_buffer"] = momenta[k]
    optimizer.step()


def _unknown(*_: Any) -> Any:
    raise ValueError("muon needs the layout of the vector, to find the matrices")


def _hidden(layout: Any, adamw_for: Sequence[str]) -> list[int]:
    """Return the indices of the parameters that Muon updates.

    :raises JobError: if there are none, a pattern matches none, or torch has no Muon
    """
    if not hasattr(torch.optim, "Muon"):
        raise JobError(
            f'local.name = "muon": torch {torch.__version__} has no torch.optim.Muon, which came '
            'with 2.9; install a newer torch, or use "adamw"'
        )
    found = [
        name
        for name, shape in zip(layout.names, layout.shapes, strict=True)
        if len(shape) == 2 and name not in layout.embeddings
    ]
    wrong = [
        f"local.adamw_for: {pattern!r} is the name of no matrix that muon would take; these are "
        f"{', '.join(found[:8]) or 'none'}{', …' if len(found) > 8 else ''}"
        for pattern in adamw_for
        if not any(fnmatchcase(name, pattern) for name in found)
    ]
    own = [name for name in found if not any(fnmatchcase(name, p) for p in adamw_for)]
    if not wrong and not own:
        wrong = [
            'local.name = "muon": the model has no matrix that is no embedding'
            + (f" and isn't named by local.adamw_for = {list(adamw_for)}" if adamw_for else "")
            + '; use "adamw"'
        ]
    if wrong:
        raise JobError(wrong)
    return [layout.names.index(name) for name in own]


def _runs(places: Sequence[slice]) -> list[slice]:
    """Return the slices of columns, with adjacent slices joined."""
    found: list[slice] = []
    for place in places:
        if found and found[-1].stop == place.start:
            found[-1] = slice(found[-1].start, place.stop)
        else:
            found.append(place)
    return found
