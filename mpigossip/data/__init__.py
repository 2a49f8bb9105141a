"""Data: sources of samples, their partition over nodes, and the loader of batches."""
