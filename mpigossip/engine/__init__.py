"""A step from a gradient: clock, cadence, send, exchange, receive."""
