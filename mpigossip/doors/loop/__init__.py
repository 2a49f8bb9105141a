"""A user's own loop with a folder: the run, and what its checkpoints hold."""
