"""Toy training loops, as users write them, and changes of the state that they save.

:func:`run_loop` trains with one rank per node, :func:`train_on_nodes` with several and DDP. Both
have a run directory, from whose newest checkpoint they resume.
"""

import hashlib

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mpigossip
from mpigossip.cluster.mpi_world import MPIWorld
from tests import survivors
from tests.cases import with_world
from tests.optim.in_node import GPT, Case, batch, optimizer_of, whole, wrap_model

NODES = 2
PER = 2
"""Ranks of a node."""
STEPS = 7
"""Steps of a complete :func:`run_loop`."""
BATCH = 8


def network(seed, norm=True):
    """Return a model whose initial values depend on the seed."""
    torch.manual_seed(seed)
    third = nn.BatchNorm1d(60) if norm else nn.Tanh()
    return nn.Sequential(nn.Linear(20, 60), nn.Tanh(), third, nn.Linear(60, 5))


def loss_of(model, draw, node, slot, step):
    """Return the loss on a batch of the step, with noise from the slot's kept generator."""
    batch = torch.Generator().manual_seed(1000 * node + 10 * slot + step)
    inputs = torch.randn(BATCH, 20, generator=batch) + 0.1 * torch.randn(BATCH, 20, generator=draw)
    return nn.functional.mse_loss(model(inputs), torch.randn(BATCH, 5, generator=batch))


def begin_on_nodes(world, folder, model, whole, limit=30.0):
    """Return the optimizer of a loop with a run directory, and its schedule."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    gossip = mpigossip.Gossip(world, whole, optimizer, run=folder, flush_steps=3, timeout_s=limit)
    schedule = torch.optim.lr_scheduler.StepLR(gossip, 3, 0.5)
    return gossip, schedule


@with_world(timeout_s=30)
def train_on_nodes(world, folder, steps, save_at=(), after=None, per=PER, norm=True, limit=30.0):
    """Train on nodes of PER ranks; return the result of ``after`` and the resumed step."""
    world.group_into_nodes(per)
    node = world.nodes.inter_node.rank
    slot = world.nodes.local_rank
    whole = model = network(node, norm)
    if per > 1:
        whole = DistributedDataParallel(model, process_group=world.node_group())
    gossip, schedule = begin_on_nodes(world, folder, model, whole, limit)
    draw = torch.Generator().manual_seed(world.rank)
    gossip.keep(draw=draw, schedule=schedule)
    start = gossip.resume()
    for step in range(start, steps):
        gossip.zero_grad()
        loss = loss_of(whole, draw, node, slot, step)
        loss.backward()
        gossip.step()
        schedule.step()
        gossip.log(loss=loss, samples=BATCH, slot=slot)
        if step + 1 in save_at:
            gossip.save()
    result = after(world, gossip, whole) if after else None
    return (
        start,
        [p.detach().numpy().copy() for p in (*model.parameters(), *model.buffers())],
        result,
    )


def make_steps(world, algorithm="dmsgd", shape=(4, 3), steps=2):
    """Return the optimizer of a loop after some steps."""
    model = nn.Linear(*shape)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    gossip = mpigossip.Gossip(world, model, inner, algorithm=algorithm)
    for _ in range(steps):
        gossip.zero_grad()
        model(torch.ones(2, shape[0])).sum().backward()
        gossip.step()
    return gossip


def set_entry(name, value):
    """Return a change of a saved state: set an entry, or apply a function to it."""

    def change(state):
        state["gossip"][name] = value(state["gossip"][name]) if callable(value) else value

    return change


def change_arrays(change):
    """Return a change of a saved state that applies a function to the arrays of the algorithm."""
    return set_entry("arrays", lambda arrays: {name: change(a) for name, a in arrays.items()})


def make_model(rank, width=5, inner="AdamW"):
    """Return a model and its optimizer, whose initial values differ between ranks."""
    torch.manual_seed(rank)
    model = torch.nn.Sequential(
        torch.nn.Linear(6, width),
        torch.nn.BatchNorm1d(width),
        torch.nn.Dropout(0.3),
        torch.nn.Linear(width, 2),
    )
    narrow = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": narrow, "lr": 0.03}, {"params": [model[0].weight, model[3].weight]}]
    return model, getattr(torch.optim, inner)(groups if inner == "AdamW" else narrow, lr=0.02)


def digest(model):
    """Return the digest of a model's parameters and buffers."""
    values = [*model.parameters(), *model.buffers()]
    return hashlib.sha256(b"".join(v.detach().numpy().tobytes() for v in values)).hexdigest()


def begin_run(world, folder, inner="AdamW", keep=True, **options):
    """Return model, optimizer, generator and schedule of a loop with a run directory."""
    model, optimizer = make_model(world.rank, inner=inner)
    gossip = mpigossip.Gossip(world, model, optimizer, run=folder, **options)
    draw = torch.Generator().manual_seed(world.rank)
    schedule = torch.optim.lr_scheduler.OneCycleLR(gossip, 0.05, STEPS)
    if keep:
        gossip.keep(draw=draw, schedule=schedule)
    return model, gossip, draw, schedule


def train_steps(model, gossip, draw, schedule, steps):
    """Make steps, and log the loss of each."""
    for _ in steps:
        gossip.zero_grad()
        loss = model(torch.randn(8, 6, generator=draw)).square().mean()
        loss.backward()
        gossip.step()
        schedule.step()
        gossip.log(loss=loss, samples=8)


def run_loop(comm, folder, steps, save_at=(), options=None):
    """Run the loop from its newest checkpoint; return digest, learning rates and resumed step."""
    with MPIWorld(comm) as world:
        model, gossip, draw, schedule = begin_run(world, folder, **(options or {}))
        start = gossip.resume()
        for step in range(start, steps):
            train_steps(model, gossip, draw, schedule, [step])
            if step + 1 in save_at:
                gossip.save()
    rates = [group["lr"] for group in gossip.param_groups]
    return digest(model), rates, start


@torch.no_grad()
def mix_models(models, t):
    """Average the trained parameters by W(t)."""
    survivors.mix([[p for p in model.parameters() if p.requires_grad] for model in models], t)


@with_world(timeout_s=30)
def train_sharded(world, folder, per, steps, ddp=False, save=False):
    """Train on nodes of ``per`` ranks; return the step resumed from and the final parameters."""
    world.group_into_nodes(per)
    model = GPT(world.nodes.inter_node.rank)
    wrapped_model = model if ddp and per == 1 else wrap_model(world, model, Case(ddp=ddp))
    optimizer = mpigossip.Gossip(
        world,
        wrapped_model,
        optimizer_of(model, "d2"),
        "d2",
        "ring",
        algorithm_lazy=True,
        graph_lazy=True,
        run=folder,
    )
    draw = torch.Generator().manual_seed(world.rank)
    optimizer.keep(draw=draw)
    start = optimizer.resume()
    drawn = float(torch.rand((), generator=draw))
    for step in range(start, steps):
        optimizer.zero_grad()
        wrapped_model(*batch(world.nodes.inter_node.rank, world.nodes.local_rank, step)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    if save:
        optimizer.save()
    return start, drawn, whole(model).numpy()
