"""CUDA graphs of forward and backward, a graph a replica, replayed from one thread.

Eight eager replicas in one interpreter are bound by Python's launches; a captured replica is one
launch. What is captured must be static: the gradients are (they lie in flat memory), the inputs
are copied to fixed places, and all batches of a run have one size. Learning rate, exchange and
update stay outside.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import nn

from mpigossip.data.pytree import Nested, form, leaves, map_tensors

WARM_UP = 3
"""Eager passes before a capture, in which cuDNN chooses and libraries allocate."""

Pass = Callable[[int, int, Nested], torch.Tensor]
"""``(row, slot, batch) -> figures``: gradients of one replica from zero, float64 (k,)."""


class CannotCapture(RuntimeError):
    """The model does something that a CUDA graph can't repeat, or a batch has another form."""


class Captured:
    """Forward and backward of every replica as graphs; :meth:`replay` runs them all at once."""

    def __init__(self, run: Pass, modules: Sequence[Sequence[nn.Module]], batches: Sequence):
        """``modules[row][slot]``; ``batches``: row after row, slot after slot, on the devices.

        Leaves parameters, buffers and random generators as they were. Raises CannotCapture.
        """
        self.rows = len(modules)
        self.slots = len(modules[0])
        self._inputs: list[Nested] = []
        self._found: list[torch.Tensor] = []
        self._graphs: list[torch.cuda.CUDAGraph] = []
        # graphs of one device run one after the other, in this order: they share their memory
        self._places: dict[torch.device, tuple[torch.cuda.Stream, tuple[int, int]]] = {}
        for row, replicas in enumerate(modules):
            for slot, module in enumerate(replicas):
                batch = map_tensors(torch.clone, batches[row * self.slots + slot])
                self._inputs.append(batch)
                where = next(leaves(batch)).device
                with torch.cuda.device(where), preserve_state(module, where):
                    self._capture(partial(run, row, slot, batch), module)

    def _capture(self, work: Callable[[], torch.Tensor], module: nn.Module) -> None:
        # one stream for warm-up and capture: autograd accumulates where it first ran
        side, pool = self._place()
        current = torch.cuda.current_stream()
        side.wait_stream(current)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(side):
                for _ in range(WARM_UP):
                    work()
            side.synchronize()
            # thread_local: other threads (loader, communication) may call CUDA meanwhile
            with torch.cuda.graph(graph, pool, side, capture_error_mode="thread_local"):
                found = work()
        except RuntimeError as error:
            # torch.cuda.graph, left by an error of its own, leaves its stream current: what is
            # done later on "the current stream" would stand beside the batches' copies, unordered
            torch.cuda.set_stream(current)
            with contextlib.suppress(RuntimeError):  # buffers are put back after this
                side.synchronize()
            recover_allocator(torch.cuda.current_device(), pool)
            raise CannotCapture(
                f"{type(module).__name__} can't be captured as a CUDA graph: "
                f"{str(error).splitlines()[0]}"
            ) from error
        current.wait_stream(side)
        self._graphs.append(graph)
        self._found.append(found)

    def _place(self) -> tuple[torch.cuda.Stream, tuple[int, int]]:
        device = torch.device("cuda", torch.cuda.current_device())
        if device not in self._places:
            self._places[device] = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
        return self._places[device]

    def replay(self, batches: Sequence[Nested]) -> torch.Tensor:
        """Gradients of all replicas on these batches; their figures, float64 (rows, slots, k).

        Everything is launched, on each device's current stream, before the first figure is waited
        for. CannotCapture, before anything has begun, where a batch has other shapes.
        """
        pairs = []
        for fixed, batch in zip(self._inputs, batches, strict=True):
            places = list(leaves(fixed))
            values = list(leaves(batch))
            if [one.shape for one in places] != [one.shape for one in values]:
                raise CannotCapture(
                    f"a batch of {form(batch)} where the captured one has {form(fixed)}; "
                    'node.cuda_graphs = "never" takes any shape'
                )
            pairs.append((places, values))
        for (places, values), graph in zip(pairs, self._graphs, strict=True):
            with torch.cuda.device(places[0].device):
                for place, value in zip(places, values, strict=True):
                    place.copy_(value, non_blocking=True)
                graph.replay()
        values = torch.stack([self._value(index) for index in range(len(self._found))])
        return values.view(self.rows, self.slots, -1)

    def _value(self, index: int) -> torch.Tensor:
        try:
            return self._found[index].cpu()
        except RuntimeError as error:  # what went wrong on the device is raised here
            where = self._found[index].device
            error.add_note(f"in slot {index % self.slots} of this node, on {where}")
            raise


def recover_allocator(device: int, pool: tuple[int, int]) -> None:
    """Let eager work go on after a capture that failed.

    Up to torch 2.11 the allocator goes on as if it were under way: it never frees memory that
    several streams have used, such as batches, and its next clean-up ends the process
    (github.com/pytorch/pytorch/pull/180395). The random generator refuses its next draw.
    """
    end = getattr(torch._C, "_cuda_endAllocateToPool", None)
    with contextlib.suppress(RuntimeError):  # where it has been ended
        _ = end and end(device, pool)
    generator = torch.cuda.default_generators[device]
    if hasattr(generator, "clone_state"):
        generator.graphsafe_set_state(generator.clone_state())


@contextlib.contextmanager
def preserve_state(module: nn.Module, device: torch.device | str) -> Iterator[None]:
    """Put norm statistics and the device's random generator back after warm-up passes."""
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    on_gpu = torch.device(device).type == "cuda"
    state = torch.cuda.get_rng_state(device) if on_gpu else torch.get_rng_state()
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        if on_gpu:
            torch.cuda.set_rng_state(state, device)
        else:
            torch.set_rng_state(state)
