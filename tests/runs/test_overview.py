"""Lines of the overview about transports between nodes."""

from types import SimpleNamespace

from mpigossip.config import NodeSection
from mpigossip.graphs import graph
from mpigossip.mixing.base import ExchangeKind
from mpigossip.runs import overview


def test_transports_of_gpus_are_printed_with_their_reasons():
    routes = {1: "windows (proven)", 2: "host (no GPU-aware MPI)", 3: "host (no GPU-aware MPI)"}
    engine = SimpleNamespace(
        mixer=SimpleNamespace(local_nodes=[0], synchronous=True, routes=routes),
        cadence=SimpleNamespace(kinds={ExchangeKind.GOSSIP}),
    )
    column = SimpleNamespace(hosts=["a", "a", "b", "b"])
    world = SimpleNamespace(comm=object(), survives=False, nodes=SimpleNamespace(inter_node=column))
    said = overview._exchange(engine, graph("complete", 4), NodeSection(), world)
    assert said == (
        "node 0 receives from 1: put from GPU to GPU (proven); "
        "from 2, 3: host staging (no GPU-aware MPI)"
    )
