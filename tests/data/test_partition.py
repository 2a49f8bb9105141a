"""Sample orders of nodes are identical whether they are drawn together or one by one."""

import numpy as np

from mpigossip.data.partition import draw_together, orders
from mpigossip.data.philox import ORDER, permutation, permutations


def test_permutations_drawn_together_equal_single_draws():
    lengths = [1, 7, 7, 30]
    blocks = [3, 0, 9, 2]
    drawn = permutations(lengths, 5, ORDER, 4, blocks)
    for length, block, permuted in zip(lengths, blocks, drawn, strict=True):
        assert (permuted == permutation(length, 5, ORDER, 4, block)).all()


def test_orders_use_the_permutation_of_the_epoch_of_a_step():
    parts = np.array_split(np.arange(50), 4)
    separate = orders(parts, 3, 4)
    joined = orders(parts, 3, 4)
    for step in (0, 1, 2, 3, 11, 2):
        draw_together(joined, joined[0].epoch(step))
        assert all(order.latest[0] == order.epoch(step) for order in joined)
        for one, other in zip(separate, joined, strict=True):
            assert (one.batch_indices(step) == other.batch_indices(step)).all()
