"""Runs of algorithms on quadratics f_i(x) = ‖x − b_i‖²/2 with gradient noise, without a model."""

from dataclasses import replace
from functools import cache
from itertools import count
from types import SimpleNamespace

import numpy as np
import torch

from mpigossip import algorithms
from mpigossip.algorithms import Step
from mpigossip.engine.fragments import FragmentExchange
from mpigossip.engine.step import Engine
from mpigossip.engine.vector import ParameterLayout
from mpigossip.engine.whole import WholeExchange
from mpigossip.mixing import close_mixer, open_mixer
from mpigossip.mixing.base import ExchangeKind, MessageLayout
from mpigossip.mixing.simulated import Simulated
from mpigossip.mixing.wire import FP32
from mpigossip.training import assemble
from mpigossip.training.parts import make_graph, make_parts

WIDTHS = (512, 512)
LAYERS = (96, 64, 160, 192, 320, 128, 64)
"""Number of columns of each layer; the fifth layer is divided between both slots."""
FLAT = ParameterLayout(
    tuple(f"{k}.weight" for k in range(len(LAYERS))),
    tuple((width,) for width in LAYERS),
    ((1,),) * len(LAYERS),
    tuple(np.cumsum((0, *LAYERS[:-1])).tolist()),
    1024,
    512,
    2,
)
SYMMETRIC = {"decentlam", "choco"}
WIRES = ("bf16", "qsgd", "qsgd node.levels=7", "fp4")

FRAGMENTS = (
    *(f"algorithm.name={name} cadence.name=every cadence.period=3 cadence.fragments=3"
      for name in ("dsgd", "dmsgd-vanilla")),
    *(f"algorithm.name={name} cadence.period=4 cadence.fragments=2 cadence.delay={delay}"
      for name in ("cpsgd", "diloco", "noloco", "gasloc") for delay in (0, 2)),
    "algorithm.name=dsgd cadence.name=every cadence.fragments=4 cadence.delay=1 node.wire=qsgd",
    "algorithm.name=diloco cadence.period=5 cadence.fragments=3 cadence.delay=1 node.wire=bf16",
    'algorithm.name=dsgd cadence.name=every cadence.fragments=["0,5","4","1,2,3","6"] '
    "node.wire=fp4",
    'algorithm.name=diloco cadence.period=5 cadence.fragments=["0.weight,6","1,2,3,4,5"] '
    "cadence.delay=2 node.wire=bf16",
    "algorithm.name=slowmo cadence.name=cpsgd cadence.period=2 cadence.fragments=2",
    "algorithm.name=noloco cadence.period=3 cadence.fragments=3 "
    "cadence.delay=1 graph.name=one-peer-exponential node.wire=bf16",
    "algorithm.name=gasloc cadence.period=3 cadence.delay=3 algorithm.blend=0.7",
    "algorithm.name=sparseloco cadence.period=4 cadence.fragments=2 cadence.delay=1 "
    "node.density=0.5",
    "algorithm.name=diloco algorithm.eager=true cadence.period=3 cadence.delay=3",
    "algorithm.name=diloco algorithm.eager=true cadence.period=4 cadence.fragments=2 "
    "cadence.delay=2 node.wire=bf16",
    *(f"algorithm.name={name} cadence.name=every cadence.period=2 cadence.fragments=2 "
      "node.density=0.5" for name in ("choco graph.name=ring node.wire=top-k", "sparta")),
    "algorithm.name=choco graph.name=ring cadence.name=every cadence.period=3 cadence.fragments=2 "
    "cadence.delay=1",
)  # fmt: skip
"""Settings with fragments, and settings whose exchanges stay in flight for some steps."""


def cases():
    """Return settings of all valid combinations of algorithms, wires, cadences and graphs."""
    for name in algorithms.BUILDERS:
        graph = " graph.name=ring" if name in SYMMETRIC else ""
        graph = " node.density=0.5" if name in ("sparta", "sparseloco") else graph
        yield f"algorithm.name={name}{graph}"
        if name not in ("defacto", "ceca", "qsgd", "choco", "sparta"):
            yield from (f"algorithm.name={name}{graph} node.wire={wire}" for wire in WIRES[:2])
    few = (f"{wire} node.density=0.2" for wire in ("top-k", "top-k-int2"))
    more = (f"{wire} node.density=0.5" for wire in ("random-k", "shared-k"))
    for wire in (*WIRES, "sign", *few, *more):
        yield f"algorithm.name=choco graph.name=ring algorithm.consensus_step=0.3 node.wire={wire}"
        if wire not in WIRES[:2]:
            yield f"algorithm.name=parallel node.wire={wire}"
    for name in ("dsgd", "dmsgd", "qg-dmsgd", "dsgt", "momentum-tracking", "sgp", "ceca", "detag"):
        yield f"algorithm.name={name} cadence.name=gossip-pga cadence.period=3"
        yield f"algorithm.name={name} cadence.name=every cadence.period=2"
    for name in ("dsgd", "dsgt", "momentum-tracking"):
        yield f"algorithm.name={name} algorithm.style=awc node.wire=qsgd"
    yield "algorithm.name=dsgt algorithm.style=awc local.name=momentum graph.name=ring"
    yield "algorithm.name=d2 graph.name=star local.name=momentum"
    yield "algorithm.name=d2 graph.name=ring graph.lazy=true algorithm.lazy=false"
    yield "algorithm.name=detag graph.name=ring algorithm.phase=3 algorithm.beta=0.8 node.wire=bf16"
    yield "algorithm.name=detag algorithm.beta=0.5"
    yield "algorithm.name=detag graph.name=ring"
    yield "algorithm.name=qg-dmsgd algorithm.nesterov=true graph.name=random-matching"
    yield "algorithm.name=dsgd local.name=accumadam local.period=3"
    yield "algorithm.name=defacto graph.name=spanning-tree graph.over=ring"
    yield "algorithm.name=slowmo cadence.name=cpsgd cadence.period=4"
    yield "algorithm.name=dsgd graph.name=complete node.wire=qsgd"
    yield "algorithm.name=sgp graph.name=base-3 node.wire=qsgd"
    yield "algorithm.name=sgp graph.name=p-peer-exponential"
    yield "algorithm.name=dsgt graph.name=od-equidyn"
    yield "algorithm.name=dmsgd graph.name=u-equistatic"
    yield "algorithm.name=noloco cadence.period=3 graph.name=base-2"
    for wire in ("", " node.wire=fp4"):
        yield f"algorithm.name=noloco{wire}"
        yield f"algorithm.name=gasloc algorithm.outer_beta=0.3 cadence.period=2{wire}"
    yield "algorithm.name=gasloc algorithm.outer_beta=0.5 cadence.name=gossip-pga"
    yield "algorithm.name=sparseloco cadence.period=3 node.wire=fp32"
    yield "algorithm.name=parallel node.wire=qsgd node.levels=1"
    yield "algorithm.name=sparta cadence.name=always node.density=0.4"
    yield "algorithm.name=sparta cadence.name=gossip-pga cadence.period=3 node.wire=fp32"
    yield from FRAGMENTS


@cache
def job(settings: str):
    return assemble.load({}, settings.split())


class Two:
    """Group of two slots of a node, which run one after the other."""

    def on_shards(self, work):
        return [work(0), work(1)]

    def sum_scalars(self, per_slot):
        return per_slot[0] + per_slot[1]

    def all_gather(self, shards, full):
        """Do nothing, because nothing reads a whole vector."""


class Driver(Engine):
    """Engine on local nodes of two slots each, whose model is a quadratic function."""

    def __init__(self, settings, n, mixer=None, *, lr=0.1, noise=0.0, scale=1.0, steps=40):
        made = job(settings) if isinstance(settings, str) else settings
        self.lr = lr
        self.noise = noise
        self.scale = scale
        self.job = made
        self.graph = make_graph(made, n)
        parts = make_parts(made, self.graph, FLAT, total=steps)
        self.layout = parts.layout
        times = parts.cadence.fragment_schedule.fragments
        self.mixer = (mixer or Simulated)(self.graph.slowed(times), self.layout)
        self.fragments = parts.make_fragments(FLAT, range(2))
        equal = bool(parts.method.needs & {"always-global", "never-gossip"})
        self.x = [self._drawn([0 if equal else 1, slot], equal) for slot in range(2)]
        self.b = [self._drawn([2, slot]) for slot in range(2)]
        vector = SimpleNamespace(x=self.x, g=[torch.empty_like(x) for x in self.x], full=self.x)
        vector.flat = FLAT
        vector.first = (0, 512)
        exchange = FragmentExchange(self.fragments) if self.fragments else WholeExchange()
        averages = parts.make_averages()
        self.mixer.state_mixers = {
            name: (mixer or Simulated)(self.graph, parts.state_layout)
            for name in made.algorithm.average_state
        }
        super().__init__(
            self.mixer,
            Two(),
            vector,
            parts.methods,
            parts.cadence,
            exchange,
            averages=averages,
        )

    def _drawn(self, key, equal=False):
        rows = [np.random.default_rng([*key, 0 if equal else i]) for i in self.mixer.local_nodes]
        return torch.from_numpy(np.stack([r.standard_normal(512, np.float32) for r in rows]))

    def advance(self):
        """Make one step from the gradients of all local nodes."""
        self.ahead()
        for slot, g in enumerate(self.vector.g):
            torch.sub(self.x[slot], self.b[slot], out=g).mul_(self.scale)
            if self.noise:
                g.add_(self._drawn([3, slot, self.index]), alpha=self.noise)
        resting = self.cadence.idle_nodes(self.index - self.state_start, self.mixer.local_nodes)
        self.step(
            self.lr, resting, loss=torch.ones(len(self.mixer.local_nodes), dtype=torch.float64)
        )

    def run(self, steps):
        for _ in range(steps):
            self.advance()
        return self

    def whole(self):
        """Return the parameters of the local nodes, (rows, 1024)."""
        return torch.cat(self.x, dim=1).clone()

    def optimum(self):
        """Return the mean of all b, which minimizes the sum; for a simulated driver."""
        return torch.cat(self.b, dim=1).mean(0)


class Double(Driver):
    """Driver in float64, for a simulated mixer."""

    def __init__(self, settings, n, **options):
        def mixer(graph, layout):
            return Simulated(graph, replace(layout, dtype=torch.float64))

        super().__init__(settings, n, mixer, **options)

    def _drawn(self, key, equal=False):
        return super()._drawn(key, equal).double()


def take_over(driver, other):
    """Copy all that a checkpoint has of one driver to another one with the same settings."""
    saved = {name: [part.clone() for part in parts] for name, parts in other.parts().items()}
    for x, values in zip(driver.x, other.x, strict=True):
        x.copy_(values)
    for name, parts in driver.parts().items():
        for part, values in zip(parts, saved.pop(name), strict=True):
            part.copy_(values)
    assert not saved
    driver.restore_counters(other.numbers())
    driver.restore_cadence(other.numbers())
    driver.counts = list(other.counts)


def check_resume(make, steps, stops):
    """Check that a driver which is resumed after each of some numbers of steps ends bitwise alike.

    :param make: function that returns a new driver
    :param steps: number of steps of a whole run
    :param stops: numbers of steps after which a second driver continues
    """
    expected = make().run(steps).whole()
    for stop in stops:
        second = make()
        take_over(second, make().run(stop))
        assert torch.equal(second.run(steps - stop).whole(), expected), stop


def driven(method, graph, x, gradient, lr=0.1, wire=FP32):
    """Yield the state after each step of nodes x, updated in place; ``gradient(t)`` is at x."""
    layout = MessageLayout((x.shape[1],), method.vectors, method.scalars, dtype=x.dtype, wire=wire)
    mixer = Simulated(graph, layout)
    state = method.init(x)
    for t in count():
        now, (out,), g = Step(t, t, ExchangeKind.GOSSIP, lr), mixer.outbox(t), gradient(t)
        if method.ahead:
            state = method.send(x, None, state, out, now._replace(lr=None))
        else:
            state = method.send(x, g, state, out, now)
        mixer.start(ExchangeKind.GOSSIP, t)
        (sent,), (mixed,) = mixer.finish()
        state = method.receive(x, g, state, sent, mixed, now)
        yield state


def on_ranks(settings, world, same_host, steps):
    """Return, for each setting, a driver over windows after its steps; collective."""

    def windows(graph, layout):
        return open_mixer(graph, layout, world, same_host=same_host, timeout_s=60)

    for each in settings:
        driver = Driver(each, world.size, windows, noise=0.1).run(steps)
        yield driver
        close_mixer(driver.mixer)
