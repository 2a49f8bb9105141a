"""Detection of parameters that a program edits while their values are in flight."""

from collections.abc import Callable, Sequence

import torch

from mpigossip.config import JobError
from mpigossip.engine.module import ModuleParameters

FIRST = 20
"""Number of exchanges, from the first one on, in which all values are compared."""
EVERY = 50
"""Number of exchanges between two later ones in which all values are compared."""


IN_FLIGHT = (
    "parameters were changed between steps while they were being sent to "
    'neighbours; give Gossip overlap="never", or leave them alone'
)


class EditDetector:
    """Detector of edits between the moment when x is sent and the step that receives.

    The step replaces x by the average of what was sent, so that an edit between them would be lost.
    Edits under `torch.no_grad` raise torch's version counters, which are compared at each step.
    Edits through `.data` don't. They are found by comparing all values with those that were sent,
    in the first `FIRST` exchanges and in each `EVERY`-th later one. A program that edits in each
    step is therefore found in its first steps, and the other steps are as fast as before.
    """

    def __init__(self) -> None:
        self.in_flight = False
        """whether x is in flight"""
        self._edited = False
        self._message = IN_FLIGHT
        self._count = 0
        self._versions: list[int] = []
        self._sent: Sequence[torch.Tensor] = ()

    def begin(
        self,
        vector: ModuleParameters,
        sent: Callable[[], Sequence[torch.Tensor]],
        message: str = IN_FLIGHT,
    ) -> None:
        """Note what was sent; call this after an exchange has begun.

        :param sent: function that returns memory with the x that was sent, for each segment
        :param message: message of the error that :meth:`check` raises
        """
        if self._count < FIRST or self._count % EVERY == 0:
            self._sent = sent()
        self._message = message
        self._count += 1
        self.in_flight = True
        self.renew(vector)

    def renew(self, vector: ModuleParameters) -> None:
        """Note the version counters anew, after this package has written to parameters."""
        self._versions = vector.versions()

    def collect(self, vector: ModuleParameters) -> None:
        """Put all parameters into the vector, and remember whether they were edited in flight."""
        self._edited |= self.in_flight and self._versions != vector.versions()
        moved = vector.check()
        if not self.in_flight:
            vector.take_edits()
            return
        self._edited |= moved
        if self._sent and not self._edited:
            self._edited = vector.differ(self._sent)
        self.renew(vector)

    def check(self) -> None:
        """Raise JobError if parameters were edited in flight."""
        if self._edited:
            raise JobError(self._message)

    def end(self) -> None:
        """Forget the exchange: it is received, or given up."""
        self.in_flight = self._edited = False
        self._versions = []
        self._sent = ()
