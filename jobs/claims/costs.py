"""Claims on costs: the times of `graph show`, a simulated step, and a step with `node.vmap`."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from time import process_time
from timeit import timeit

import numpy as np
import torch
from table import Row

from mpigossip.cluster.world import SingleProcess
from mpigossip.models import loss_and_correct
from mpigossip.training import assemble


def speed(options) -> Iterator[Row]:
    """Measure `graph show` for 4,096 nodes, and a simulated step.

    The time of the step is compared with the time that its gradients alone take.
    """
    seconds_of = {}
    for name in (
        "exponential",
        "ring",
        "ring-lattice",
        "one-peer-exponential",
        "one-peer-hypercube",
        "base-2",
    ):
        begin = sum(os.times()[2:4])  # This is the processor time of finished child processes.
        command = [sys.executable, "-m", "mpigossip", "graph", "show", name, "--nodes", "4096"]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        seconds_of[name] = sum(os.times()[2:4]) - begin
    yield Row(
        "`graph show`, n = 4,096: circulant and one-peer graphs, processor time of the command",
        "requirement of this project",
        "< 2 s",
        ", ".join(f"{name} {seconds:.2f} s" for name, seconds in seconds_of.items()),
        max(seconds_of.values()) < 2,
    )
    data = {"source": "synthetic", "samples": 32 * 64, "workers": 0}
    assembly = _assemble(64, data=data, model={"name": "lenet"})
    module = assemble.make_model(assembly.parts.job, assembly.source)
    batches = list(assembly.loader.step(0))

    def gradients() -> None:
        for inputs, targets in batches:
            module.zero_grad()
            loss_and_correct(module(inputs), targets)[0].backward()

    step, gradient = _smallest_seconds(4 if options.quick else 7, assembly.trainer.step, gradients)
    assembly.close()
    yield Row(
        "64 LeNet nodes (batch 32, CIFAR's shape) simulated: time of a step, against 64 single "
        "gradients",
        "requirement of this project",
        "≤ 1.3 times",
        f"{step * 1e3:.0f} ms against {gradient * 1e3:.0f} ms: {step / gradient:.2f} times",
        step <= 1.3 * gradient,
    )


def _assemble(n: int, **sections):
    """Return the assembled training of ``n`` simulated nodes.

    :param n: number of nodes
    :param sections: settings of the job, as one dict per section
    """
    return assemble.assemble(
        assemble.load({"log": {"consensus_every": 0}, **sections}), SingleProcess(), n
    )


def _smallest_seconds(turns: int, *functions: Callable) -> list[float]:
    """Return the shortest processor time of a call of each function, in seconds.

    :param turns: number of calls of each function; the functions take turns
    :param functions: functions without parameters
    """
    laps = [
        [timeit(function, timer=process_time, number=1) for function in functions]
        for _ in range(turns)
    ]
    return np.min(laps, axis=0).tolist()


def vectorized(options) -> Iterator[Row]:
    """Compare the time of simulated steps with `node.vmap` and with a loop over nodes.

    With `node.vmap`, small models are faster, and convolutions on a CPU are slower.
    """
    data = {"source": "digits", "batch": 4, "workers": 0}
    for name, n in (("mlp", 256), ("lenet", 64)):
        both = [
            _assemble(n, data=data, model={"name": name}, node={"vmap": v}) for v in (False, True)
        ]
        loop, vmap = (
            1e3 * lap for lap in _smallest_seconds(3, *(assembly.trainer.step for assembly in both))
        )
        ends = [assembly.trainer.replicas.full[0].clone() for assembly in both]
        difference = float(torch.dist(*ends) / torch.linalg.norm(ends[0]))
        for assembly in both:
            assembly.close()
        yield Row(
            f"node.vmap, {n} {name} nodes on digits: time of a step",
            "requirement of this project",
            "equal results except for rounding",
            f"loop {loop:.0f} ms, vmap {vmap:.0f} ms; relative difference {difference:.0e}",
            difference < 1e-5,
        )


CLAIMS = (speed, vectorized)
