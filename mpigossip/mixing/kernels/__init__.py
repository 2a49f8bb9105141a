"""Compiled and fused sums, waiting in C: accelerators, with the bits of torch's own way."""
