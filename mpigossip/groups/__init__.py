"""Groups: what happens inside a node, between its slots."""
