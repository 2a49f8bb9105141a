"""CUDA streams for copies from a slot's device, and for copies to it and sums."""

import contextlib
from collections.abc import Iterator

import torch

from mpigossip.cluster.process_groups import launch_lock
from mpigossip.mixing.device.memory import device_context


def _behind(stream: torch.cuda.Stream | None) -> torch.cuda.Event | None:
    """Return an event after all work that a stream was given so far; None without a stream."""
    if stream is None:
        return None
    event = torch.cuda.Event(blocking=True)
    stream.record_event(event)
    return event


class Streams:
    """Streams of one slot; on the CPU, all work is done at once and there is no stream."""

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
        """Return an event after all work that the slot itself has launched so far.

        Slots launch on the default stream. A user's own loop may fill the outbox on another stream,
        and may have read the last result on a third one.
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
        """Make both streams wait for the event."""
        for stream in (self.out, self.into) if event else ():
            stream.wait_event(event)

    def copied_out(self) -> torch.cuda.Event | None:
        """Return an event after the copies from the device."""
        return _behind(self.out)

    def drain(self) -> None:
        """Wait until all received data is summed."""
        if (event := _behind(self.into)) is not None:
            event.synchronize()

    @contextlib.contextmanager
    def incoming(self) -> Iterator[None]:
        """Return a context that launches on the stream of copies to the device and sums.

        It makes the slot's device current and holds the lock that orders NCCL launches.
        """
        with launch_lock, device_context(self.device), torch.cuda.stream(self.into):
            yield

    @contextlib.contextmanager
    def outgoing(self) -> Iterator[None]:
        """Return a context that launches on the stream of copies from the device."""
        with launch_lock, device_context(self.device), torch.cuda.stream(self.out):
            yield
