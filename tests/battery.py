"""Drives algorithms without a model: quadratics f_i(x) = ‖x − b_i‖²/2 with noise from a seed."""

from functools import cache
from types import SimpleNamespace

import numpy as np
import torch

from mpigossip import algorithms
from mpigossip.engine.consensus import square_norms
from mpigossip.mixing import open_mixer
from mpigossip.mixing.base import Kind, Layout
from mpigossip.mixing.simulated import Simulated
from mpigossip.training import assemble

WIDTHS = (512, 512)
FLAT = SimpleNamespace(slots=2, decayed_in=lambda slot: 512 * (1 - slot))
SYMMETRIC = {"decentlam", "choco"}
WIRES = ("bf16", "qsgd", "qsgd node.levels=7")


def cases():
    """Settings of all that goes together: every algorithm, wires, cadences, graphs."""
    for name in algorithms.BUILDERS:
        graph = " graph.name=ring" if name in SYMMETRIC else ""
        yield f"algorithm.name={name}{graph}"
        if name not in ("defacto", "ceca", "qsgd", "choco"):
            yield from (f"algorithm.name={name}{graph} node.wire={wire}" for wire in WIRES[:2])
    for wire in (*WIRES, "sign", "top-k node.kept=0.2", "random-k node.kept=0.5"):
        yield f"algorithm.name=choco graph.name=ring algorithm.consensus_step=0.3 node.wire={wire}"
        if wire not in WIRES[:2]:
            yield f"algorithm.name=parallel node.wire={wire}"
    for name in ("dsgd", "dmsgd", "qg-dmsgd", "dsgt", "momentum-tracking", "sgp", "ceca", "detag"):
        yield f"algorithm.name={name} cadence.name=gossip-pga cadence.period=3"
        yield f"algorithm.name={name} cadence.name=every cadence.period=2"
    for name in ("dsgd", "dsgt", "momentum-tracking"):
        yield f"algorithm.name={name} algorithm.style=awc node.wire=qsgd"
    yield "algorithm.name=dsgt algorithm.style=awc algorithm.local=momentum graph.name=ring"
    yield "algorithm.name=d2 graph.name=star algorithm.local=momentum"
    yield "algorithm.name=d2 graph.name=ring graph.lazy=true algorithm.lazy=false"
    yield "algorithm.name=detag graph.name=ring algorithm.phase=3 algorithm.beta=0.8 node.wire=bf16"
    yield "algorithm.name=qg-dmsgd algorithm.nesterov=true graph.name=random-matching"
    yield "algorithm.name=dsgd algorithm.local=accumadam algorithm.period=3"
    yield "algorithm.name=defacto graph.name=spanning-tree graph.over=ring"
    yield "algorithm.name=slowmo cadence.name=cpsgd cadence.period=4"
    yield "algorithm.name=dsgd graph.name=complete node.wire=qsgd"
    yield "algorithm.name=sgp graph.name=base-3 node.wire=qsgd"
    yield "algorithm.name=sgp graph.name=p-peer-exponential"
    yield "algorithm.name=dsgt graph.name=od-equidyn"
    yield "algorithm.name=dmsgd graph.name=u-equistatic"
    yield "algorithm.name=noloco cadence.period=3 graph.name=base-2"


@cache
def job(settings: str):
    return assemble.load({}, settings.split())


class Driver:
    """Nodes that live here, two slots each, and their steps, as the training loop does them."""

    def __init__(self, settings, n, mixer=None, *, lr=0.1, noise=0.0, scale=1.0, steps=40):
        made = job(settings) if isinstance(settings, str) else settings
        self.lr, self.noise, self.scale, self.job = lr, noise, scale, made
        self.graph = assemble.make_graph(made, n)
        self.methods = assemble.make_algorithms(made, FLAT, self.graph)
        self.method = self.methods[0]
        self.cadence = assemble.make_cadence(made, self.method, self.graph, steps)
        wire = assemble.make_wire(made)
        self.layout = Layout(WIDTHS, self.method.vectors, self.method.scalars, (), wire)
        self.mixer = (mixer or Simulated)(self.graph, self.layout)
        equal = self.method.always_global
        self.x = [self._drawn([0 if equal else 1, slot], equal) for slot in range(2)]
        self.b = [self._drawn([2, slot]) for slot in range(2)]
        self.states = [m.init(x) for m, x in zip(self.methods, self.x, strict=True)]
        self.rhythm, self.index, self.round = self.cadence.init(), 0, 0

    def _drawn(self, key, equal=False):
        rows = [np.random.default_rng([*key, 0 if equal else i]) for i in self.mixer.rows]
        return torch.from_numpy(np.stack([r.standard_normal(512, np.float32) for r in rows]))

    def step(self):
        kind = self.cadence.kind(self.rhythm, self.index)
        if self.method.ahead:
            self._send(self._now(kind, None), None)
        g = [(x - b).mul_(self.scale) for x, b in zip(self.x, self.b, strict=True)]
        if self.noise:
            for slot in range(2):
                g[slot].add_(self._drawn([3, slot, self.index]), alpha=self.noise)
        now = self._now(kind, self.lr)
        if not self.method.ahead:
            self._send(now, g)
        sent, mixed = self.mixer.finish()
        measured = {}
        if kind is Kind.GLOBAL and self.cadence.measures:
            apart = sum(square_norms(mixed[s][0], sent[s][0]) for s in range(2))
            measured = {"variance": float(self.mixer.mean_scalars(apart)), "loss": 1.0}
        for s, method in enumerate(self.methods):
            x, state = self.x[s], self.states[s]
            self.states[s] = method.receive(x, g[s], state, sent[s], mixed[s], now)
        self.rhythm = self.cadence.observe(self.rhythm, now, measured)
        self.index, self.round = self.index + 1, self.round + (kind is Kind.GOSSIP)

    def _now(self, kind, lr):
        return algorithms.Step(self.index, self.round, kind, lr)

    def _send(self, now, g):
        out = self.mixer.outbox(now.round)
        for s, method in enumerate(self.methods):
            gradient = None if g is None else g[s]
            self.states[s] = method.send(self.x[s], gradient, self.states[s], out[s], now)
        self.mixer.start(now.kind, now.round, self.index)

    def run(self, steps):
        for _ in range(steps):
            self.step()
        return self

    def whole(self):
        """Parameters of the nodes here, (rows, 1024)."""
        return torch.cat(self.x, dim=1).clone()

    def optimum(self):
        """Mean of all b, the minimum of the sum; of a simulated driver."""
        return torch.cat(self.b, dim=1).mean(0)


def on_ranks(settings, world, same_host, steps):
    """A driver over windows for each of these settings, after its steps; collective."""

    def windows(graph, layout):
        return open_mixer(graph, layout, world, same_host=same_host, timeout_s=60)

    for each in settings:
        driver = Driver(each, world.size, windows, noise=0.1).run(steps)
        yield driver
        driver.mixer.close()
