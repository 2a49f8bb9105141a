"""Expected results of jobs/loops/survive.py after rank failures, computed without MPI."""

import hashlib
import importlib.util
import re

import torch
from torch import nn

from mpigossip.graphs import graph
from mpigossip.mixing.combine import weighted_sum
from tests.launch import REPO

SCRIPT = REPO / "jobs/loops/survive.py"
DIGEST = re.compile(r"node (\d+) of (\d+): loss \S+, ([0-9a-f]{64})")  # ranks may share a line
LOST = re.compile(r"rank (\d+) on \S+ failed after step (\d+) ")


def lost(err):
    """Return the ranks that failed together and the step of the restart, by the survivors."""
    matches = [LOST.findall(line) for line in err.splitlines()]
    return [({int(name) for name, _ in each}, int(each[0][1])) for each in matches if each]


def digests(out):
    """Return the final digests of the nodes by name."""
    return {int(name): digest for name, _, digest in DIGEST.findall(out)}


def script():
    spec = importlib.util.spec_from_file_location("survive_loop", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Node:
    """Node with a model, SGD with momentum, and the rank that it had at the start."""

    def __init__(self, name, loop):
        self.name = name
        self.loop = loop
        self.model = loop.net()
        self.inner = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)

    def step(self, rank, size, step):
        inputs, targets = self.loop.Loader(rank, size).batch(step)
        self.inner.zero_grad()
        nn.functional.mse_loss(self.model(inputs), targets).backward()
        self.inner.step()

    def values(self):
        return [p.data for p in self.model.parameters()]

    def momentum(self):
        return [self.inner.state[p]["momentum_buffer"] for p in self.model.parameters()]

    def digest(self):
        flat = torch.cat([value.reshape(-1) for value in self.values()]).numpy()
        return hashlib.sha256(flat.tobytes()).hexdigest()


def weighted(columns, weights, dtype=torch.float32):
    """Return Σ_k weights[k] columns[k] of tensors with equal shapes, as new tensors."""
    sums = []
    for parts in zip(*columns, strict=True):
        rows = [part.reshape(1, -1).to(dtype) for part in parts]
        sums.append(weighted_sum(weights, rows, torch.empty_like(rows[0])).view(parts[0].shape))
    return sums


def mix(models, t):
    """Mix the lists of tensors of all nodes in round t, in place; a node's own term comes first."""
    made = graph("one-peer-exponential", len(models))
    averages = []
    for i, model in enumerate(models):
        sources, weights, own = made.neighbours(t, i)
        columns = [model, *(models[j] for j in sources)]
        averages.append(weighted(columns, [float(own), *map(float, weights)]))
    for model, new in zip(models, averages, strict=True):
        for value, after in zip(model, new, strict=True):
            value.copy_(after)


def expected(n, steps, losses=()):
    """Return the final digests by name; ``losses``: result of :func:`lost`."""
    return {node.name: node.digest() for node in after(n, steps, losses)}


def after(n, steps, losses=()):
    """Return the surviving nodes."""
    torch.set_num_threads(1)
    loop = script()
    nodes = [Node(name, loop) for name in range(n)]
    t = 0
    todo = list(losses)
    for step in range(steps):
        while todo and todo[0][1] == step:
            nodes = [node for node in nodes if node.name not in todo[0][0]]
            todo = todo[1:]
            t = 0
            become_average(nodes, Node.values, torch.float64)
            if step:
                become_average(nodes, Node.momentum, torch.float64)
        for rank, node in enumerate(nodes):
            node.step(rank, len(nodes), step)
        mix([node.values() for node in nodes], t)
        t += 1
    return nodes


def become_average(nodes, which, dtype):
    means = weighted([which(node) for node in nodes], [1 / len(nodes)] * len(nodes), dtype)
    for node in nodes:
        for value, mean in zip(which(node), means, strict=True):
            value.copy_(mean)
