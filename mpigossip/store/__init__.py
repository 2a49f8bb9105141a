"""HDF5 on disk: checkpoints and logs. Nothing here knows MPI or torch."""


class StoreError(ValueError):
    """A file that can't be written or isn't what it should be; one paragraph with the remedy."""
