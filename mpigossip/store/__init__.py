"""HDF5 files: checkpoints, logs, data sets. No MPI, no torch."""

from mpigossip.config.errors import Mistake


class StoreError(Mistake):
    """A file that can't be written or isn't what it should be; one paragraph with the remedy."""
