"""CUDA streams of a slot: one for copies from its device, one for copies to it and for sums."""

import contextlib
from collections.abc import Iterator

import torch

from mpigossip.cluster.process_groups import launch_lock
from mpigossip.mixing.device.memory import device_context


def _behind(stream: torch.cuda.Stream | None) -> torch.cuda.Event | None:
    """Return an event that is complete after all work launched on ``stream`` so far.

    Return None if ``stream`` is None, because there is nothing to wait for then.
    """
    if stream is None:
        return None
    event = torch.cuda.Event(blocking=True)
    stream.record_event(event)
    return event


class Streams:
    """Streams of one slot: ``out`` for copies from its device, ``into`` for copies to it and sums.

    On the CPU, both are None, because all work is done before a call returns.
    """

    def __init__(self, device: torch.device):
        self.device = device
        gpu = device.type == "cuda"
        self.out = torch.cuda.Stream(device) if gpu else None
        self.into = torch.cuda.Stream(device) if gpu else None
        self._reader: torch.cuda.Stream | None = None
        """Stream that was current when the last result was returned, and that reads it."""

    def record_reader(self) -> None:
        """Record the current stream as the reader of the result of this round."""
        if self.out is not None:
            self._reader = torch.cuda.current_stream(self.device)

    def ready(self) -> torch.cuda.Event | None:
        """Return an event that is complete after all work that the slot has launched so far.

        It is None on the CPU. Slots launch on the default stream. A user's own loop may fill the
        outbox on another stream, and may have read the last result on a third one.
        """
        if self.out is None:
            return None
        stream = torch.cuda.current_stream(self.device)
        for other in (torch.cuda.default_stream(self.device), self._reader):
            if other is not None and other != stream:
                stream.wait_stream(other)
        event = torch.cuda.Event(blocking=True)
        event.record(stream)
        return event

    def follow(self, event: torch.cuda.Event | None) -> None:
        """Make ``out`` and ``into`` wait for the event; None, as on the CPU: do nothing."""
        for stream in (self.out, self.into) if event else ():
            stream.wait_event(event)

    def copied_out(self) -> torch.cuda.Event | None:
        """Return an event that is complete after all copies from the device launched so far.

        It is None on the CPU.
        """
        return _behind(self.out)

    def drain(self) -> None:
        """Wait until all received data is summed."""
        if (event := _behind(self.into)) is not None:
            event.synchronize()

    @contextlib.contextmanager
    def incoming(self) -> Iterator[None]:
        """Return a context in which work is launched on the stream of incoming copies and sums.

        It makes the slot's device current and holds the lock that orders NCCL launches.
        """
        with launch_lock, device_context(self.device), torch.cuda.stream(self.into):
            yield

    @contextlib.contextmanager
    def outgoing(self) -> Iterator[None]:
        """Return a context in which work is launched on the stream of copies from the device.

        It makes the slot's device current and holds the lock that orders NCCL launches.
        """
        with launch_lock, device_context(self.device), torch.cuda.stream(self.out):
            yield
