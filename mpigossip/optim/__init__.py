"""Ways in to the engine for a user's own program."""
