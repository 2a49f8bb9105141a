"""Sums in C and on GPUs, waiting in C: accelerators, with the bits of torch's own way."""
