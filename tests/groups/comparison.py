"""Comparison of the collectives of slots in processes with slots in threads."""

import torch

from mpigossip.groups.base import Single, Unsharded, local_shards, shard_views
from mpigossip.groups.threads import ThreadGroup

RIGHT = {"scatter": 0, "gather": 0, "sum": 0, "first": 0, "mean": 0}
"""Result of :func:`count_differences` if all calls are bitwise identical."""


def draw_arrays(slots, rows, size, step):
    """Return an array of ``rows`` rows for each slot, which depends on the step."""
    draw = torch.Generator().manual_seed(step)
    return [torch.randn(rows, size, generator=draw) for _ in range(slots)]


def host_group(slots):
    """Return the group whose slots are threads of this process."""
    return Single() if slots == 1 else ThreadGroup(slots)


def count_differences(group, size, rows, steps=3, rest=lambda: None):
    """Compare a group with slots in threads; return the number of different results by call."""
    slots = group.slots
    local_slots = group.local_slots
    wrong = dict(RIGHT)
    reference = host_group(slots)
    grads = group.zeros(rows, size)
    full = group.zeros(rows, size)
    x = shard_views(full, slots, local_shards(group))
    whole = [torch.zeros(rows, size) for _ in range(slots)]
    for step in range(steps):
        given = draw_arrays(slots, rows, size, step)
        for k, slot in enumerate(local_slots):
            grads[k].copy_(given[slot])
            rest()
        result = group.reduce_scatter_mean(grads)
        expected = reference.reduce_scatter_mean(given)
        for k, slot in enumerate(local_slots):
            wrong["scatter"] += not torch.equal(result[k], expected[slot])
            x[k].add_(result[k])
        for slot in range(slots):
            shard_views(whole)[slot].add_(expected[slot])
        rest()
        group.all_gather(x, full)
        reference.all_gather(shard_views(whole), whole)
        wrong["gather"] += not all(torch.equal(row, whole[0]) for row in full)
        scalars = [t[:, :300].double() for t in draw_arrays(slots, rows, 512, 100 + step)]
        total = group.sum_scalars([scalars[slot] for slot in local_slots])
        wrong["sum"] += not torch.equal(total, reference.sum_scalars(scalars))
        parts = group.to_first([x[k] for k in range(len(local_slots))])
        wrong["first"] += (parts is None) != (local_slots.start > 0)
        wrong["first"] += parts is not None and not torch.equal(torch.cat(parts, dim=1), whole[0])
        given = draw_arrays(slots, rows, size, 200 + step)
        for k, slot in enumerate(local_slots):
            grads[k].copy_(given[slot])
        (mean,) = Unsharded(reference).reduce_scatter_mean(given)
        (result,) = Unsharded(group).reduce_scatter_mean(grads)
        wrong["mean"] += not torch.equal(result, mean)
        group.broadcast(grads)
        wrong["mean"] += not all(torch.equal(grad, mean) for grad in grads)
    reference.close()
    return wrong
