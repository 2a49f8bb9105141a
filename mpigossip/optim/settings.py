"""Conversion of the arguments of `Gossip` to the parts of a job."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mpigossip import algorithms, graphs
from mpigossip.algorithms import cadence as cadences
from mpigossip.algorithms.local import NO_LOCAL_STEP
from mpigossip.cluster.process import TIMEOUT_S
from mpigossip.cluster.world import World
from mpigossip.config import CadenceSection, GraphSection, JobError
from mpigossip.config.choices import Table, options_of, spec_of
from mpigossip.config.defaults import owners
from mpigossip.config.limits import LARGEST
from mpigossip.config.readable import abbreviate
from mpigossip.config.toml import near, show
from mpigossip.graphs import GraphError
from mpigossip.graphs.user_graphs import is_network
from mpigossip.training import assemble
from mpigossip.training.parts import JobParts, make_graph, make_parts, weigh_nodes
from mpigossip.training.rules import incompatibilities, loop_problems

KEYS = {
    "algorithm": ("blend", "average_state", "node_weights"),
    "run": ("seed", "survive"),
    "graph": ("weights", "lazy", "slack", "degree"),
    "node": ("levels", "density", "same_host", "timeout_s", "exchange"),
}
"""Settings of a job that `Gossip` accepts without their section, besides options of builders."""
OF_RUN = {
    "run": ("steps",),
    "checkpoint": ("keep", "keep_every", "wall_clock_s", "on_error"),
    "log": ("flush_steps", "on_error", "hooks", "straggler_times", "straggler_s"),
}
"""Further settings that `Gossip` accepts together with ``run``."""
SHARED = ("length", "on_error")
"""Options that mean the same in several sections, and are set in all of them."""
STAND_IN = NO_LOCAL_STEP._replace(raw=True)
"""Placeholder for the optimizer's step in checks."""


def settings(
    world: World,
    device: str,
    algorithm: str,
    graph: Any,
    cadence: str | None,
    wire: str | None,
    mixer: str,
    folder: Path | None,
    options: Mapping[str, Any],
) -> JobParts:
    """Return the parts of a job that is equivalent to the arguments of `Gossip`.

    :param world: all ranks
    :param device: device of the model
    :param algorithm: name of the algorithm
    :param graph: name of the graph, or a graph; None: the default of the algorithm
    :param cadence: name of the cadence; None: the default of the algorithm
    :param wire: name of the wire; None: "fp32"
    :param mixer: name of the mixer
    :param folder: run directory; None: no files are written
    :param options: further options by their names without the section: `degree` is `graph.degree`
    :raises JobError: if arguments or options are invalid, or exclude each other
    """
    is_graph = graph is not None and not isinstance(graph, str)
    if is_network(algorithm) or algorithm in graphs.BUILDERS.keys() - algorithms.BUILDERS.keys():
        raise JobError(f"the fourth argument of Gossip is the algorithm: write graph={algorithm!r}")
    if "local" in options:
        raise JobError(
            f"local = {options['local']!r}: the optimizer is the local step in a custom loop: "
            "remove local"
        )
    plain_names = {section: set(keys) for section, keys in KEYS.items()}
    for section, keys in OF_RUN.items() if folder else ():
        plain_names[section] = plain_names.get(section, set()).union(keys)
    sections = _sections(algorithm, graph, cadence, options, plain_names)
    if folder is not None:
        sections["run"] |= {"output": str(folder), "name": folder.name or "run"}
    if world.nodes.per_node > 1:
        sections["node"]["ranks_per_node"] = world.nodes.per_node
    sections["node"] |= {"mixer": mixer, "devices": "cpu:1" if device == "cpu" else device}
    if world.timeout_s != TIMEOUT_S:
        # The time limit of a world may be inf, but the setting of a job must be finite.
        sections["node"].setdefault("timeout_s", min(world.timeout_s, LARGEST))
    if wire is not None:
        sections["node"]["wire"] = wire
    job = assemble.load(sections)
    try:
        if is_graph:
            graph_section = job.graph
            slack = {"slack": job.graph.options.get("slack", 1.0)}
            built = graphs.graph(
                graph,
                world.nodes.count,
                graph_section.weights,
                job.run.seed,
                graph_section.lazy,
                **slack,
            )
            if built.node_weights and job.algorithm.node_weights != "equal":
                raise JobError(
                    f"node_weights = {show(job.algorithm.node_weights)}: the nodes of the given "
                    "graph have weights already: remove node_weights, or pass the graph without "
                    "weights of nodes"
                )
            built = weigh_nodes(job, built)
            name = "networkx" if is_network(graph) else f"{built.name} (given)"
            job = replace(job, graph=replace(graph_section, name=name, options=slack))
        else:
            built = make_graph(job, world.nodes.count)
    except GraphError as error:
        raise JobError(f"graph.name: {error}") from error
    parts = make_parts(job, built, local=STAND_IN)
    problems = incompatibilities(parts) + loop_problems(parts, world, is_graph)
    if not problems:
        problems = assemble.survival_problems(job, world.nodes.count)
    if problems:
        raise JobError(problems)
    return parts


def _sections(
    algorithm: str,
    graph: Any,
    cadence: str | None,
    options: Mapping[str, Any],
    plain_names: Mapping[str, set[str]],
) -> dict[str, dict[str, Any]]:
    """Return a job's sections; each option goes to the section that has it, or that it names.

    :param algorithm: name of the algorithm
    :param graph: name of the graph, or a graph; None: the default of the algorithm
    :param cadence: name of the cadence; None: the default of the algorithm
    :param options: options by their names without the section, or with it, as in "graph_lazy"
    :param plain_names: for each section, its settings that are accepted without the section
    :raises JobError: if an option is unknown, given twice, or known to several sections
    """
    sections: dict[str, dict[str, Any]] = {"run": {}, "algorithm": {"name": algorithm}}
    sections |= {"graph": {}, "cadence": {}, "node": {}, "checkpoint": {}, "log": {}}
    for section, name in (("graph", graph), ("cadence", cadence)):
        if isinstance(name, str) or (section == "cadence" and name is not None):
            sections[section]["name"] = name
    spec = spec_of(algorithms.BUILDERS, algorithm)
    implied = spec.implies if spec else {}
    graph = implied.get("graph.name", GraphSection.name) if graph is None else graph
    cadence = cadence or implied.get("cadence.name", CadenceSection.name)
    keys = {section: set(plain_names.get(section, ())) for section in sections}
    keys["algorithm"] |= {*options_of(algorithms.BUILDERS, algorithm)}
    keys["graph"] |= {*options_of(graphs.BUILDERS, graph)}
    keys["cadence"] |= {*options_of(cadences.BUILDERS, cadence)}
    for option, value in options.items():
        key, homes = _homes(option, keys)
        if not homes:
            if _homes(option, OF_RUN)[1]:
                raise JobError(f'{option}: needs a run directory: pass Gossip(…, run="runs/mine")')
            hint = _name_owners(option) or near(option, set().union(*keys.values()))
            raise JobError(f"{option}: unknown; {hint}")
        if len(homes) > 1 and key not in SHARED:
            settings_of = " and ".join(f"{section}.{key}" for section in homes)
            remedy = " or ".join(f"{section}_{key}={value!r}" for section in homes)
            raise JobError(
                f"{option} = {value!r}: {settings_of} have the same name: "
                f"add the section, as {remedy}"
            )
        for section in homes:
            if key in sections[section]:
                raise JobError(
                    f"{option} = {value!r}: sets {section}.{key}, which another option "
                    "sets, too: remove one of them"
                )
            sections[section][key] = value
    return sections


def _name_owners(option: str) -> str:
    """Return a clause that says which algorithms, graphs and cadences have an option.

    If none has it, return "".

    :param option: name of the option, without the section
    """
    tables: dict[str, Table] = {
        "algorithm": algorithms.BUILDERS,
        "graph": graphs.BUILDERS,
        "cadence": cadences.BUILDERS,
    }
    clauses = []
    for section, table in tables.items():
        if names := owners(table).get(option):
            clauses.append(f"{section} = {abbreviate([show(name) for name in names])}")
    if not clauses:
        return ""
    return f"an option of {' and of '.join(clauses)}: choose it, or remove {option}"


def _homes(option: str, keys_of: Mapping[str, Collection[str]]) -> tuple[str, list[str]]:
    """Return the key that an option sets, and the sections that have this key.

    ``lazy`` is only a key, whereas ``graph_lazy`` and ``graph.lazy`` contain the section, too. The
    list is empty if no section has the key.

    :param option: name of the option
    :param keys_of: keys of each section
    """
    if homes := [section for section, keys in keys_of.items() if option in keys]:
        return option, homes
    for section, keys in keys_of.items():
        key = option.removeprefix(section)[1:]
        if option in (f"{section}_{key}", f"{section}.{key}") and key in keys:
            return key, [section]
    return option, []
