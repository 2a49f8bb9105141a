"""Process groups of torch between MPI ranks or their slots, for which no server has to be started.

The backend is NCCL on GPUs (NCCL has not been tested with more than one GPU) and gloo on CPUs.
"""

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from mpigossip.cluster.communicator import with_timeout
from mpigossip.cluster.deadline import LONGEST_S, SHORTEST_S, WaitTimeoutError
from mpigossip.cluster.world import World
from mpigossip.config.errors import Failure, JobError

REFUSED = {"CUDA_LAUNCH_BLOCKING": "1", "NCCL_LAUNCH_MODE": "GROUP"}
"""Variables with which NCCL calls of several threads wait for each other forever."""
ASYNC_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
"""Variable that sets whether the watchdog of torch ends the process at a time limit."""
launch_lock = threading.Lock()
"""Lock held while NCCL calls of several slots are launched.

The threads that copy or send take it for their CUDA calls, too: a thread that waits for a device
would otherwise wait for launches that wait for it.
"""
REMEDY = "run with NCCL_DEBUG=INFO to see the cause"


class GroupRank(NamedTuple):
    """Rank of a process group that one slot of this process takes, and the device of that slot."""

    group: str
    """Name that is equal on all ranks of the group and differs between groups of the same call."""
    rank: int
    """Rank in the group."""
    size: int
    """Number of ranks of the group."""
    device: str


def is_gpu(device: str) -> bool:
    """Return whether ``device`` is a GPU, for which process groups use NCCL."""
    return device.startswith("cuda")


def open_groups(
    world: World, group_ranks: Sequence[GroupRank], timeout_s: float
) -> list[dist.ProcessGroup]:
    """Open a process group for each entry of ``group_ranks``; collective over ``world``.

    One thread per group connects it. The ranks exchange by MPI the keys that torch would fetch from
    a rendezvous server. Afterwards, only one thread may use a group, and the device of its entry
    must be current in that thread.

    :param world: ranks that open groups
    :param group_ranks: this process's rank in each of its groups
    :param timeout_s: seconds that connecting may take; a call on a group ends after at most twice
        that time
    :return: groups in the order of ``group_ranks``
    :raises JobError: on all ranks, if an environment variable makes NCCL hang
    :raises WaitTimeoutError: on all ranks, if a group is not connected within the time limit
    :raises Failure: on all ranks, if opening a group fails; the message names the group and rank
    """
    check_environment(world, group_ranks)
    if any(is_gpu(group_rank.device) for group_rank in group_ranks):
        with contextlib.suppress(Exception):  # without NCCL, the threads report the error
            # This loads the library, which is not safe in several threads at once.
            torch.cuda.nccl.version()
    # The store has the keys of this process; MPI adds the keys of other ranks.
    store = dist.HashStore()
    results = dict[int, Any]()
    store.set_timeout(timedelta(seconds=timeout_s))

    def connect(index: int) -> None:
        try:
            results[index] = _connected(store, group_ranks[index], timedelta(seconds=2 * timeout_s))
        except BaseException as error:  # noqa: BLE001 - reported by all ranks
            results[index] = error

    with _without_watchdog():
        for index in range(len(group_ranks)):
            threading.Thread(target=connect, args=(index,), daemon=True).start()
        try:
            _share_keys(world, store, group_ranks, results, timeout_s)
        except Failure:
            opened = {
                index: result
                for index, result in [*results.items()]
                if isinstance(result, dist.ProcessGroup)
            }
            with contextlib.suppress(RuntimeError):  # the first failure is more informative
                close_groups(
                    [*opened.values()], [group_ranks[index].device for index in opened], True
                )
            raise
    return [results[index] for index in range(len(group_ranks))]


def start_transfers(
    group: Any,
    device: torch.device,
    sent: Sequence[tuple[int, torch.Tensor]],
    received: Sequence[tuple[int, torch.Tensor]],
) -> list[Any]:
    """Start the sends and receives of a slot, with NCCL as one group of calls.

    :param group: process group of the slot
    :param device: device of the slot
    :param sent: pairs (rank, array) to send
    :param received: pairs (rank, array), where the array is the memory for the received one
    :return: torch's work objects
    """
    if device.type == "cpu":  # gloo has no groups of calls
        works = [group.recv([memory], j, 0) for j, memory in received]
        return works + [group.send([memory], j, 0) for j, memory in sent]
    group._start_coalescing(device)
    for j, memory in received:
        group.recv([memory], j, 0)
    for j, memory in sent:
        group.send([memory], j, 0)
    return [group._end_coalescing(device)]


def close_groups(
    groups: Sequence[dist.ProcessGroup], devices: Sequence[str], broken: bool = False
) -> None:
    """Release the NCCL communicators of ``groups``; do nothing for groups of CPUs.

    :param groups: process groups to close
    :param devices: device of each group
    :param broken: whether to abort the operations of the groups instead of waiting for them
    """
    for group, device in zip(groups, devices, strict=True):
        if is_gpu(device):
            backend: Any = group._get_backend(torch.device(device))
            _ = backend.abort() if broken else backend.shutdown()


def check_environment(world: World, group_ranks: Sequence[GroupRank]) -> None:
    """Check that no environment variable makes NCCL hang; collective over ``world``.

    :param world: ranks that open groups
    :param group_ranks: this process's rank in each of its groups; without a GPU among their
        devices, its variables are not checked
    :raises JobError: on all ranks, if some rank has such a variable
    """
    with world.raise_together(JobError):
        refused = [name for name, value in REFUSED.items() if os.environ.get(name) == value]
        if refused and any(is_gpu(group_rank.device) for group_rank in group_ranks):
            raise JobError(
                f"{name}={REFUSED[name]}: NCCL calls of several slots would wait for each other "
                f"without end; unset {name}"
                for name in refused
            )


def node_group(world: World, backend: str | None, timeout_s: float) -> dist.ProcessGroup:
    """Return the torch process group of this rank's node; collective over ``world``.

    If the program has not initialized torch.distributed, initialize it; the group is then destroyed
    when ``world`` closes. If the program has initialized it, return its world, or a new group if
    ``backend`` is another backend.

    :param world: all ranks; local ranks become ranks of torch.distributed
    :param backend: "nccl" or "gloo"; None: "nccl" if there are GPUs, otherwise "gloo"
    :param timeout_s: timeout of the process group in seconds
    :raises JobError: on all ranks, if torch.distributed was initialized with other ranks than the
        node's
    :raises WaitTimeoutError: if some rank does not call this in time
    """
    node = world.nodes.intra_node
    backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    rank, size = (0, 1) if node is None else (node.rank, node.size)
    limit = timedelta(seconds=timeout_s)
    if dist.is_initialized():
        with world.raise_together(JobError):
            if (dist.get_rank(), dist.get_world_size()) != (rank, size):
                raise JobError(
                    f"torch.distributed was initialized with {dist.get_world_size()} ranks (here "
                    f"rank {dist.get_rank()}), but must have the ranks of this node only (here "
                    f"rank {rank} of {size}): call world.node_group() instead of "
                    "init_process_group()"
                )
        same = dist.get_backend() == backend
        return dist.group.WORLD if same else dist.new_group(timeout=limit, backend=backend)
    store = None
    port = 0
    if rank == 0:  # at the loopback address, because only ranks of this host connect
        store = dist.TCPStore("127.0.0.1", 0, size, True, limit, wait_for_workers=False)
        port = store.port
    port = port if node is None else node.broadcast(port)
    store = store or dist.TCPStore("127.0.0.1", port, size, False, limit)
    # NCCL, FSDP2 and DDP use the current device, which is GPU 0 on all ranks unless it is set.
    device = world.device() if backend == "nccl" else None
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=size, timeout=limit, device_id=device
    )
    # Destroy it before the world closes, because the ranks need MPI to do so together.
    world.resources.callback(lambda: dist.is_initialized() and dist.destroy_process_group())
    # gloo does not wait here for all ranks: without a barrier, a rank that destroys its group early
    # would disconnect ranks that are still connecting.
    if node is not None:
        node.barrier()
    return dist.group.WORLD


@contextlib.contextmanager
def _without_watchdog() -> Iterator[None]:
    """Return a context manager in which torch opens groups without a watchdog.

    The watchdog would end the process if a call on a group reaches its timeout.
    """
    before = os.environ.get(ASYNC_ERRORS)
    os.environ[ASYNC_ERRORS] = "0"
    try:
        yield
    finally:
        del os.environ[ASYNC_ERRORS]
        if before is not None:
            os.environ[ASYNC_ERRORS] = before


def _connected(store: dist.Store, group_rank: GroupRank, limit: timedelta) -> dist.ProcessGroup:
    """Open one process group.

    Only this function uses constructors of torch that change from version to version.

    :param store: key-value store of this process, to which :func:`_share_keys` adds the keys of the
        other ranks
    :param group_rank: rank of this process in the group
    :param limit: time limit of a call on the group, as a timedelta
    """
    device = torch.device(group_rank.device)
    backend_types = dist.ProcessGroup.BackendType
    prefixed = dist.PrefixStore(group_rank.group, store)
    backend: Any
    if is_gpu(group_rank.device):
        torch.cuda.set_device(device)
        # priority over computation, because a slot that waits for a sum delays the others
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = limit
        options.group_name = group_rank.group
        options.global_ranks_in_group = list(range(group_rank.size))
        backend = dist.ProcessGroupNCCL(prefixed, group_rank.rank, group_rank.size, options)
        # Connect now: a connection made at the first message joins two ranks only, and a mismatch
        # hangs.
        backend.eager_connect_single_device(device)
    else:
        backend = dist.ProcessGroupGloo(prefixed, group_rank.rank, group_rank.size, limit)
    backend_type = backend_types.NCCL if is_gpu(group_rank.device) else backend_types.GLOO
    group = dist.ProcessGroup(prefixed, group_rank.rank, group_rank.size)
    group._register_backend(device, backend_type, backend)
    group._set_default_backend(backend_type)
    return group


def _share_keys(
    world: World,
    store: Any,
    group_ranks: Sequence[GroupRank],
    results: dict[int, Any],
    timeout_s: float,
) -> None:
    """Exchange keys between all ranks until every group is connected; collective.

    :param world: ranks that open groups
    :param store: key-value store of this process, whose keys are sent to all ranks
    :param group_ranks: this process's rank in each of its groups
    :param results: results of the connecting threads so far, by index in ``group_ranks``
    :param timeout_s: time limit in seconds
    :raises WaitTimeoutError: on all ranks, if a group is not connected within the time limit
    :raises Failure: on all ranks, if opening a group fails
    """
    comm = None if world.comm is None else with_timeout(world.comm, timeout_s)
    shared: set[str] = set()
    until = time.monotonic() + timeout_s
    pause = SHORTEST_S
    while True:
        keys = {key: store.get(key) for key in store.list_keys() if key not in shared}
        failed = [
            _describe(group_ranks[k], e)
            for k, e in [*results.items()]
            if isinstance(e, BaseException)
        ]
        pending = [
            _describe(group_rank) for k, group_rank in enumerate(group_ranks) if k not in results
        ]
        local_report = keys, failed, pending, time.monotonic() > until
        reports = [local_report] if comm is None else comm.allgather(local_report)
        for key, value in (item for new_keys, *_ in reports for item in new_keys.items()):
            if key not in keys:
                store.set(key, value)
            shared.add(key)
        failures = [text for _, texts, *_ in reports for text in texts]
        missing = [text for *_, names, _ in reports for text in names]
        if failures:
            more = f"; {len(failures) - 1} more" if len(failures) > 1 else ""
            raise Failure(f"{failures[0]}{more}; {REMEDY}")
        if not missing:
            return
        if any(late for *_, late in reports):
            raise WaitTimeoutError(
                f"some process groups are not connected: {', '.join(missing[:4])} (waited "
                f"{timeout_s:g} s): check the network between these ranks"
            )
        time.sleep(pause)
        pause = min(20 * LONGEST_S, 1.5 * pause)


def _describe(member: GroupRank, error: BaseException | None = None) -> str:
    text = f"process group {member.group}, rank {member.rank} of {member.size} on {member.device}"
    return f"{text}: {str(error).splitlines()[0] or type(error).__name__}" if error else text
