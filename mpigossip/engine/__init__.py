"""Step of training from a gradient: clock, cadence, send, exchange, receive."""
