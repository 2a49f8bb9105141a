"""Graphs as arrays: fixed rounds, and a graph whose rounds are drawn from a seed."""

import numpy as np

A = np.array([[0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [0.0, 0.0, 1.0]])
B = np.array([[1.0, 0.0, 0.0], [0.0, 0.5, 0.5], [0.0, 0.5, 0.5]])


def drawn(n, seed, t, scale=1):
    """Return a round in which each node has one peer: its successor or predecessor in the ring."""
    sign = 1 if np.random.default_rng((seed, t)).random() < 0.5 else -1
    shifted = np.roll(np.eye(n), sign * scale, axis=1)
    return (np.eye(n) + shifted) / 2
