"""Layouts of the parameters of a node in files, and in the arrays of its processes."""

from math import prod

import pytest
import torch

from mpigossip.engine.sharded import ShardedLayout, contiguous_strides
from mpigossip.engine.vector import ParameterLayout, flatten, join_row, scatter_row

SHAPES = ((5, 3), (2, 7), (1,))
DIMS = (0, 1, 0)


def sharded(slots):
    """Return the layout of three parameters, of which some slots have fewer rows or none."""
    by_slot = []
    for slot in range(slots):
        shapes = []
        for shape, dim in zip(SHAPES, DIMS, strict=True):
            cuts = torch.empty(shape).chunk(slots, dim)
            rows = cuts[slot].shape[dim] if slot < len(cuts) else 0
            shapes.append((*shape[:dim], rows, *shape[dim + 1 :]))
        strides = tuple(map(contiguous_strides, shapes))
        layout = ParameterLayout(("a", "b", "c"), (*shapes,), strides, (0, 64, 128), 512, 512, 1)
        by_slot.append(layout)
    return ShardedLayout(SHAPES, DIMS, tuple(by_slot))


@pytest.mark.parametrize("slots", [1, 2, 3, 4])
def test_files_hold_whole_parameters_and_memory_holds_shards(slots):
    node = sharded(slots)
    assert (node.count, node.size, node.width) == (30, 512 * slots, 512)
    packed = torch.arange(30.0)
    row = torch.full((node.size,), 9.0)
    node.unpack(packed, row)
    for slot, (layout, shard) in enumerate(zip(node.by_slot, row.chunk(slots), strict=True)):
        full = packed.split([prod(shape) for shape in SHAPES])
        for view, values, shape, dim in zip(layout.views(shard), full, SHAPES, DIMS, strict=True):
            cuts = values.view(shape).chunk(slots, dim)
            expected = cuts[slot] if slot < len(cuts) else view[:0]
            assert torch.equal(view, expected) or view.numel() == expected.numel() == 0
            view.zero_()
        assert not shard.any()  # padding
    node.unpack(packed, row)
    assert torch.equal(node.pack(row), packed)


def test_a_sharded_node_is_no_layout_of_an_array():
    """Parameters of the whole node can't be views of its row, because shards lie in between."""
    node = sharded(2)
    assert not isinstance(node, ParameterLayout)
    assert not any(hasattr(node, name) for name in ("views", "attach", "inside", "column_ranges"))


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_ranges_in_shards_are_those_of_the_row(slots):
    layout = flatten(torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Linear(30, 9)), slots)
    for k, whole in enumerate(layout.column_ranges):
        ranges = [layout.ranges_in(slot)[k] for slot in range(slots)]
        columns = [
            slot * layout.width + index
            for slot, r in enumerate(ranges)
            for index in range(r.start, r.stop)
        ]
        assert columns == [*range(whole.start, whole.stop)]
        assert all(0 <= r.start <= r.stop <= layout.width for r in ranges)


@pytest.mark.parametrize("slots", [2, 3])
def test_rows_go_to_shards_and_back(slots):
    node = sharded(slots)
    packed = torch.arange(30.0).numpy()
    shards = [torch.zeros(1, node.width) for _ in range(slots)]
    scatter_row(packed, shards, 0, node)
    assert (join_row(shards, 0, node) == packed).all()
    for slot in range(slots):  # A rank can also save its shard alone.
        own = node.by_slot[slot]
        again = torch.zeros(1, node.width)
        scatter_row(join_row(shards[slot : slot + 1], 0, own), [again], 0, own)
        assert torch.equal(again, shards[slot])
