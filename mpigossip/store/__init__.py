"""HDF5 files: checkpoints, logs, data sets. No MPI, no torch."""

from mpigossip.config.errors import UserError


class StoreError(UserError):
    """A file that can't be written or isn't what it should be; one paragraph with the remedy."""
