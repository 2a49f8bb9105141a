"""Algorithms by name, made with their local step."""

from collections.abc import Mapping
from typing import Any

from mpigossip.algorithms import compressed
from mpigossip.algorithms.base import NEEDS, Algorithm
from mpigossip.algorithms.local import NO_LOCAL_STEP, Local, by_row
from mpigossip.algorithms.methods import BUILDERS, LOCALS, Known
from mpigossip.config import BuilderSpec, JobError, NodeSection
from mpigossip.config.toml import near
from mpigossip.config.user_code import build_checked, import_object, is_user_code
from mpigossip.graphs import Graph


def build(
    name: str,
    local: str | Local | None,
    options: Mapping[str, Any],
    decayed: int,
    graph: Graph | None = None,
    *,
    local_options: Mapping[str, Any] | None = None,
    node: NodeSection | None = None,
    layout: Any = None,
) -> Algorithm:
    """The algorithm for a segment whose first ``decayed`` columns take weight decay.

    ``local``: a local step, or the name of one, None for the usual one. The options of a name are
    ``local_options``, and those of ``options`` that the algorithm doesn't have (of no use to
    `STILL`). Without ``graph`` options that follow from it keep their cautious defaults.
    ``layout``: of the vector, where a local step takes whole parameters.
    """
    form = "(local, *, option=…) that returns an Algorithm"
    part = (
        BuilderSpec(import_object("algorithm.name", name, form))
        if is_user_code(name)
        else BUILDERS[name]
    )
    step = local or part.local
    has = getattr(part.build, "__kwdefaults__", None) or {}
    mine = {key: value for key, value in options.items() if key in has}
    others = {key: value for key, value in options.items() if key not in has}
    if graph is not None:
        mine |= part.following(mine, Known(graph, options, node))
    if isinstance(step, str):
        step = _made(step, decayed, layout, others | dict(local_options or {}))
    elif others and step is not NO_LOCAL_STEP:
        raise JobError(
            [
                f'algorithm.{key}: unknown; options of "{name}" are its keyword-only parameters: '
                f"{', '.join(has) or 'it has none'}"
                for key in sorted(others)
            ]
        )
    method = build_checked("algorithm.name", name, Algorithm, part.build, step, **mine)
    if unknown := sorted(method.needs - {*NEEDS}):
        raise JobError(
            [f'algorithm.name = "{name}": needs has "{one}"; {near(one, NEEDS)}' for one in unknown]
        )
    return method


def _made(name: str, decayed: int, layout: Any, options: Mapping[str, Any]) -> Local:
    """The local step of this name; each row counts its own, and none where it is skipped."""
    step = LOCALS[name](decayed, **options)
    if step.whole and layout is not None:
        step = LOCALS[name](decayed, layout, **options)
    return by_row(step)


def over_wire(method: Algorithm, *, biased: bool, meets: bool = False) -> Algorithm:
    """Return the method for a lossy wire: with differences, or with error feedback.

    ``meets``: the cadence has GLOBAL rounds, which are then sent as differences, too.
    """
    if "own-wire" in method.needs:
        return method
    if method.always_global:
        return compressed.error_feedback(method) if biased else method
    if meets and method.vectors == 1:
        method = compressed.anchored(method)
    return compressed.difference(method)
