"""Looks at all nodes from a user's loop: the average of the models, and how far apart they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from mpigossip.doors.node import Node
from mpigossip.engine.consensus import consensus_distance
from mpigossip.runs.run import meet


@contextmanager
def averaged(node: Node) -> Iterator[None]:
    """Inside, the model is the exact average over nodes; taken back afterwards. Collective."""
    (x,) = node.vector.x
    node.between("averaged()")
    with torch.no_grad():
        meet(node, node.world)
        node.engine.settle()
        own = x.clone()
        x.copy_(node.mixer.mean(x))
        node.publish()
    try:
        with node.no_sync():  # a backward pass in here is none of a step
            yield
    finally:
        with torch.no_grad():
            x.copy_(own)
            node.publish()


def distance(node: Node) -> float:
    """(1/n) Σ_i ‖x_i − x̄‖² / ‖x̄‖²; collective."""
    node.between("consensus_distance()")
    with torch.no_grad():
        meet(node, node.world)
        node.engine.settle()
        return consensus_distance(node.vector.x, node.mixer, node.engine.group)
