"""Where samples come from, which node has which, and how they reach the slots."""
