"""The training loop and what it needs: data, models, learning rates, hooks."""
