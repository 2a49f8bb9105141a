"""Muon as a local step: torch's own on the hidden matrices, AdamW on all else."""

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
    """Muon (Jordan et al. 2024) by `torch.optim.Muon`; AdamW for what is no hidden matrix.

    Matrices, all but embeddings: B ← β B + (1 − β) g;  x ← (1 − lr λ) x − lr s O(g + β (B − g)),
    O the nearest orthogonal matrix, about, by ``newton_schulz`` iterations in bfloat16. ``adjust``:
    s = 0.2 √max(rows, columns), so that one rate fits both optimizers, or √max(1, rows/columns).
    ``adamw_for``: names, with * and ?, of matrices that AdamW is to take too, such as those of an
    output layer. β1, β2, ε are AdamW's; λ is for the first ``decayed`` columns.

    Takes whole matrices: a segment is all of the vector with this ``layout`` (a `Flat`). State:
    AdamW's two arrays, of which Muon's columns use the first.
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
    """One row's step of torch's Muon, in place; arrays are (P,)."""
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
    """The places of the matrices that Muon takes. JobError where there is none, or no Muon."""
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
    """Stretches of columns, those that meet joined."""
    found: list[slice] = []
    for place in places:
        if found and found[-1].stop == place.start:
            found[-1] = slice(found[-1].start, place.stop)
        else:
            found.append(place)
    return found
