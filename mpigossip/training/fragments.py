"""Fragments of a model: their elements, and their compatibility with method, cadence and mixer."""

from collections.abc import Sequence

from mpigossip.algorithms import BUILDERS, Algorithm, build
from mpigossip.algorithms.cadence import Cadence, FragmentSchedule
from mpigossip.algorithms.local import NO_LOCAL_STEP
from mpigossip.config import Job
from mpigossip.config.toml import show
from mpigossip.engine.vector import ParameterLayout
from mpigossip.graphs import Graph
from mpigossip.mixing.wire import ALIGN, BUCKET, Wire


def fragment_width(width: int, schedule: FragmentSchedule, wire: Wire) -> int:
    """Return the number of elements in the message of a fragment.

    :param width: number of elements of a shard
    :param schedule: fragments of the cadence
    :param wire: format of the message
    """
    if schedule.fragments == 1:
        return width
    unit = schedule.fragments * (ALIGN if wire.exact else BUCKET)
    return -(-width // unit) * unit // schedule.fragments


def cut(layers: Sequence[slice], count: int, width: int) -> tuple[tuple[slice, ...], ...]:
    """Return the columns of ``count`` fragments with at most ``width`` elements each.

    Layers are assigned to fragments in turn, so that each fragment has layers of all depths. A
    layer that does not fit into a fragment is split, and its remainder goes to the next fragment.
    The product ``count · width`` has to be at least the number of all elements.
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


def unfit_fragments(job: Job, graph: Graph, method: Algorithm, cadence: Cadence) -> list[str]:
    """Return why period, method or mixer do not allow the fragments or the delay of the cadence."""
    schedule = cadence.fragment_schedule
    blend = job.algorithm.blend
    problems = _unfit_period(schedule)
    if blend is not None and not schedule.delay:
        problems.append(
            f"algorithm.blend = {blend:g}: it applies only to exchanges with a delay; set "
            'cadence.delay = 1 or more (cadence "every" or "cpsgd"), or leave it out'
        )
    elif blend is not None and "keeps-x" in method.needs:
        problems.append(
            f"algorithm.blend = {blend:g}: with algorithm.eager, received models are not blended "
            "into x; leave it out"
        )
    if schedule.is_whole_model:
        return problems
    count = schedule.fragments
    delay = schedule.delay
    name = job.algorithm.name
    setting = f"cadence.fragments = {count}" if count > 1 else f"cadence.delay = {delay}"
    exchange = method
    if method.local_update is not None:
        exchange = build(name, NO_LOCAL_STEP, job.algorithm.options, 0, graph)
    if reason := _why_indivisible(exchange):
        algorithms = ((other, build(other, None, {}, 0)) for other in BUILDERS)
        fitting = [other for other, algorithm in algorithms if not _why_indivisible(algorithm)]
        settings = ", ".join(f"algorithm.{k} = {show(v)}" for k, v in job.algorithm.options.items())
        with_settings, remedy = (
            (f" with {settings}", "leave that out, or ") if name in fitting else ("", "")
        )
        others = ", ".join(other for other in fitting if other != name)
        problems.append(
            f'{setting}: algorithm "{name}"{with_settings} {reason}; {remedy}choose one of {others}'
        )
    elif delay and "shared-wire" in method.needs:
        problems.append(
            f'cadence.delay = {delay}: algorithm "{name}" exchanges only some elements of a '
            "fragment, and algorithm.blend would undo the local steps of all other elements; use "
            'cadence.delay = 0, or an algorithm with local steps such as "diloco"'
        )
    if job.node.mixer == "asynchronous":
        problems.append(
            f"{setting}: asynchronous nodes would average different fragments; use node.mixer = "
            '"synchronous"'
        )
    return problems


def _unfit_period(schedule: FragmentSchedule) -> list[str]:
    period, count, delay = schedule
    if count > period:
        return [
            f"cadence.fragments = {count}: each fragment is sent at a separate step, and a "
            f"period has only cadence.period = {period} steps; use at most {period}, or a longer "
            "period"
        ]
    if delay > period // count:
        return [
            f"cadence.delay = {delay}: a fragment must be applied before the next one is sent, "
            f"{period // count} steps later (cadence.period = {period}, cadence.fragments = "
            f"{count}); use at most {period // count}, or a longer period"
        ]
    return []


def _why_indivisible(method: Algorithm) -> str:
    """Return why fragments of a model can't be exchanged at different steps; "" if they can."""
    if method.local_update is None:
        return (
            "has no separate local step: its step depends on the received messages, while "
            "fragments are exchanged between local steps of the whole model"
        )
    if not method.elementwise:
        return "updates the model as a whole: its Algorithm has elementwise=False"
    return ""


def layers_of(flat: ParameterLayout, within: slice) -> list[slice]:
    """Return the columns of each module whose parameters are adjacent.

    :param flat: layout of the model's parameters
    :param within: columns of the shard; results are relative to its start
    """
    columns: list[slice] = []
    last = None
    for name, column_range in zip(flat.names, flat.column_ranges, strict=True):
        begin = max(column_range.start, within.start)
        end = min(column_range.stop, within.stop)
        if begin >= end:
            continue
        begin = begin - within.start
        end = end - within.start
        module = name.rpartition(".")[0]
        if columns and module == last:
            begin = columns.pop().start
        columns.append(slice(begin, end))
        last = module
    return columns
