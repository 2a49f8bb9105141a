"""Training step of the local nodes, from their gradients to the averaged parameters."""
