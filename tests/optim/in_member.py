"""Program that is a member: of several ranks, with DDP or FSDP2, or of one process.

python -m tests.optim.in_member FOLDER ddp|fsdp|plain [replay] [vanish] [CHUNKS]
python -m tests.optim.in_member FOLDER large|frozen
"""

import errno
import sys
import time
from pathlib import Path

import torch
from torch import nn

import mpigossip
from mpigossip.store import StoreError
from mpigossip.store.piecewise import StoredModel

CHUNKS = 60


def wrapped(model, kind, world):
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model, process_group=world.node_group())
    if kind == "fsdp":
        from torch.distributed.fsdp import fully_shard

        fully_shard(model[0], mesh=world.node_mesh())
        fully_shard(model, mesh=world.node_mesh())
    return model


def peak(field):
    """Return a value of /proc/self/status in bytes, such as "VmHWM"."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    (line,) = (line for line in lines if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def train_large(folder, world):
    """Train on a model of 40 MB, and print by how much the memory grew in exchanges, in bytes.

    Each measurement begins after the step of a chunk, so that gradients and the optimizer's state
    exist already.
    """
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(1000, 1000, bias=False) for _ in range(10)])
    for module in (*model, model):
        fully_shard(module, mesh=world.node_mesh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    limit = grown = 0
    with mpigossip.join(
        folder, model, optimizer, chunks=4, lease_s=600.0, poll_s=0.1, world=world
    ) as member:
        for chunk in member:
            if limit:  # the exchange after a chunk is over
                grown = max(grown, peak("VmHWM") - limit)
            optimizer.zero_grad()
            model(torch.full((1, 1000), chunk / 10)).square().mean().backward()
            optimizer.step()
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
            limit = peak("VmRSS")
    grown = max(grown, peak("VmHWM") - limit)  # reading of the final models, and the checkpoint
    sys.stdout.write(f"rank {world.rank}: finished {member.finished}, grown {grown}\n")
    sys.stdout.flush()


def train_frozen(folder, world):
    """Freeze a layer after a step, train as a member, and print whether its state was kept."""
    torch.manual_seed(0)
    model = wrapped(nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 1)), "fsdp", world)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def step(seed):
        optimizer.zero_grad()
        inputs = torch.randn(8, 3, generator=torch.Generator().manual_seed(seed))
        model(inputs).square().mean().backward()
        optimizer.step()

    def state():
        values = optimizer.state[model[0].weight]
        return {key: getattr(v, "full_tensor", lambda v=v: v)() for key, v in values.items()}

    step(0)
    model[0].requires_grad_(False)
    before = state()
    with mpigossip.join(
        folder, model, optimizer, chunks=3, lease_s=20.0, poll_s=0.1, world=world
    ) as member:
        for chunk in member:
            step(chunk)
    after = state()
    kept = before.keys() == after.keys() and all(torch.equal(before[k], after[k]) for k in before)
    sys.stdout.write(f"rank {world.rank}: finished {member.finished}, kept {kept}\n")
    sys.stdout.flush()


def vanish_once():
    """Let the fifth read of a model fail, because another member has removed its file."""
    read = StoredModel.parameters
    calls = []

    def parameters(self, begin, end):
        calls.append(begin)
        if len(calls) == 5:
            raise StoreError("it was removed") from OSError(errno.ESTALE, "stale file handle")
        return read(self, begin, end)

    StoredModel.parameters = parameters


def train(folder, kind, world, replay, chunks):
    torch.manual_seed(0)
    # The 7 rows of a matrix can't be divided equally among 2 ranks.
    model = wrapped(nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 1)), kind, world)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    more = {} if world is None else {"world": world}
    rank, size = (0, 1) if world is None else (world.rank, world.size)
    with mpigossip.join(
        folder, model, optimizer, chunks=chunks, lease_s=20.0, poll_s=0.1, replay=replay, **more
    ) as member:
        for chunk in member:
            inputs = torch.randn(8, 3, generator=torch.Generator().manual_seed(chunk))[rank::size]
            for _ in range(2):
                optimizer.zero_grad()
                loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
                loss.backward()
                optimizer.step()
            member.log(loss=loss)
            time.sleep(0 if replay or chunks < CHUNKS else 0.2)
    full = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    total = torch.cat([p.detach().ravel() for p in full]).double().sum().item()
    # Write the line by one call, because several ranks write to the same output.
    sys.stdout.write(f"rank {rank}: finished {member.finished}, sum {total!r}\n")
    sys.stdout.flush()


def main(folder, kind, *more):
    replay = "replay" in more
    chunks = next((int(word) for word in more if word.isdigit()), CHUNKS)
    if kind == "plain":
        train(folder, kind, None, replay, chunks)
        return
    with mpigossip.world(ranks_per_node="host") as world:
        if kind == "large":
            train_large(folder, world)
            return
        if kind == "frozen":
            train_frozen(folder, world)
            return
        if "vanish" in more and world.rank == 1:
            vanish_once()
        train(folder, kind, world, replay, chunks)


if __name__ == "__main__":
    main(*sys.argv[1:])
