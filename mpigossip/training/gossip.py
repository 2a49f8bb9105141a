"""Decentralized training in a user's own loop: three changed lines around a torch optimizer."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn

from mpigossip.config import JobError
from mpigossip.engine.vector import flatten
from mpigossip.graphs import graph as make_graph
from mpigossip.groups.devices import make_group
from mpigossip.mixing import open_mixer
from mpigossip.mixing.base import Kind, Layout

T = TypeVar("T")


class Gossip:
    """Neighbour averaging after each step of any ``torch.optim`` optimizer.

    x_i ← Σ_j W_ij(t) u_j, u_j the model of node j after its optimizer's step (adapt-then-combine;
    one model-sized vector travels a step)::

        with mpigossip.world() as world:
            gossip = mpigossip.Gossip(world, model, optimizer, graph="one-peer-exponential")
            for batch, target in loader:
                loss(model(batch), target).backward()
                gossip.step()

    Each rank is a node. All nodes begin with the exact average of their models. With ``devices``
    a node has several slots: :meth:`run` calls a function on each, with that slot's replica.
    """

    def __init__(
        self,
        world,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        graph: Any = "one-peer-exponential",
        *,
        devices: tuple[str, ...] | None = None,
        same_host: str = "read",
        timeout_s: float = 300.0,
        **options: Any,
    ):
        """Collective. ``graph``: a name (options as in a job file), or a networkx graph.

        ``devices``: one a slot, such as ("cuda:0", "cuda:1"); None: where the model is. Raises
        GraphError and JobError for what doesn't fit; ValueError for a model that isn't float32.
        """
        self._check(model, optimizer)
        where = str(next(model.parameters()).device)
        self.devices = devices or (where,)
        self._flat = flatten(model)
        self._graph = make_graph(graph, world.size, **options)
        self._optimizer, self._round = optimizer, 0
        self._group = make_group(self.devices, torch.get_num_threads(), True, timeout_s)
        self._x = torch.zeros(1, self._flat.size, device=where)
        layout = Layout((self._flat.size,), devices=(where,))
        self._mixer = open_mixer(
            self._graph, layout, world, same_host=same_host, timeout_s=timeout_s
        )
        self._begin_together(model)
        self.models = [model, *(copy.deepcopy(model).to(d) for d in self.devices[1:])]
        world.resources.callback(self.close)

    def _check(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer has to move the parameters of this very model."""
        own = {id(p) for p in model.parameters() if p.requires_grad}
        moved = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if not own & moved:
            raise JobError(
                ["the optimizer has none of the model's parameters; make it from "
                 "model.parameters() of the model that is given to Gossip"]
            )  # fmt: skip

    def _begin_together(self, model: nn.Module) -> None:
        """Put the parameters into one vector, the exact average of all nodes' models."""
        row = self._x[0]
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            for name, view in zip(self._flat.names, self._flat.views(row), strict=True):
                view.copy_(parameters[name])
            row.copy_(self._mixer.mean(self._x))
        self._flat.attach(model, row, None)

    def run(self, work: Callable[[int, nn.Module], T]) -> list[T]:
        """``work(slot, replica)`` on every slot at once: forward and backward of its batch."""
        return self._group.run(lambda slot: work(slot, self.models[slot]))

    def step(self) -> None:
        """Average the slots' gradients, step the optimizer, average the model with neighbours.

        Gradients are zero afterwards.
        """
        self._average_gradients()
        self._optimizer.step()
        (out,) = self._mixer.outbox(self._round)
        out[0].copy_(self._x)
        self._mixer.start(Kind.GOSSIP, self._round)
        _, ((mixed,),) = self._mixer.finish()
        self._x.copy_(mixed)
        self._round += 1
        self._optimizer.zero_grad()
        self._spread()

    def _average_gradients(self) -> None:
        """Mean over slots into the gradients of slot 0, summed in slot order."""
        others = [dict(m.named_parameters()) for m in self.models[1:]]
        for name, parameter in self.models[0].named_parameters():
            grads = [replica[name].grad for replica in others]
            if others and parameter.grad is not None:
                for grad in grads:
                    parameter.grad.add_(grad.to(parameter.device))
                parameter.grad.div_(len(self.models))

    def _spread(self) -> None:
        """Copy slot 0's parameters to the other slots, whose gradients become zero."""
        for model in self.models[1:]:
            with torch.no_grad():
                for own, new in zip(model.parameters(), self.models[0].parameters(), strict=True):
                    own.copy_(new)
            model.zero_grad()

    @contextlib.contextmanager
    def averaged(self) -> Iterator[nn.Module]:
        """The model as the exact average over nodes, for evaluation; taken back afterwards.

        Collective. Norm buffers stay those of this node.
        """
        own = self._x.clone()
        self._x.copy_(self._mixer.mean(self._x))
        try:
            yield self.models[0]
        finally:
            self._x.copy_(own)

    def consensus_distance(self) -> float:
        """(1/n) Σ_i ‖x_i − x̄‖² / ‖x̄‖²; collective."""
        from mpigossip.engine.consensus import consensus_distance

        return consensus_distance(self._x, self._mixer)

    def close(self) -> None:
        """Free windows and threads; collective, and done by the world where it ends."""
        self._mixer.close()
        self._group.close()
