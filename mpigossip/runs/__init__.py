"""A run from beginning to end: start, steps, files, stops, losses, what a person sees."""
