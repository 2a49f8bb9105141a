"""Local step that uses torch's Muon for the hidden matrices and AdamW for other parameters."""

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
    """Step by Muon (Jordan et al. 2024) for hidden matrices, and by AdamW for other parameters.

    `torch.optim.Muon` updates the matrices that are neither embeddings nor in ``adamw_for``:

    B ← β B + (1 − β) g;  x ← (1 − lr λ) x − lr s O(g + β (B − g)).

    B is the momentum, and O(·) approximately the nearest orthogonal matrix. AdamW updates all other
    parameters. The state has the two arrays of AdamW; Muon keeps B in the first of them.

    :param decayed: number of elements, counted from the first, that take the decay λ
    :param layout: parameter layout (`ParameterLayout`) of one slot, because Muon takes whole
        matrices; None: the result makes a state, but raises ValueError in a step
    :param beta: β, factor of the momentum of Muon
    :param newton_schulz: number of Newton–Schulz iterations for O, in bfloat16
    :param adjust: rule for s. "match_rms_adamw": s = 0.2 √max(rows, columns), so that the same
        learning rate suits both optimizers; "original": s = √max(1, rows/columns)
    :param decoupled_decay: λ, decoupled weight decay
    :param adamw_for: names of further matrices that AdamW updates, such as the weights of an output
        layer, with "*" and "?" as wildcards
    :param beta1: β₁ of AdamW
    :param beta2: β₂ of AdamW
    :param eps: ε of AdamW
    :raises JobError: if a pattern in ``adamw_for`` matches no matrix except embeddings, or no
        matrix is left for Muon
    """
    if layout is None:
        return Local(zeros(Moments), _unknown, whole=True)
    hidden = _hidden(layout, adamw_for)
    other_columns = _runs(
        [columns for k, columns in enumerate(layout.column_ranges) if k not in hidden]
    )
    others = [
        adamw(
            min(max(layout.decayed - run.start, 0), run.stop - run.start),
            beta1=beta1,
            beta2=beta2,
            eps=eps,
            decoupled_decay=decoupled_decay,
        )
        for run in other_columns
    ]
    settings = {"momentum": beta, "ns_steps": newton_schulz, "adjust_lr_fn": adjust}

    def adapt(x, g, state: Moments, step: Step, out):
        if out is not x:
            out.copy_(x)
        for run, local in zip(other_columns, others, strict=True):
            moments = Moments(*(part[:, run] for part in state))
            local.adapt(x[:, run], g[:, run], moments, step, out[:, run])
        for row in range(len(out)):
            arrays = out[row], g[row], state.first[row]
            _matrices(layout, hidden, *arrays, step.lr, decoupled_decay, settings)
        return state

    return Local(zeros(Moments), adapt, whole=True)


def _matrices(layout: Any, hidden: Sequence[int], x, g, momenta, lr, decay, settings: Any) -> None:
    """Take one step of torch's Muon in place, for one row.

    :param layout: parameter layout, which returns the parameters as views of an array (P,)
    :param hidden: indices of the parameters that Muon updates
    :param x: parameters of the row, (P,)
    :param g: gradient of the row, (P,)
    :param momenta: momentum of the row, (P,)
    :param lr: learning rate
    :param decay: weight decay of the elements that take it
    :param settings: further options of `torch.optim.Muon`, by name
    """
    x, g, momenta = (layout.views(part) for part in (x, g, momenta))
    groups: list[dict[str, Any]] = [{"params": [], "weight_decay": value} for value in (decay, 0.0)]
    for k in hidden:
        x[k].grad = g[k]
        groups[layout.offsets[k] >= layout.decayed]["params"].append(x[k])
    optimizer = torch.optim.Muon([group for group in groups if group["params"]], lr, **settings)
    for k in hidden:
        optimizer.state[x[k]]["momentum_buffer"] = momenta[k]
    optimizer.step()


def _unknown(*_: Any) -> Any:
    raise ValueError("muon needs the parameter layout to find the matrices: pass layout=…")


def _hidden(layout: Any, adamw_for: Sequence[str]) -> list[int]:
    """Return the indices of the parameters that Muon updates.

    :param layout: parameter layout
    :param adamw_for: patterns of names of matrices that AdamW updates
    :raises JobError: if there are no such parameters, or a pattern in ``adamw_for`` matches no
        matrix except embeddings
    """
    matrices = [
        name
        for name, shape in zip(layout.names, layout.shapes, strict=True)
        if len(shape) == 2 and name not in layout.embeddings
    ]
    problems = [
        f"local.adamw_for: {pattern!r} matches no matrix that muon would take; these are "
        f"{', '.join(matrices[:8]) or 'none'}{', …' if len(matrices) > 8 else ''}"
        for pattern in adamw_for
        if not any(fnmatchcase(name, pattern) for name in matrices)
    ]
    names = [name for name in matrices if not any(fnmatchcase(name, p) for p in adamw_for)]
    if not problems and not names:
        problems = [
            'local.name = "muon": the model has no matrix other than embeddings'
            + (f" and those in local.adamw_for = {list(adamw_for)}" if adamw_for else "")
            + '; use "adamw"'
        ]
    if problems:
        raise JobError(problems)
    return [layout.names.index(name) for name in names]


def _runs(slices: Sequence[slice]) -> list[slice]:
    """Return the slices of elements, in which adjacent slices are joined."""
    joined: list[slice] = []
    for columns in slices:
        if joined and joined[-1].stop == columns.start:
            joined[-1] = slice(joined[-1].start, columns.stop)
        else:
            joined.append(columns)
    return joined
