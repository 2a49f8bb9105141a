"""Groups: the operations between the slots of one node."""
