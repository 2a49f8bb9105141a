"""Exact averages over all ranks, and the base class of mixers between ranks, which computes them.

The arrays are summed in rank order, so that the average is bitwise identical on all ranks.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from mpi4py import MPI

from mpigossip.cluster.process import check_process
from mpigossip.cluster.world import World
from mpigossip.mixing.base import MessageArrays, MessageLayout, Mixer
from mpigossip.mixing.combine import sum_messages, weighted_sum
from mpigossip.mixing.device.memory import device_context
from mpigossip.mixing.notifications import all_ranks, called, keep_alive, wait_all

AVERAGE = 21
"""Tag of the messages."""
CUT = 1 << 30
"""Largest number of bytes of one MPI call, because many MPIs count elements in 32 bits."""
SHARE = 1 << 18
"""Number of elements that a rank sums at once in an exact average over n ranks. The memory for
received messages holds n times this number."""
STAGING = 1 << 22
"""Number of elements of a GPU's array that are copied to the host at once. The two arrays on the
host are pinned, so that copies do not pass through pageable memory."""

Arrays = Sequence[torch.Tensor]
Chunks = Sequence[Sequence[torch.Tensor]]
"""For each slot, a piece of its array, divided into one chunk for each rank: rank r sums chunk r.
If the piece is short, it may have fewer chunks than there are ranks, because `torch.chunk` returns
no empty ones; the last ranks then sum nothing."""
ByRank = dict[tuple[int, int], torch.Tensor]
"""Contiguous arrays to send to, or to receive from, other ranks. The key is the other rank and the
slot."""
Swap = Callable[[ByRank, ByRank], float]
"""Function that sends arrays to other ranks, receives theirs and returns the seconds waited."""


def average(
    rank: int,
    weights: Sequence[float],
    own: Arrays,
    out: Arrays,
    swap: Swap,
    *,
    share: int = SHARE,
    inboxes: Arrays | None = None,
    on: Callable[[int], AbstractContextManager] = nullcontext,
) -> float:
    """Compute ``out = Σ_j weights[j] · own_j`` over n ranks in rank order; return seconds waited.

    The arrays are averaged piece by piece. A piece takes a reduce-scatter, in which rank r sums
    chunk r in rank order, and an all-gather. Each rank sends about 2(n − 1)/n times the size of
    ``own``, and the result is bitwise identical on all ranks.

    :param rank: number of this rank
    :param weights: weight of each of the n ranks; 1/n for the mean
    :param own: for each slot, a contiguous array (p,) of this rank; all have the same dtype
    :param out: for each slot, a contiguous array (p,) for the average
    :param swap: function that sends arrays to other ranks and receives theirs
    :param share: number of elements that a rank sums at once
    :param inboxes: for each slot, an array of n · ``share`` elements on its device, into which
        other ranks may write; None: new arrays on the CPU
    :param on: function that is called with the index of a slot and returns the context in which
        the sums of this slot are launched
    """
    waited = 0.0
    n = len(weights)
    count = own[0].numel()
    limit = max(1, min(share, -(-count // n)))
    inboxes = inboxes or [torch.empty(n * limit, dtype=array.dtype) for array in own]
    inboxes = [inbox[: n * limit].view(n, limit) for inbox in inboxes]
    for begin in range(0, count, n * limit):
        piece = slice(begin, begin + n * limit)
        own_chunks = [array[piece].chunk(n) for array in own]
        out_chunks = [array[piece].chunk(n) for array in out]
        waited += _reduce_scatter(rank, weights, own_chunks, out_chunks, inboxes, swap, on)
        waited += _all_gather(rank, n, out_chunks, swap)
    return waited


def _reduce_scatter(
    rank: int,
    weights: Sequence[float],
    own: Chunks,
    out: Chunks,
    inboxes: Arrays,
    swap: Swap,
    on: Callable[[int], AbstractContextManager],
) -> float:
    """Average the chunk with the index ``rank`` over all ranks; return the seconds waited.

    The average is written to the same chunk of ``out``. A rank without a chunk only sends.
    ``inboxes`` holds for each slot an array (n, elements) for the chunks of the other ranks.
    :func:`average` describes the other parameters.
    """
    n = len(weights)
    summed = range(len(own[0]))
    sent = {(j, s): chunks[j] for s, chunks in enumerate(own) for j in summed if j != rank}
    if rank not in summed:
        return swap(sent, {})
    width = own[0][rank].numel()
    rows = [inbox[:, :width].split(1) for inbox in inboxes]
    received = {(j, s): rows[s][j][0] for s in range(len(own)) for j in range(n) if j != rank}
    waited = swap(sent, received)
    for s, terms in enumerate(rows):
        own_row = own[s][rank].unsqueeze(0)
        in_order = [*terms[:rank], own_row, *terms[rank + 1 :]]
        with on(s):
            weighted_sum(weights, in_order, out[s][rank].unsqueeze(0))
    return waited


def _all_gather(rank: int, n: int, out: Chunks, swap: Swap) -> float:
    """Send the chunk with the index ``rank`` to all ranks; return the seconds waited.

    The chunks of the other ranks are received in their positions in ``out``. :func:`average`
    describes the other parameters.
    """
    summed = range(len(out[0]))
    slots = range(len(out))
    sent = {}
    if rank in summed:
        sent = {(j, s): out[s][rank] for s in slots for j in range(n) if j != rank}
    return swap(sent, {(j, s): out[s][j] for s in slots for j in summed if j != rank})


def average_message(
    layout: MessageLayout,
    rank: int,
    weights: Sequence[float],
    message: Arrays,
    result: Arrays,
    swap: Swap,
) -> float:
    """Average messages in host memory exactly over all ranks; return the seconds waited.

    :param layout: layout of the messages
    :param rank: number of this rank
    :param weights: weight of each rank
    :param message: for each slot, the bytes of this rank's message, uint8
    :param result: for each slot, the memory of the average, uint8
    :param swap: function that sends arrays to other ranks and receives theirs
    """
    waited = 0.0
    for dtype, part in layout.slot_parts:
        own, out = ([array[part].view(dtype) for array in arrays] for arrays in (message, result))
        waited += average(rank, weights, own, out, swap)
    return waited


def average_encoded(
    layout: MessageLayout,
    rank: int,
    weights: Sequence[float],
    own: Arrays,
    all_encoded: Arrays,
    out: MessageArrays,
    result: MessageArrays,
    swap: Swap,
    on: Callable[[int], AbstractContextManager] = nullcontext,
) -> float:
    """Average encoded messages exactly; return the seconds waited.

    Each rank sends its encoded message to all others and sums the messages of all ranks.

    :param layout: layout of the messages
    :param rank: number of this rank
    :param weights: weight of each rank
    :param own: for each slot, the encoded message of this rank, uint8
    :param all_encoded: for each slot, an array (n, bytes) that receives the message of each rank;
        the row of this rank is not used
    :param out: values to which the message of this rank decodes
    :param result: arrays for the average
    :param swap: function that sends arrays to other ranks and receives theirs
    :param on: function that is called with the index of a slot and returns the context in which
        the sums of this slot are launched
    """
    n = len(all_encoded[0])
    keys = [(j, s) for s in range(len(own)) for j in range(n) if j != rank]
    waited = swap({(j, s): own[s] for j, s in keys}, {(j, s): all_encoded[s][j] for j, s in keys})
    for s, encoded in enumerate(all_encoded):
        sources = [out[s] if j == rank else encoded[j] for j in range(n)]
        with on(s):
            sum_messages(layout, weights, sources, result[s], layout.fields)
    return waited


def raw(memory: torch.Tensor) -> MPI.buffer:
    """Return the bytes of a contiguous array, on any device, as a buffer for MPI calls."""
    return MPI.buffer.fromaddress(memory.data_ptr(), memory.numel() * memory.element_size())


def swap_by_messages(
    comm: MPI.Comm, timeout_s: float, out: ByRank, into: ByRank, what: str = "global average"
) -> float:
    """Send arrays to other ranks and receive theirs by MPI messages; return the seconds waited.

    :param comm: communicator of the ranks
    :param timeout_s: time limit of each wait, in seconds
    :param out: arrays to send
    :param into: arrays to receive into
    :param what: description of the exchange, which begins error messages
    :raises WaitTimeoutError: if a rank does not answer within the time limit
    """

    def late(key: tuple[int, int, int]) -> str:
        return f"{what}: {called(comm, key[0])} doesn't answer"

    def begin(call: Callable, memory: torch.Tensor, rank: int) -> MPI.Request:
        with device_context(memory.device):
            return call(raw(memory), rank, AVERAGE)

    def begun(call: Callable, arrays: ByRank) -> dict[tuple[int, int, int], MPI.Request]:
        return {
            (*key, k): begin(call, part, key[0])
            for key, memory in arrays.items()
            for k, part in enumerate(memory.view(torch.uint8).split(CUT))
        }

    received = begun(comm.Irecv, into)
    sent = begun(comm.Isend, out)
    try:
        waited = wait_all(received, timeout_s, late, comm=comm)
        return waited + wait_all(sent, timeout_s, late, comm=comm)
    except BaseException:
        keep_alive.append((out, into))  # MPI may still write to these arrays
        raise


class RankMixer(Mixer):
    """Base class of the mixers between MPI ranks, in which rank i is node i.

    It computes exact averages. A wait for another rank raises WaitTimeoutError at the time limit.
    In a fork, :meth:`outbox` and exact averages raise JobError.
    """

    def __init__(self, graph, layout: MessageLayout, world: World, timeout_s: float):
        """Duplicate the communicator; collective over ``world``.

        :param graph: graph of ``world.size`` nodes
        :param layout: layout of a node's message
        :param world: world whose rank i is node i
        :param timeout_s: time limit of each wait for other ranks, in seconds
        :raises ValueError: if the graph does not have ``world.size`` nodes, or if the vectors of a
            message with scalars are not a multiple of 8 bytes
        """
        if graph.n != world.size:
            raise ValueError(
                f"graph: has {graph.n} nodes, but the world has {world.size} ranks: build a graph "
                f"of {world.size} nodes"
            )
        odd = [w for w in layout.widths if layout.dtype.itemsize * layout.vectors * w % 8]
        if layout.scalars and odd:
            raise ValueError(
                f"{layout.vectors} vectors of {odd[0]} elements of {layout.dtype} do not have a "
                "multiple of 8 bytes, which the float64 scalars after them require: pad the "
                "vectors to an even width"
            )
        super().__init__(graph, layout, range(world.rank, world.rank + 1))
        self.rank = world.rank
        self._equal_weights = [1 / self.n] * self.n
        self._comm = world.duplicate()
        self._timeout_s = timeout_s
        self._comm.timeout_s = timeout_s
        self._swap = partial(swap_by_messages, self._comm, timeout_s)

    def mean(self, x: torch.Tensor) -> torch.Tensor:
        check_process()
        if x.is_cuda:
            return self._mean_through_host(x[0].contiguous())
        own = x[0].contiguous()
        out = torch.empty_like(own)
        average(self.rank, self._equal_weights, [own], [out], self._swap)
        return out

    def _mean_through_host(self, own: torch.Tensor) -> torch.Tensor:
        """Average an array on a GPU, piece by piece, through two pinned arrays on the host."""
        out = torch.empty_like(own)
        size = min(STAGING, max(1, own.numel()))
        sent, received = (torch.empty(size, dtype=own.dtype).pin_memory() for _ in range(2))
        stream = torch.cuda.current_stream(own.device)
        for begin in range(0, own.numel(), size):
            piece = slice(begin, min(begin + size, own.numel()))
            count = piece.stop - piece.start
            sent[:count].copy_(own[piece], non_blocking=True)
            stream.synchronize()  # This also ends the copy of the last piece from ``received``.
            average(self.rank, self._equal_weights, [sent[:count]], [received[:count]], self._swap)
            out[piece].copy_(received[:count], non_blocking=True)
        stream.synchronize()
        return out

    def mean_scalars(self, values: torch.Tensor) -> torch.Tensor:
        check_process()
        own = values.contiguous().cpu()
        rows = torch.empty(self.n, own.shape[1], dtype=own.dtype)
        request = self._comm.Iallgather(own.numpy(), rows.numpy())
        message = "average of scalars: a rank is late"
        wait_all({0: request}, self._timeout_s, lambda _: message, all_ranks)
        return weighted_sum(self._equal_weights, list(rows.split(1)), torch.empty_like(own))[0]
