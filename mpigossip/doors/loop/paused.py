"""A rank of a user's loop works on something else, while its neighbours wait or go on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from mpigossip.cluster import deadline
from mpigossip.config import JobError
from mpigossip.doors.inner import rate
from mpigossip.doors.node import Node
from mpigossip.runs.run import IDLE_S


@contextmanager
def paused(node: Node) -> Iterator[None]:
    """Inside, waits for this rank have no limit; asynchronous nodes go on exchanging in a thread.

    The model is as it was before, until the block ends. Not collective. An MPI that doesn't let
    threads call it leaves an asynchronous node silent, as a step that takes long does. Where a node
    has several ranks, DDP between them waits for ``timeout_s`` of its process group all the same.
    """
    if node.serving:  # inside another
        yield
        return
    serves = node.laid_out and not node.mixer.synchronous and getattr(node.mixer, "threaded", False)
    if serves and node.looking:
        raise JobError(
            ["paused() inside averaged(): an asynchronous node would go on exchanging, with the "
             "average for its own model; evaluate a copy of it (copy.deepcopy) behind averaged()"]
        )  # fmt: skip
    with deadline.paused(), node.engine.clock.uncounted() if node.laid_out else nullcontext():
        if not serves:
            yield
            return
        with node.vector.set_aside(), _serving(node):
            yield
        with torch.no_grad():
            node.publish()


@contextmanager
def _serving(node: Node) -> Iterator[None]:
    done, failed = threading.Event(), list[BaseException]()
    node.vector.gather()  # its memory is there

    def serve() -> None:
        try:
            with torch.no_grad():
                while not done.wait(IDLE_S):
                    node.engine.average(rate(node.inner)[0])
        except BaseException as error:  # noqa: BLE001 - raised by who waits for it
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
