"""Pauses of a custom loop: average model, consensus distance, and work of a single rank."""

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from inspect import signature

import torch
from torch import nn

from mpigossip.cluster import deadline
from mpigossip.config import JobError
from mpigossip.data.pytree import Nested, map_tensors
from mpigossip.engine.measurements import consensus_distance
from mpigossip.engine.overlapping_tensors import overwrite
from mpigossip.engine.sharded import fully_sharded, local_shard, reshard
from mpigossip.mixing.base import Mixer
from mpigossip.mixing.device.memory import device_context
from mpigossip.optim import initial_sync
from mpigossip.optim.node import LoopNode
from mpigossip.runs.node import IDLE_S, wait_for_nodes
from mpigossip.training.evaluate import average_buffers, average_into, norms, recalibrating


@contextmanager
def averaged(node: LoopNode, twin: nn.Module | None, batches: Iterable | None) -> Iterator[None]:
    """Return a context manager in which the model, or its twin, is the average; collective.

    Parameters and floating-point buffers are averaged over nodes, and restored when the block ends.
    If a rank fails while the average is computed, the block gets this node's values instead.

    :param node: node of this rank
    :param twin: module that is averaged instead of the model; None: the model
    :param batches: batches of this node; one pass of the averaged parameters over them computes the
        statistics of BatchNorm again, which are then averaged; None: average the present statistics
    :raises JobError: inside another averaged() or an asynchronous pause; if ``batches`` is given
        and the module has no BatchNorm with running statistics; on all ranks, if the batches of a
        rank are empty, or if the modules of the ranks differ in layout
    """
    module = node.model if twin is None else twin
    if batches is not None and not norms(module):
        raise JobError(
            "averaged(recalibrate=…): the model has no BatchNorm whose running mean "
            "and variance could be computed again: remove recalibrate"
        )
    with torch.no_grad(), deadline.user_call("averaged()"):
        _wait_ready(node, "averaged()")
        with node.catch_failure():
            initial_sync.check_equal(node.world, initial_sync.layout(module))
        saved = snapshot(node, twin)
    node.evaluating = True
    try:
        is_average = False
        with torch.no_grad(), deadline.user_call("averaged()"), node.catch_failure():
            average_(node.mixer, saved.parameters)
            saved.show()
            batch_count = None if batches is None else recalibrate_(module, batches)
            with node.world.raise_together(JobError):  # even if only other ranks have batches
                _check_batches(batch_count, node.world.rank)
            average_buffers(node.mixer, node.group, [[saved.buffers]], module)
            is_average = True
        if not is_average:
            saved.restore()
        yield
    finally:
        node.evaluating = False
        saved.restore()
        node.edits.renew(node.vector)


class Snapshot:
    """Parameters and buffers of a module, with the values that they have now.

    ``parameters`` are the tensors that are averaged: the flat parameters of the node, or each
    floating-point parameter of a twin. If these are sharded, they are the shards of this rank.
    """

    def __init__(
        self, node: LoopNode, twin: nn.Module | None, parameters: list[torch.Tensor]
    ) -> None:
        """Copy ``parameters``, and the buffers of ``twin``, or of the model if it is None."""
        self._node = node
        self._twin = twin
        self.parameters = parameters
        self.buffers = list((node.model if twin is None else twin).buffers())
        self._copies = [(t, t.clone()) for t in [*self.buffers, *parameters]]

    def show(self) -> None:
        """Let the module compute with the parameters as they are now."""
        if self._twin is None:
            self._node.publish()
        else:
            reshard(fully_sharded(self._twin))

    def restore(self) -> None:
        """Write the copied values back; it may be called more than once."""
        with torch.no_grad():
            for tensor, value in self._copies:
                overwrite(tensor, value)
            self.show()
            if self._twin is not None:
                # A twin may share 16-bit parameters with the model: restore them from the master
                # weights.
                self._node.publish()


def snapshot(node: LoopNode, twin: nn.Module | None) -> Snapshot:
    """Return a copy of the current parameters and buffers of a module.

    :param node: node of this rank
    :param twin: module whose values are copied; None: the model of ``node``
    """
    if twin is None:
        return Snapshot(node, None, [node.vector.x[0]])
    reshard(fully_sharded(twin))
    floats = [p.detach() for p in twin.parameters() if p.is_floating_point()]
    return Snapshot(node, twin, [local_shard(p) for p in floats])


def average_(mixer: Mixer, parameters: Iterable[torch.Tensor]) -> None:
    """Replace each of ``parameters`` by its exact average over nodes; collective."""
    for parameter in parameters:
        flat = parameter.reshape(-1)  # a copy if the strides don't allow a view
        average_into(mixer, flat[None], flat)
        parameter.copy_(flat.view(parameter.shape))


def recalibrate_(module: nn.Module, batches: Iterable) -> int:
    """Compute the statistics of BatchNorm again from ``batches``; return the number of batches.

    The module may draw random numbers, but torch's generators of the CPU and of the module's GPU
    have the same states afterwards as before.
    """
    device = next(module.parameters()).device
    draws = torch.random.fork_rng([device] if device.type == "cuda" else [])
    batch_count = 0
    with draws, recalibrating(module):
        for batch in batches:
            batch_count += 1
            _call(module, batch, device)
    return batch_count


def _check_batches(batch_count: int | None, rank: int) -> None:
    if batch_count == 0:
        raise JobError(
            f"averaged(recalibrate=…): there was no batch on rank {rank}: pass a list, or create a "
            "new generator for each call"
        )


def _call(module: nn.Module, batch: Nested, device: torch.device) -> None:
    """Call the module on a batch: the inputs of (inputs, targets), or a mapping's entries by name.

    Entries that the module's ``forward`` does not name, such as labels, are left out; if it names
    none of them, it gets the mapping itself. Only what the module gets is moved to ``device``.
    """
    inputs = batch[0] if isinstance(batch, list | tuple) else batch
    if not isinstance(inputs, Mapping):
        module(_moved(inputs, device))
        return
    names, takes_all = _keywords(module)
    kwargs = {key: value for key, value in inputs.items() if takes_all or key in names}
    if kwargs:
        module(**{key: _moved(value, device) for key, value in kwargs.items()})
    else:
        module(_moved(inputs, device))


def _moved(inputs: Nested, device: torch.device) -> Nested:
    """Return inputs moved to ``device`` if they are nested tensors or have a method `to`."""
    if isinstance(inputs, torch.Tensor | Mapping | list | tuple):
        return map_tensors(lambda tensor: tensor.to(device), inputs)
    return inputs.to(device) if callable(getattr(inputs, "to", None)) else inputs


def _keywords(module: nn.Module) -> tuple[set[str], bool]:
    """Return the parameters of ``forward``, and whether it accepts any others by name.

    If the module passes all of its arguments on to a module inside it, as AveragedModel does, these
    are the parameters of the inner module.
    """
    parameters = signature(module.forward).parameters.values()
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    inner = getattr(module, "module", None)
    if takes_all and isinstance(inner, nn.Module):
        return _keywords(inner)
    return {
        p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    }, takes_all


def distance(node: LoopNode) -> float:
    """Return (1/n) Σ_i ‖x_i − x̄‖² / ‖x̄‖²; NaN if a rank failure is noticed; collective."""
    with torch.no_grad(), deadline.user_call("consensus_distance()"):
        _wait_ready(node, "consensus_distance()")
        with node.catch_failure():
            return consensus_distance(node.vector.x, node.mixer, node.engine.group)
    return float("nan")


def _wait_ready(node: LoopNode, call: str) -> None:
    """Move the parameters to the flat memory, and wait for all nodes and exchanges in flight.

    :param node: node of this rank
    :param call: name of the public call, for messages
    :raises JobError: inside averaged() or an asynchronous pause, or if parameters were changed
        while they were in flight
    """
    node.check_not_paused(call)
    node.check()
    node.check_known()
    wait_for_nodes(node, node.world)
    with node.catch_failure():
        node.engine.wait_exchange()


@contextmanager
def paused(node: LoopNode) -> Iterator[None]:
    """Return a context manager in which other ranks wait for this rank without a time limit.

    An asynchronous node continues to exchange in a thread; its model shows the result when the
    block ends. If MPI does not allow calls from threads, an asynchronous node sends nothing
    meanwhile, as in a long step. The call is not collective. If a node has several ranks, DDP
    between them still fails at the timeout of its process group.

    :raises JobError: inside averaged(), if the node would exchange in a thread
    """
    if node.serving:  # inside another pause
        yield
        return
    serves = node.laid_out and not node.mixer.synchronous and getattr(node.mixer, "threaded", False)
    if serves and node.evaluating:
        raise JobError(
            "paused() inside averaged(): an asynchronous node would continue to exchange, with "
            "the average in place of its own model: evaluate a copy of it (copy.deepcopy) after "
            "the block of averaged()"
        )
    with deadline.paused(), node.engine.clock.uncounted() if node.laid_out else nullcontext():
        if not serves:
            yield
            return
        node.collect_edits()
        try:
            with node.vector.in_separate_memory(), _serving(node):
                yield
        finally:
            with torch.no_grad():
                node.publish()


@contextmanager
def _serving(node: LoopNode) -> Iterator[None]:
    """Return a context manager in which a thread exchanges with other nodes again and again.

    An error of the thread is raised when the block ends without an error.
    """
    done = threading.Event()
    failed = list[BaseException]()
    node.vector.gather()  # allocate its memory now
    device = next(node.model.parameters()).device

    def serve() -> None:
        try:
            with torch.no_grad(), device_context(device):
                while not done.wait(IDLE_S):
                    node.exchange()
        except BaseException as error:  # noqa: BLE001 - raised by the thread that waits
            failed.append(error)

    thread = threading.Thread(target=serve, name="mpigossip-serving", daemon=True)
    node.serving = True
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        node.serving = False
    if failed:
        raise failed[0]
