"""Detection of parameters that a program edits while their values are in flight."""

from collections.abc import Callable, Sequence

import torch

from mpigossip.config import JobError
from mpigossip.engine.module import ModuleParameters

FIRST = 20
"""Number of exchanges at the start in which all values are compared."""
EVERY = 50
"""Period, in exchanges, of later comparisons of all values."""


IN_FLIGHT = (
    "parameters were changed between two steps, while they were being sent to neighbours: "
    'do not change them there, or pass Gossip(…, overlap="never")'
)
"""Message of the error that an edit raises by default."""


class EditDetector:
    """Detector of edits between the time at which x is sent and the step that receives messages.

    The step replaces x by the average of the models that were sent, so that an edit would be lost.
    Edits under `torch.no_grad` increment torch's version counters, which are compared at each step.
    Edits through `.data` do not. They are detected by comparing all values with those that were
    sent, in the first `FIRST` exchanges and in every `EVERY`-th later one. Edits that a program
    makes in each step are therefore detected in its first steps, and most steps compare no values.

    The detector is also used between two steps of an algorithm that overwrites the parameters with
    a model in its state.
    """

    def __init__(self) -> None:
        self.in_flight = False
        """True from :meth:`begin` to :meth:`end`, when a program must not change parameters."""
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
        """Store what was sent; call this after an exchange has begun.

        :param vector: flat parameters of the model
        :param sent: function that returns, for each segment, an array with the x that was sent. It
            is called only if all values will be compared
        :param message: message of the error that :meth:`check` raises
        """
        if self._count < FIRST or self._count % EVERY == 0:
            self._sent = sent()
        self._message = message
        self._count += 1
        self.in_flight = True
        self.renew(vector)

    def renew(self, vector: ModuleParameters) -> None:
        """Store the present version counters, after this package has written to parameters."""
        self._versions = vector.versions()

    def collect(self, vector: ModuleParameters) -> None:
        """Move all parameters to the flat memory, and record whether they were edited in flight.

        If nothing is in flight, edits of 16-bit parameters are copied to their master weights.

        :param vector: flat parameters of the model
        :raises JobError: if a parameter or its module was replaced or converted
        """
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
        """Stop the detection, because the exchange was received or discarded."""
        self.in_flight = self._edited = False
        self._versions = []
        self._sent = ()
