"""Checkpoints, logs and data sets as HDF5 files. This package uses neither MPI nor torch."""

from mpigossip.config.errors import UserError


class StoreError(UserError):
    """User error about a file that cannot be read or written; its message contains a remedy."""
