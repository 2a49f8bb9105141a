"""Elementwise methods are bitwise identical by blocks of columns, and with sums written into x."""

import torch

from mpigossip import algorithms
from mpigossip.engine.vector import ParameterLayout
from mpigossip.mixing.base import ExchangeKind
from mpigossip.training.parts import make_parts
from tests import battery
from tests.cases import few, on_each


def _columns(state, columns):
    """Return a nested state whose arrays are views of some columns."""
    if isinstance(state, torch.Tensor):
        return state[:, columns]
    return type(state)(*(_columns(part, columns) for part in state))


class Cut(battery.Driver):
    """Driver that divides each segment into blocks, and updates the last block first."""

    def __init__(self, settings, n, **options):
        super().__init__(settings, n, **options)
        self.cuts = [slice(0, 96), slice(96, 480), slice(480, 512)]
        decayed = [(c.stop - c.start) * (s == 0) for s in range(2) for c in self.cuts]
        self.by_block = [self._method(d) for d in decayed]
        self.methods = [
            method._replace(
                send=self._each("send", s), receive=self._each("receive", s), local_update=None
            )
            for s, method in enumerate(self.methods)
        ]
        self.method = self.methods[0]

    def _method(self, decayed):
        flat = ParameterLayout(("x",), ((1,),), ((1,),), (0,), size=512, decayed=decayed, slots=1)
        return make_parts(self.job, self.graph, flat).method

    def _each(self, name, s):
        def work(x, g, state, *rest):
            *arrays, step = rest
            for b in (2, 0, 1):
                c = self.cuts[b]
                cut = [tuple(part[:, c] for part in parts) for parts in arrays]
                function = getattr(self.by_block[3 * s + b], name)
                function(x[:, c], g[:, c], _columns(state, c), *cut, step)
            return state

        return work


def _by_block(settings):
    """Return whether a method is elementwise, sends no scalars, and sends its adapted model."""
    method = battery.Driver(settings, 4, steps=4).method
    return method.elementwise and not method.ahead and not method.scalars


CASES = [
    settings
    for settings in few(battery.cases())
    if settings not in battery.FRAGMENTS and _by_block(settings)
]


def test_these_methods_are_elementwise():
    names = {settings.split()[0].split("=")[1] for settings in CASES}
    left = {"sgp", "detag", "defacto", "momentum-tracking"}
    assert names == set(algorithms.BUILDERS) - left


@on_each("settings", CASES)
def test_blocks_of_columns_have_the_bits_of_the_whole(settings):
    whole = battery.Driver(settings, 4, noise=0.1, steps=9).run(9).whole()
    cut = Cut(settings, 4, noise=0.1, steps=9).run(9).whole()
    assert torch.equal(whole, cut)


class InPlace(battery.Driver):
    """Driver that computes each weighted sum in the memory of x, so that the old x is lost."""

    def __init__(self, settings, n, **options):
        super().__init__(settings, n, **options)
        self.methods = [m._replace(receive=self._over(m.receive)) for m in self.methods]
        self.method = self.methods[0]

    def _over(self, receive):
        def work(x, g, state, sent, mixed, step):
            if step.kind is ExchangeKind.GOSSIP and self.layout.wire.exact:
                x.copy_(mixed[0])
                mixed = (x, *mixed[1:])
            return receive(x, g, state, sent, mixed, step)

        return work


IN_PLACE = [
    settings
    for settings in few(battery.cases())
    if settings not in battery.FRAGMENTS and battery.Driver(settings, 4, steps=4).method.takes_mixed
]


@on_each("settings", IN_PLACE)
def test_sums_in_the_place_of_x_have_the_bits_of_those_elsewhere(settings):
    elsewhere = battery.Driver(settings, 4, noise=0.1, steps=9).run(9).whole()
    assert torch.equal(elsewhere, InPlace(settings, 4, noise=0.1, steps=9).run(9).whole())
