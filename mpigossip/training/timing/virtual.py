"""The virtual clock: what steps would have taken the nodes of a named or measured machine."""

from __future__ import annotations

import numpy as np

from mpigossip.config import Job
from mpigossip.mixing.base import Kind
from mpigossip.mixing.faults import Faults
from mpigossip.training import assemble
from mpigossip.training.costs import exchanges_of
from mpigossip.training.timing.machines import named
from mpigossip.training.timing.steps import Clock, Timing

DRAWS = 5
"""Keeps what is drawn here apart from what else the run's seed gives."""


class VirtualClock:
    """Seconds since the beginning that each node would have needed, by the job's `[clock]`.

    A function of the job, the number of nodes and what each step exchanged; it changes nothing.
    """

    def __init__(self, job: Job, assembly: assemble.Assembly, begun: np.ndarray | None = None):
        """``begun`` (n,): when each node was through with the steps before, NaN: not known."""
        section, engine, graph = job.clock, assembly.engine, assembly.graph
        self._machine, self._fragments = named(section), engine.cadence.turns.fragments
        flat = assembly.trainer.replicas.flat
        made = exchanges_of(job, flat, graph, engine.method, engine.cadence)
        self._clock = Clock(Timing(job, made, self._machine))
        if begun is not None:
            self._clock.now[0] = begun
        self._round, self._seed, self._engine = engine.round, job.run.seed, engine
        # the stragglers of a simulated asynchronous run are its own
        ill, own = job.faults, job.faults.slow_times > 1
        slow = ill if own else section
        self._slow = Faults(
            graph.n, job.run.seed, slow.slow_times, slow.slow_nodes, slow.slow_steps
        )

    def step(self, index: int, kind: Kind) -> np.ndarray:
        """(n,): seconds at the end of step ``index``."""
        machine, n = self._machine, len(self._clock.now[0])
        pace = 1 + machine.jitter * normal((self._seed, DRAWS, index), n)
        pace = np.maximum(pace, 0.0) * self._slow.costs(index)
        begun = index - self._engine.born
        pace[list(self._engine.cadence.resting(begun, range(n)))] = 0.0
        self._clock.step(kind, self._round // self._fragments, machine.compute_s * pace[None])
        self._round += kind is Kind.GOSSIP
        return self._clock.now[0]


def normal(key: tuple[int, ...], count: int) -> np.ndarray:
    """Standard normal numbers from the key alone, the same with every numpy (Box and Muller)."""
    words = np.random.Philox(np.random.SeedSequence(key)).random_raw(2 * count)
    u = (words.astype(np.float64) + 0.5) / 2.0**64
    return np.sqrt(-2 * np.log(u[:count])) * np.cos(2 * np.pi * u[count:])
