"""Construction of an algorithm, together with its local step, from their names."""

from collections.abc import Mapping
from typing import Any

from mpigossip.algorithms import compressed
from mpigossip.algorithms.base import NEEDS, Algorithm
from mpigossip.algorithms.local import NO_LOCAL_STEP, Local, by_row
from mpigossip.algorithms.methods import BUILDERS, LOCALS, Known
from mpigossip.config import BuilderSpec, JobError, NodeSection
from mpigossip.config.choices import LOCAL
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
    """Build the algorithm of a shard whose first ``decayed`` elements take weight decay.

    :param name: name of an algorithm in `BUILDERS`, or "module:function" for a custom one
    :param local: local step, or its name; None: the default local step of the algorithm
    :param options: options of the algorithm. Options that it does not have are passed to the local
        step, unless ``local`` is an object; `NO_LOCAL_STEP` ignores them
    :param decayed: number of elements of the shard, counted from the first, that take weight decay
    :param graph: graph over the nodes; None: options that are computed from the graph or from other
        options keep the defaults of the algorithm's function
    :param local_options: further options of the local step
    :param node: section `[node]` of the job, for options that depend on the wire; None: they keep
        their defaults
    :param layout: parameter layout, for a local step that takes whole parameters; None: such a
        local step makes its state, but raises ValueError in a step
    :raises JobError: if an option is unknown; if the function of the algorithm can't be imported,
        fails, or returns no Algorithm; or if the algorithm has an unknown condition in ``needs``
    """
    form = "(local, *, option=…) that returns an Algorithm"
    spec = (
        BuilderSpec(import_object("algorithm.name", name, form))
        if is_user_code(name)
        else BUILDERS[name]
    )
    step = local or spec.implies.get(LOCAL)
    defaults = getattr(spec.build, "__kwdefaults__", None) or {}
    algorithm_options = {key: value for key, value in options.items() if key in defaults}
    other_options = {key: value for key, value in options.items() if key not in defaults}
    if graph is not None:
        algorithm_options |= spec.following(algorithm_options, Known(graph, options, node))
    if isinstance(step, str):
        step = _build_local(step, decayed, layout, other_options | dict(local_options or {}))
    elif other_options and step is not NO_LOCAL_STEP:
        raise JobError(
            [
                f'algorithm.{key}: unknown; options of "{name}" are its keyword-only parameters: '
                f"{', '.join(defaults) or 'none'}"
                for key in sorted(other_options)
            ]
        )
    method = build_checked("algorithm.name", name, Algorithm, spec.build, step, **algorithm_options)
    if unknown := sorted(method.needs - {*NEEDS}):
        raise JobError(
            [
                f'algorithm.name = "{name}": needs contains "{need}"; {near(need, NEEDS)}'
                for need in unknown
            ]
        )
    return method


def _build_local(name: str, decayed: int, layout: Any, options: Mapping[str, Any]) -> Local:
    """Return the local step ``name``, which counts steps per row and leaves out skipped rows.

    :param name: name in `LOCALS`
    :param decayed: number of elements, counted from the first, that take weight decay
    :param layout: parameter layout, for a local step that takes whole parameters; None: such a
        local step makes its state, but raises ValueError in a step
    :param options: options of the local step
    """
    step = LOCALS[name](decayed, **options)
    if step.whole and layout is not None:
        step = LOCALS[name](decayed, layout, **options)
    return by_row(step)


def over_wire(method: Algorithm, *, biased: bool, meets: bool = False) -> Algorithm:
    """Return ``method`` with the wrapper that it needs for a lossy wire.

    An algorithm with global averages only gets error feedback if the wire is biased, and is
    returned unchanged otherwise. An algorithm that needs no wrapper ("own-wire") is returned
    unchanged, too. All others get :func:`~mpigossip.algorithms.compressed.difference`.

    :param method: algorithm
    :param biased: whether the wire is biased
    :param meets: whether the cadence has GLOBAL rounds, in which an algorithm with one vector then
        sends the difference to the last global average
    """
    if "own-wire" in method.needs:
        return method
    if method.always_global:
        return compressed.error_feedback(method) if biased else method
    if meets and method.vectors == 1:
        method = compressed.anchored(method)
    return compressed.difference(method)
