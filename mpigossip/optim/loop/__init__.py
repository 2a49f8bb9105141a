"""What a user's own loop may have of a job's: its run, its checkpoints, survival of lost ranks."""
