"""Optional code in C and CUDA for sums, random numbers and waits; it changes no bit of a result."""
