"""What `state_dict()` holds beside the inner one's: this node's model, method and counters."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from mpigossip.cluster.world import World
from mpigossip.config import JobError
from mpigossip.doors import equal_start
from mpigossip.engine.module import LOW, Parameters
from mpigossip.engine.state import joined, split
from mpigossip.engine.step import Engine
from mpigossip.engine.vector import Flat


def state(engine: Engine, vector: Parameters) -> dict[str, Any]:
    """As tensors and plain values, so that torch.save keeps them."""
    flat = vector.flat
    return {
        "names": list(flat.names),
        "model": torch.from_numpy(joined(vector.x, 0, flat)),
        "arrays": {name: torch.from_numpy(a) for name, a in engine.arrays().items()},
        "numbers": engine.numbers() | {"bytes_sent": engine.mixer.bytes_sent[0]},
    }


def load(
    given: dict[str, Any],
    mine: dict[str, Any] | None,
    inner: torch.optim.Optimizer,
    model: nn.Module,
    flat: Flat,
) -> None:
    """``given`` into the inner optimizer; the model of ``mine``, a :func:`state`, into ours."""
    if mine is not None and tuple(mine["names"]) != flat.names:
        raise JobError(
            ["load_state_dict: the state is of a model with other parameters: "
             f"{', '.join(mine['names'][:3])} …"]
        )  # fmt: skip
    low = [(p, p.data) for p in model.parameters() if p.dtype in LOW]
    for p, data in low:  # torch casts state to the parameter's type, and masters are float32
        p.data = data.float()
    inner.load_state_dict(given)
    for p, data in low:
        p.data = data
    if mine is not None:
        equal_start.place(model, flat, mine["model"])


def check_step(world: World, mine: dict[str, Any] | None) -> None:
    """JobError, on all nodes, where they are to go on from states of different steps; collective.

    Frameworks' "latest" checkpoints differ where a kill came between two ranks' saving.
    """
    steps = world.broadcast(world.gather(mine and int(mine["numbers"]["index"])))
    if len(set(steps)) > 1:
        at = ["the start" if step is None else f"step {step}" for step in steps]
        other = next(rank for rank, step in enumerate(at) if step != at[0])
        raise JobError(
            [f"load_state_dict: rank 0 goes on from {at[0]}, rank {other} from {at[other]}: load "
             "the states of one step on all nodes, the last one that each of them has"]
        )  # fmt: skip


def restore(state: dict[str, Any], engine: Engine, vector: Parameters) -> None:
    """Put vector, method and counters where they stood; the mixer begins its rounds anew."""
    split(state["model"].numpy(), vector.x, 0, vector.flat)
    numbers = state["numbers"]
    engine.restore({name: a.numpy() for name, a in state["arrays"].items()}, numbers)
    engine.mixer.bytes_sent[0] = int(numbers["bytes_sent"])
