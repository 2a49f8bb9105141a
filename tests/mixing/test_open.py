"""The one place that chooses a mixer: every row opens, and a new one takes a file and a row."""

import sys
from types import ModuleType

import pytest
import torch

from mpigossip import mixing
from mpigossip.cluster.ranks import Alone
from mpigossip.graphs import graph
from mpigossip.mixing.base import Layout
from mpigossip.mixing.faults import Faults
from mpigossip.mixing.simulated import Simulated

LAYOUT = Layout((512,))


def opened(comm):
    """Class names of what is opened between ranks: as they are, not waiting, able to survive."""
    from mpigossip.cluster.ranks import World

    found = []
    with World(comm) as world:
        for asked, survives in [("synchronous", 0), ("asynchronous", 0), ("synchronous", 1)]:
            world.survives = bool(survives)
            mixer = mixing.open_mixer(graph("ring", comm.size), LAYOUT, world, asked, timeout_s=30)
            found.append(type(mixer).__name__)
            mixer.close()
        world.survives = False
    return found


def test_between_ranks(ranks):
    assert ranks(2)(opened) == 2 * [["Synchronous", "Asynchronous", "Surviving"]]


def test_in_this_process():
    made, alone = graph("ring", 3), Alone()
    assert type(mixing.open_mixer(made, LAYOUT, alone)) is Simulated
    delayed = mixing.open_mixer(made, LAYOUT, alone, "asynchronous", ages=Faults(3).ages)
    assert type(delayed).__name__ == "Delayed" and not delayed.synchronous


def test_every_row_names_a_class_and_an_unknown_one_is_refused():
    for asked, where in mixing.MIXERS:
        assert mixing.mixer_class(asked, where).synchronous is (asked != "asynchronous")
    with pytest.raises(ValueError, match='no mixer "asynchronous" for devices; .*"synchronous"'):
        mixing.mixer_class("asynchronous", "devices")


def test_a_new_mixer_is_a_file_and_a_row(monkeypatch):
    class Lazy(Simulated):
        """Half a step towards the average."""

        def finish(self, into=None):
            sent, mixed = super().finish()
            pairs = zip(sent, mixed, strict=True)
            return sent, [tuple((a + b) / 2 for a, b in zip(*pair, strict=True)) for pair in pairs]

    module = ModuleType("mpigossip.mixing.lazy")
    module.Lazy = Lazy
    monkeypatch.setitem(sys.modules, "mpigossip.mixing.lazy", module)
    monkeypatch.setitem(mixing.MIXERS, ("lazy", "process"), "lazy.Lazy")
    mixer = mixing.open_mixer(graph("complete", 4), LAYOUT, Alone(), "lazy")
    (out,) = mixer.outbox(0)
    out[0].copy_(torch.arange(4.0)[:, None].expand(4, 512))
    mixer.start(mixing.base.Kind.GOSSIP, 0)
    assert mixer.finish()[1][0][0][:, 0].tolist() == [0.75, 1.25, 1.75, 2.25]
