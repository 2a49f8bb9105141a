"""Averaging between nodes: the table of all mixers and the function that chooses one of them."""

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
"""Modules and classes of the mixers. The key is the name in `node.mixer` and the location of the
nodes. "process": all nodes are in this process; "ranks": each rank is a node; "survivors": each
rank is a node, and the run continues after a rank failure; "devices": each rank is a node with
slots on GPUs."""


def mixer_class(mixer: str, where: str) -> Any:
    """Return the class of a mixer, an entry of `MIXERS`, and import its module.

    :param mixer: name of the mixer, as in `node.mixer`
    :param where: location of the nodes, "process", "ranks", "survivors" or "devices", as in
        `MIXERS`
    :raises ValueError: if `MIXERS` has no such entry
    :raises LaunchError: if the mixer needs MPI, and mpi4py can't load it
    """
    if (mixer, where) not in MIXERS:
        available = ", ".join(f'"{name}"' for name, location in MIXERS if location == where)
        raise ValueError(
            f'node.mixer = "{mixer}": there is no such mixer for the location "{where}"; choose '
            f"{available}"
        )
    module, _, name = MIXERS[mixer, where].rpartition(".")
    try:
        return getattr(import_module(f"mpigossip.mixing.{module}"), name)
    except RuntimeError as error:
        if "MPI library" not in str(error):
            raise
        raise no_mpi(error) from error  # a dry run may ask for a mixer that needs MPI


def close_mixer(mixer: Mixer) -> None:
    """Close the mixer of the model, and its mixers for the local step's state; collective."""
    mixer.close()
    for other in mixer.state_mixers.values():
        other.close()


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
    """Open the mixer between the ranks of ``world``; collective.

    If the world has no MPI, the mixer simulates all nodes in this process. An option is ignored if
    the constructor of the mixer has no such parameter.

    :param graph: graph of the nodes
    :param layout: layout of a node's message
    :param world: world whose ranks are the nodes
    :param mixer: name of the mixer, as in `node.mixer`
    :param same_host: "read": read the memory of neighbours on the same host; "put": send to them
    :param exchange: transport of GPU memory, as in `node.exchange`
    :param timeout_s: time limit of each wait for other ranks, in seconds
    :param ages: delay table of a simulated asynchronous run; None otherwise
    :raises ValueError: if there is no such mixer for the slots and ranks of this run, or if the
        world has MPI, and its number of ranks is not the graph's number of nodes
    :raises JobError: if the asynchronous mixer can't use the windows of this MPI
    :raises TransportUnavailable: on all ranks, if the transport named by ``exchange`` can't be used
    """
    options = {
        "world": world,
        "same_host": same_host,
        "exchange": exchange,
        "timeout_s": timeout_s,
        "ages": ages,
    }
    on_devices = set(layout.devices) - {"cpu"}
    where = "survivors" if world.survives else "devices" if on_devices else "ranks"
    mixer_type = mixer_class(mixer, "process" if world.comm is None else where)
    parameters = inspect.signature(mixer_type).parameters
    return mixer_type(
        graph, layout, **{name: options[name] for name in parameters if name in options}
    )
