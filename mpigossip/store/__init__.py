"""HDF5 files: checkpoints, logs and data sets. This package uses neither MPI nor torch."""

from mpigossip.config.errors import UserError


class StoreError(UserError):
    """User error about a file that cannot be written or has invalid content, with a remedy."""
