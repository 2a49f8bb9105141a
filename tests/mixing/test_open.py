"""Choice of a mixer: every entry of the table names a class, and unknown mixers are rejected."""

import pytest

from mpigossip import mixing
from mpigossip.cluster.world import SingleProcess
from mpigossip.graphs import graph
from mpigossip.mixing.base import MessageLayout
from mpigossip.mixing.delayed import Faults
from mpigossip.mixing.simulated import Simulated
from tests.cases import naming

LAYOUT = MessageLayout((512,))


def test_in_this_process():
    made = graph("ring", 3)
    alone = SingleProcess()
    assert type(mixing.open_mixer(made, LAYOUT, alone)) is Simulated
    delayed = mixing.open_mixer(made, LAYOUT, alone, "asynchronous", ages=Faults(3).ages)
    assert type(delayed).__name__ == "Delayed" and not delayed.synchronous


def test_every_entry_names_a_class_and_unknown_mixers_are_rejected():
    for asked, where in mixing.MIXERS:
        assert mixing.mixer_class(asked, where).synchronous is (asked != "asynchronous")
    with pytest.raises(
        ValueError, match=naming('node.mixer = "asynchronous"', '"devices"', '"synchronous"')
    ):
        mixing.mixer_class("asynchronous", "devices")
