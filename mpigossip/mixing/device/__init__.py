"""Mixing of vectors on GPUs: file names as on the CPU's side where the part is the same."""
