"""Averaging between nodes: every mixer there is, and the one place that chooses among them."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import TYPE_CHECKING, Any

from mpigossip.cluster.launcher import no_mpi
from mpigossip.cluster.world import World

if TYPE_CHECKING:
    from mpigossip.mixing.base import MessageLayout, Mixer
    from mpigossip.mixing.delayed import DelayTable

MIXERS = {
    ("synchronous", "process"): "simulated.Simulated",
    ("asynchronous", "process"): "delayed.Delayed",
    ("synchronous", "ranks"): "synchronous.Synchronous",
    ("asynchronous", "ranks"): "asynchronous.Asynchronous",
    ("synchronous", "survivors"): "synchronous.FaultTolerant",
    ("synchronous", "devices"): "synchronous.Synchronous",
}
"""Mixers by what is asked for (`node.mixer`) and by where the nodes are: all in this process, one
a rank, ranks of which some may be lost, ranks whose slots are GPUs."""


def mixer_class(asked: str, where: str) -> Any:
    """The class of a mixer, a row of `MIXERS`; its module is loaded only now."""
    if (asked, where) not in MIXERS:
        fitting = ", ".join(f'"{name}"' for name, place in MIXERS if place == where)
        raise ValueError(f'no mixer "{asked}" for {where}; node.mixer may be {fitting}')
    module, _, name = MIXERS[asked, where].rpartition(".")
    try:
        return getattr(import_module(f"mpigossip.mixing.{module}"), name)
    except RuntimeError as error:
        if "MPI library" not in str(error):
            raise
        raise no_mpi(error) from error  # a dry run asks for what trains on ranks


def open_mixer(
    graph,
    layout: MessageLayout,
    world: World,
    mixer: str = "synchronous",
    *,
    same_host: str = "read",
    exchange: str = "auto",
    timeout_s: float = 300.0,
    ages: DelayTable | None = None,
) -> Mixer:
    """The mixer between the ranks of ``world``, or of all nodes here where it has no MPI.

    Collective. ``ages``: the delay table of a simulated asynchronous run. A mixer is given those
    of the options that its constructor names.
    """
    given = {
        "world": world,
        "same_host": same_host,
        "exchange": exchange,
        "timeout_s": timeout_s,
        "ages": ages,
    }
    on_devices = set(layout.devices) - {"cpu"}
    where = "survivors" if world.survives else "devices" if on_devices else "ranks"
    made = mixer_class(mixer, "process" if world.comm is None else where)
    takes = inspect.signature(made).parameters
    return made(graph, layout, **{name: given[name] for name in takes if name in given})
