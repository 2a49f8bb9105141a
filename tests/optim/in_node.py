"""Training of nodes of several ranks, with FSDP2 or DDP inside a node, and its reference.

The reference runs in one process. It has n full models, each with its own optimizer and with the
mean gradient of the batches of its node. The simulator averages these models with the mixing
matrices W(t) of the graph.
"""

from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from tests.cases import with_world

VOCABULARY = 51
CONTEXT = 12
WIDTH = 20
BATCH = 4
"""Sizes of the model: 2 and 3 do not divide the vocabulary size, 3 does not divide the width."""
SGD = ("dmsgd", "qg-dmsgd", "decentlam", "detag", "defacto")


class Case(NamedTuple):
    """Settings of a training, which are equal on all ranks."""

    algorithm: str = "dsgd"
    options: tuple[tuple[str, object], ...] = ()
    clip: float | None = 0.25
    steps: int = 20
    compiled: bool = False
    bf16: bool = False
    copies: bool = False
    """True: hide the private attributes of FSDP2, so that the flat parameters are copies."""
    ddp: bool = False
    device: str = "cpu"


class Block(nn.Module):
    """Causal attention and a network of two layers, both with a residual connection."""

    def __init__(self):
        super().__init__()
        self.before = nn.LayerNorm(WIDTH)
        self.between = nn.LayerNorm(WIDTH)
        # The gradient of a bias of keys is 0 up to rounding errors. AdamW would divide these by
        # their own size, so that differences between two trainings would grow.
        self.attend = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.project = nn.Linear(WIDTH, WIDTH)
        self.wide = nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        b, t, _ = x.shape
        parts = self.attend(self.before(x)).split(WIDTH, dim=2)
        q, k, v = (part.view(b, t, 2, -1).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(y.transpose(1, 2).reshape(b, t, WIDTH))
        return x + self.narrow(F.gelu(self.wide(self.between(x))))


class GPT(nn.Module):
    """Model that maps tokens (batch, time) and their successors to the mean loss; tied head."""

    def __init__(self, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, inputs, targets):
        x = self.tokens(inputs) + self.places(torch.arange(inputs.shape[1], device=inputs.device))
        for block in self.blocks:
            x = block(x)
        scores = self.head(self.norm(x)) * self.scale
        return F.cross_entropy(scores.flatten(0, 1).float(), targets.flatten())


def batch(node: int, slot: int, step: int):
    draw = torch.Generator().manual_seed(10_000 * node + 100 * slot + step)
    rows = torch.randint(VOCABULARY, (BATCH, CONTEXT + 1), generator=draw)
    return rows[:, :-1], rows[:, 1:]


def optimizer_of(model: nn.Module, algorithm: str) -> torch.optim.Optimizer:
    wide = [p for p in model.parameters() if p.dim() > 1]
    narrow = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": wide, "weight_decay": 0.1}, {"params": narrow, "weight_decay": 0.0}]
    if algorithm in SGD:
        return torch.optim.SGD(groups, lr=0.1)
    return torch.optim.AdamW(groups, lr=3e-3)


def wrap_model(world, model: nn.Module, case: Case) -> nn.Module:
    """Return the model in DDP or sharded by FSDP2, as the ranks of its node train it."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if case.ddp:
        return nn.parallel.DistributedDataParallel(model, process_group=world.node_group())
    mesh = world.node_mesh()
    more = {}
    if case.bf16:
        more["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **more)
    fully_shard(model, mesh=mesh, **more)
    return torch.compile(model, backend="aot_eager") if case.compiled else model


def whole(model: nn.Module) -> torch.Tensor:
    """Return all parameters in one tensor; collective over the node if they are sharded."""
    full = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return torch.cat([p.detach().reshape(-1) for p in full])


def train_nodes(world, case: Case, per: int) -> torch.Tensor:
    """Train on nodes of ``per`` ranks, and return the parameters of this node, (P,)."""
    from mpigossip.engine import sharded
    from mpigossip.optim.gossip import Gossip

    node = world.nodes.inter_node.rank
    place = world.nodes.local_rank
    known = sharded.fsdp_records
    if case.copies:
        sharded.fsdp_records = lambda model: {}
    device = torch.device(case.device, world.rank if case.device == "cuda" else None)
    if case.device == "cuda":
        torch.cuda.set_device(device)
    model = GPT(node).to(device)
    model.head.weight = model.tokens.weight  # `.to()` of the simulated GPU separates tied weights
    made = wrap_model(world, model, case)
    optimizer = Gossip(
        world, made, optimizer_of(model, case.algorithm), case.algorithm, **dict(case.options)
    )
    for step in range(case.steps):
        optimizer.zero_grad()
        made(*(one.to(device) for one in batch(node, place, step))).backward()
        if case.clip:
            nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        optimizer.step()
    if not case.ddp:
        assert optimizer.vector.copies is case.copies
    result = whole(model)
    optimizer.close()
    sharded.fsdp_records = known
    return result


@with_world(timeout_s=60)
def train_cases(world, cases: list[Case], per: int):
    """Return the index of this node, and its parameters after each case; call it on every rank."""
    world.group_into_nodes(per)
    results = [train_nodes(world, case, per).cpu().numpy() for case in cases]
    return world.nodes.inter_node.rank, results


def simulated(job, graph, models, optimizers, steps: int, backward) -> None:
    """Train the models of all nodes in this process, by the engine and the simulator's mixer.

    The function ``backward(model, node, step)`` computes the gradients of a node.
    """
    from mpigossip.algorithms import takes_local
    from mpigossip.cluster.world import SingleProcess
    from mpigossip.engine.module import ModuleParameters
    from mpigossip.groups.base import Single
    from mpigossip.optim.inner import OptimizerState, decay, local_step_from_optimizers
    from mpigossip.training.parts import make_parts

    vector = ModuleParameters(models)
    local = local_step_from_optimizers(vector, optimizers)
    parts = make_parts(job, graph, vector.flat, devices=("cpu",), local=local)
    with torch.no_grad():
        vector.x[0][1:] = vector.x[0][:1]  # all nodes begin with the model of node 0
    arrays = OptimizerState(vector, optimizers)
    engine = parts.make_engine(parts.open_mixer(SingleProcess()), Single(), vector, 0, arrays)
    decayed = () if takes_local(job.algorithm.name) else optimizers
    for step in range(steps):
        for node, model in enumerate(models):
            model.zero_grad()
            backward(model, node, step)
        with torch.no_grad():
            if not engine.method.raw:
                vector.gather()
                for node, one in enumerate(decayed):
                    decay(vector, one, node)
            engine.step(optimizers[0].param_groups[0]["lr"])


def reference_parameters(n: int, per: int, case: Case) -> torch.Tensor:
    """Return the parameters of all nodes after the training of the reference, (n, P).

    :param n: number of nodes
    :param per: number of ranks per node, whose batches are averaged
    :param case: settings of the training
    """
    from mpigossip.training import assemble
    from mpigossip.training.parts import make_graph

    homes = {
        "graph": ("graph", "name"),
        "cadence": ("cadence", "name"),
        "exchange": ("node", "exchange"),
        "period": ("cadence", "period"),
        "total": ("cadence", "total"),
    }
    sections = {"algorithm": {"name": case.algorithm}}
    for key, value in case.options:
        section, name = homes.get(key, ("algorithm", key))
        sections.setdefault(section, {})[name] = value
    job = assemble.load(sections)
    models = [GPT(node) for node in range(n)]
    optimizers = [optimizer_of(model, case.algorithm) for model in models]

    def backward(model, node, step):
        _gradient(model, node, per, step, case.bf16)
        if case.clip:
            clip(model, case.clip, 1 if case.ddp else per)

    simulated(job, make_graph(job, n), models, optimizers, case.steps, backward)
    return torch.stack([whole(model) for model in models])


def clip(model: nn.Module, most: float, per: int) -> None:
    """Clip the gradients of a full model as torch clips the gradients of a sharded model.

    For a sharded parameter, torch computes the norm from the norms of the shards, which is rounded
    differently.
    """
    parameters = list(model.parameters())
    norms = [
        sum(torch.linalg.vector_norm(piece).pow(2) for piece in p.grad.chunk(per)).pow(0.5)
        for p in parameters
    ]
    total = torch.linalg.vector_norm(torch.stack(norms))
    nn.utils.clip_grads_with_norm_(parameters, most, total)


def _gradient(model: GPT, node: int, per: int, step: int, bf16: bool) -> None:
    """Add the mean gradient of a node's batches to ``.grad``, summed in the order of its slots."""
    for slot in range(per):
        inputs, targets = batch(node, slot, step)
        if not bf16:
            (model(inputs, targets) / per).backward()
            continue
        low = GPT(0).bfloat16()
        low.load_state_dict(model.state_dict())
        low(inputs, targets).backward()
        for p, q in zip(model.parameters(), low.parameters(), strict=True):
            gradient = q.grad.float() / per
            p.grad = gradient if p.grad is None else p.grad + gradient
