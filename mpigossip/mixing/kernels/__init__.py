"""Optional code in C and CUDA for sums and waits; sums are bitwise identical to torch's."""
