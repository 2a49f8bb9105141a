"""Division of a model into fragments, which are exchanged at different steps."""

from collections.abc import Collection, Sequence

from mpigossip.algorithms.cadence import FragmentSchedule
from mpigossip.config import JobError
from mpigossip.config.toml import show
from mpigossip.engine.vector import NodeLayout
from mpigossip.mixing.wire import ALIGN, WIRE_BUCKET, Wire

Columns = tuple[slice, ...]
"""Ranges of elements in a shard."""


def fragment_width(
    flat: NodeLayout, schedule: FragmentSchedule, wire: Wire, frozen: Collection[str] = ()
) -> int:
    """Return the number of elements in the message of a fragment.

    All messages have the length of the largest fragment of any slot, rounded up so that wires can
    encode it. With one fragment, it is the width of a shard.

    :param flat: layout of the model's parameters
    :param schedule: number, steps and modules of the fragments
    :param wire: format of the message
    :param frozen: names of parameters that are not trained now, but may be later
    :raises JobError: if the modules of the fragments don't divide the model
    """
    if schedule.fragments == 1:
        return flat.width
    unit = ALIGN if wire.exact else WIRE_BUCKET
    if not schedule.modules or not flat.names:
        largest = -(-flat.width // schedule.fragments)
    else:
        slots = range(flat.slots)
        divided = [cut_by_modules(flat, slot, schedule.modules, frozen) for slot in slots]
        largest = max(_count_elements(columns) for slot in divided for columns in slot)
    return -(-largest // unit) * unit


def fragment_columns(
    flat: NodeLayout,
    slot: int,
    schedule: FragmentSchedule,
    width: int,
    frozen: Collection[str] = (),
) -> tuple[Columns, ...]:
    """Return the ranges of elements of each fragment in a slot's shard, in ascending order.

    :param flat: layout of the model's parameters
    :param slot: index of the slot
    :param schedule: number and modules of the fragments
    :param width: number of elements of a message, the result of `fragment_width`
    :param frozen: names of parameters that are not trained now, but may be later
    :raises JobError: if the modules of the fragments don't divide the model
    """
    if schedule.modules:
        return cut_by_modules(flat, slot, schedule.modules, frozen)
    return cut(layers_of(flat, slot), schedule.fragments, width)


def cut_by_modules(
    flat: NodeLayout, slot: int, modules: Sequence[str], frozen: Collection[str] = ()
) -> tuple[Columns, ...]:
    """Return, for each fragment, the ranges of its modules' parameters in a slot's shard.

    :param flat: layout of the model's parameters
    :param slot: index of the slot
    :param modules: for each fragment, names of modules or parameters, separated by commas
    :param frozen: names of parameters that are not trained now, but may be later; they have to be
        in a fragment, too
    :raises JobError: if a name fits no parameter, or a parameter does not belong to exactly one
        fragment
    """
    fragment_of = _assign([*flat.names, *frozen], modules)
    columns: list[list[slice]] = [[] for _ in modules]
    for name, inside in zip(flat.names, flat.ranges_in(slot), strict=True):
        if inside.start == inside.stop:
            continue
        own = columns[fragment_of[name]]
        if own and own[-1].stop == inside.start:
            own[-1] = slice(own[-1].start, inside.stop)
        else:
            own.append(inside)
    return tuple(map(tuple, columns))


def _assign(parameters: Sequence[str], modules: Sequence[str]) -> dict[str, int]:
    """Return the index of the fragment of each parameter, from 0, by the parameter's name.

    :param parameters: names of all parameters
    :param modules: for each fragment, names of modules or parameters, separated by commas
    :raises JobError: see `cut_by_modules`
    """
    fragment_of = dict[str, int]()
    for fragment, text in enumerate(modules):
        for module in map(str.strip, text.split(",")):
            inside = [p for p in parameters if p == module or p.startswith(f"{module}.")]
            if not inside:
                known = {parameter.rpartition(".")[0] or parameter for parameter in parameters}
                raise JobError(
                    f"cadence.fragments: {show(module)} is no module with parameters; name "
                    f"modules or parameters of the model, such as {', '.join(sorted(known)[:6])}"
                )
            for parameter in inside:
                if fragment_of.setdefault(parameter, fragment) != fragment:
                    raise JobError(
                        f"cadence.fragments: parameter {show(parameter)} belongs to fragments "
                        f"{fragment_of[parameter]} and {fragment}, counted from 0; name it once"
                    )
    missing = [parameter for parameter in parameters if parameter not in fragment_of]
    if missing:
        raise JobError(
            f"cadence.fragments: {len(missing)} parameters are in no fragment, {show(missing[0])} "
            "is the first; add their modules to a fragment"
        )
    return fragment_of


def _count_elements(columns: Columns) -> int:
    """Return the number of elements in all ranges."""
    return sum(c.stop - c.start for c in columns)


def cut(layers: Sequence[slice], count: int, width: int) -> tuple[tuple[slice, ...], ...]:
    """Return the ranges of ``count`` fragments with at most ``width`` elements each.

    Layers are assigned to fragments in turn, so that each fragment has layers of all depths. A
    layer that does not fit into a fragment is split, and the rest of it is assigned to the next
    fragment with room. ``count · width`` must not be smaller than the number of elements of all
    layers.

    :param layers: range of elements of each layer in the shard, in ascending order
    :param count: number of fragments
    :param width: largest number of elements of a fragment
    :return: for each fragment, its ranges of elements
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
    """Return the ranges of a slot's shard that hold consecutive parameters of the same module.

    A module has several ranges if parameters of other modules lie between its own.

    :param flat: layout of the model's parameters
    :param slot: index of the slot
    :return: ranges of elements, in ascending order
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
