"""CUDA graphs of the forward and backward passes, one for each replica of the model.

If a process trains eight replicas, one after another, Python launches kernels too slowly. A
captured replica needs a single launch. All memory that a captured graph uses has to stay in place:
gradients lie in flat arrays, and inputs are copied to fixed buffers, so that all batches of a
replica must have the same shape. The learning rate, the exchange and the update are not captured.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import nn

from mpigossip.data.pytree import Nested, form, leaves, map_tensors
from mpigossip.engine.overlapping_tensors import overwrite

WARM_UP = 3
"""Number of passes before a capture, in which cuDNN chooses algorithms and libraries allocate
memory, because neither can be captured.
"""

Pass = Callable[[int, int, Nested], torch.Tensor]
"""Function ``(row, slot, batch) -> figures`` that sets the gradients of one replica to zero and
computes them. It returns loss and metrics as a float64 tensor (k,).
"""


class CannotCapture(RuntimeError):
    """Error if a CUDA graph can't repeat what the model does, or if a batch has another shape."""


class Captured:
    """CUDA graphs of the forward and backward passes of all replicas, which `replay` launches."""

    def __init__(self, run: Pass, modules: Sequence[Sequence[nn.Module]], batches: Sequence):
        """Capture one graph for each replica.

        Parameters, buffers and the default random number generators of the GPUs keep their values.

        :param run: function that computes the gradients of one replica
        :param modules: replicas, ``modules[row][slot]``
        :param batches: for each row, one batch per slot, on the devices of the slots
        :raises CannotCapture: if torch can't capture a replica
        """
        self.rows = len(modules)
        self.slots = len(modules[0])
        self._inputs: list[Nested] = []
        self._figures: list[torch.Tensor] = []
        self._graphs: list[torch.cuda.CUDAGraph] = []
        # The graphs of a device never run at the same time, so they share memory.
        self._streams: dict[torch.device, tuple[torch.cuda.Stream, tuple[int, int]]] = {}
        for row, replicas in enumerate(modules):
            for slot, module in enumerate(replicas):
                batch = map_tensors(torch.clone, batches[row * self.slots + slot])
                self._inputs.append(batch)
                device = next(leaves(batch)).device
                with torch.cuda.device(device), preserve_state(module, device):
                    self._capture(partial(run, row, slot, batch), module)

    def _capture(self, work: Callable[[], torch.Tensor], module: nn.Module) -> None:
        """Capture one graph on the current device, and store it with its output.

        :param work: function that computes the gradients of a replica and returns its output
        :param module: the replica, whose class the error names
        :raises CannotCapture: if torch raises a RuntimeError
        """
        # Warm-up and capture use the same stream, because autograd always accumulates a gradient in
        # the stream in which it did so first.
        side, pool = self._stream_and_pool()
        current = torch.cuda.current_stream()
        side.wait_stream(current)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(side):
                for _ in range(WARM_UP):
                    work()
            side.synchronize()
            # Other threads (loader, communication) may call CUDA during the capture.
            with torch.cuda.graph(graph, pool, side, capture_error_mode="thread_local"):
                figures = work()
        except RuntimeError as error:
            # If the capture fails, torch.cuda.graph leaves its stream current. Work that is later
            # launched on the current stream would then not be ordered after the copies of the
            # batches.
            torch.cuda.set_stream(current)
            # After this, the caller restores buffers, so the stream must be idle.
            with contextlib.suppress(RuntimeError):
                side.synchronize()
            recover_allocator(torch.cuda.current_device(), pool)
            raise CannotCapture(
                f"{type(module).__name__} can't be captured as a CUDA graph: "
                f'{str(error).splitlines()[0]}; node.cuda_graphs = "never" trains without graphs'
            ) from error
        current.wait_stream(side)
        self._graphs.append(graph)
        self._figures.append(figures)

    def _stream_and_pool(self) -> tuple[torch.cuda.Stream, tuple[int, int]]:
        """Return the stream and the memory pool of the current device."""
        device = torch.device("cuda", torch.cuda.current_device())
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
        return self._streams[device]

    def replay(self, batches: Sequence[Nested]) -> torch.Tensor:
        """Compute the gradients of all replicas on the given batches.

        All graphs are launched, on the current stream of each device, before the function waits for
        the first result.

        :param batches: for each row, one batch per slot
        :return: loss and metrics of each replica, float64 (rows, slots, k) on the CPU
        :raises CannotCapture: if a batch has other shapes than the captured batch; no graph has
            been launched then
        """
        pairs = []
        for fixed, batch in zip(self._inputs, batches, strict=True):
            targets = list(leaves(fixed))
            values = list(leaves(batch))
            if [tensor.shape for tensor in targets] != [tensor.shape for tensor in values]:
                raise CannotCapture(
                    f"a batch is {form(batch)}, but the captured batch was {form(fixed)}; use "
                    'node.cuda_graphs = "never", which accepts batches of any shape'
                )
            pairs.append((targets, values))
        for (targets, values), graph in zip(pairs, self._graphs, strict=True):
            with torch.cuda.device(targets[0].device):
                for target, value in zip(targets, values, strict=True):
                    target.copy_(value, non_blocking=True)
                graph.replay()
        values = torch.stack([self._value(index) for index in range(len(self._figures))])
        return values.view(self.rows, self.slots, -1)

    def _value(self, index: int) -> torch.Tensor:
        """Return the output of a graph on the CPU, which waits for its device."""
        try:
            return self._figures[index].cpu()
        # Errors of the device are raised here.
        except RuntimeError as error:
            where = self._figures[index].device
            error.add_note(f"in slot {index % self.slots} of this node, on {where}")
            raise


def recover_allocator(device: int, pool: tuple[int, int]) -> None:
    """Restore the CUDA allocator and random number generator after a failed capture.

    Up to torch 2.11, the allocator stays in capture mode. It then never frees memory that several
    streams have used, such as batches, and its next clean-up ends the process
    (github.com/pytorch/pytorch/pull/180395). The random number generator of the device would raise
    an error at its next use.

    :param device: index of the GPU
    :param pool: memory pool of the capture, from `torch.cuda.graph_pool_handle`
    """
    end = getattr(torch._C, "_cuda_endAllocateToPool", None)
    # The pool may have been ended already.
    with contextlib.suppress(RuntimeError):
        _ = end and end(device, pool)
    generator = torch.cuda.default_generators[device]
    if hasattr(generator, "clone_state"):
        generator.graphsafe_set_state(generator.clone_state())


@contextlib.contextmanager
def preserve_state(module: nn.Module, device: torch.device | str) -> Iterator[None]:
    """Return a context manager that restores a module's buffers and a device's random state."""
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    on_gpu = torch.device(device).type == "cuda"
    state = torch.cuda.get_rng_state(device) if on_gpu else torch.get_rng_state()
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in buffers:
                overwrite(buffer, value)
        if on_gpu:
            torch.cuda.set_rng_state(state, device)
        else:
            torch.set_rng_state(state)
