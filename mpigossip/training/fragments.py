"""Division of a model into fragments, which are exchanged at different steps."""

from collections.abc import Sequence

from mpigossip.algorithms.cadence import FragmentSchedule
from mpigossip.engine.vector import NodeLayout
from mpigossip.mixing.wire import ALIGN, BUCKET, Wire


def fragment_width(width: int, schedule: FragmentSchedule, wire: Wire) -> int:
    """Return the number of elements in the message of a fragment.

    If there are several fragments, the number is rounded up to a whole number of buckets, or of
    alignment units if the wire is exact.

    :param width: number of elements of a shard
    :param schedule: number and steps of the fragments
    :param wire: format of the message
    """
    if schedule.fragments == 1:
        return width
    unit = schedule.fragments * (ALIGN if wire.exact else BUCKET)
    return -(-width // unit) * unit // schedule.fragments


def cut(layers: Sequence[slice], count: int, width: int) -> tuple[tuple[slice, ...], ...]:
    """Return the columns of ``count`` fragments with at most ``width`` elements each.

    Layers are assigned to fragments in turn, so that each fragment has layers of all depths. A
    layer that does not fit into a fragment is split, and the rest of it is assigned to the next
    fragment. ``count · width`` must not be smaller than the number of elements of all layers.

    :param layers: columns of each layer in the shard, in ascending order
    :param count: number of fragments
    :param width: largest number of elements of a fragment
    :return: for each fragment, its ranges of columns
    """
    columns: list[list[slice]] = [[] for _ in range(count)]
    room = [width] * count
    turn = 0
    for layer in layers:
        start = layer.start
        while start < layer.stop:
            while not room[turn % count]:
                turn += 1
            fragment = turn % count
            end = min(layer.stop, start + room[fragment])
            room[fragment] -= end - start
            before = columns[fragment][-1:]
            if before and before[0].stop == start:
                columns[fragment][-1] = slice(before[0].start, end)
            else:
                columns[fragment].append(slice(start, end))
            start = end
            turn = turn + 1
    return tuple(map(tuple, columns))


def layers_of(flat: NodeLayout, slot: int) -> list[slice]:
    """Return, for a slot's shard, the columns of each module whose parameters are adjacent.

    :param flat: layout of the model's parameters
    :param slot: index of the slot
    """
    columns: list[slice] = []
    last = None
    for name, column_range in zip(flat.names, flat.ranges_in(slot), strict=True):
        begin = column_range.start
        end = column_range.stop
        if begin == end:
            continue
        module = name.rpartition(".")[0]
        if columns and module == last:
            begin = columns.pop().start
        columns.append(slice(begin, end))
        last = module
    return columns
