"""Every test input of torch's own optimizers through `mpigossip.Gossip`.

    python tools/labs/optim_db.py                  # one node: bitwise equal to torch alone
    mpirun -n 4 python tools/labs/optim_db.py      # a complete graph: the mean of torch's steps

Each input with each implementation (for-loop, foreach, fused), with and without a closure, and
with `state_dict()` loaded into new objects half way. Rank 0 prints what was rejected at
construction and what was wrong; exit code 1 then. Needs the package expecttest, as torch's own
tests do.
"""

from __future__ import annotations

import copy
import sys
from collections import Counter
from typing import Any

import torch
from torch.testing._internal.common_optimizers import optim_db

import mpigossip
from mpigossip.config import JobError

STEPS = 6


def model(matrices: bool, sparse: bool) -> torch.nn.Module:
    """A small network of matrices and vectors, of matrices alone, or an embedding."""
    torch.manual_seed(0)
    if sparse:
        return torch.nn.Sequential(torch.nn.Embedding(7, 3, sparse=True))
    layers = [torch.nn.Linear(5, 4, not matrices), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(4, 3, not matrices))


def loss(made: torch.nn.Module, rank: int, step: int) -> torch.Tensor:
    """The loss of a rank's data of this step."""
    draw = torch.Generator().manual_seed(100 * rank + step)
    if isinstance(made[0], torch.nn.Embedding):
        return made(torch.randint(0, 7, (4,), generator=draw)).square().sum()
    return made(torch.randn(6, 5, generator=draw)).square().mean()


def advance(made: torch.nn.Module, optimizer: Any, rank: int, step: int, closure: bool) -> None:
    """Backward and step, or a step with a closure."""

    def again() -> torch.Tensor:
        optimizer.zero_grad()
        found = loss(made, rank, step)
        found.backward()
        return found

    if closure:
        optimizer.step(again)
    else:
        again()
        optimizer.step()


def plain(world: Any, make: Any, made: torch.nn.Module, rank: int, closure: bool) -> None:
    """Torch's own steps; between ranks the mean of parameters after each."""
    optimizer = make(made)
    for step in range(STEPS):
        advance(made, optimizer, rank, step, closure)
        with torch.no_grad():
            for p in made.parameters() if world.size > 1 else ():
                rows = world.broadcast(world.gather(p.detach().clone()))
                p.copy_(torch.stack(rows).double().mean(0))


def gossiping(world: Any, make: Any, made: torch.nn.Module, closure: bool, half: bool) -> Any:
    """The same through Gossip, which with ``half`` goes on in new objects; the parameters."""
    gossip = mpigossip.Gossip(world, made, make(made), "dsgd", "complete")
    for step in range(STEPS):
        if half and step == STEPS // 2:
            kept = copy.deepcopy((made.state_dict(), gossip.state_dict()))
            gossip.close()
            made = copy.deepcopy(made)
            gossip = mpigossip.Gossip(world, made, make(made), "dsgd", "complete")
            made.load_state_dict(kept[0])
            gossip.load_state_dict(kept[1])
        advance(made, gossip, world.rank, step, closure)
    world.barrier()
    gossip.close()
    return [p.detach().clone() for p in made.parameters()]


def cases() -> Any:
    """Name, a maker of the optimizer of a module, and whether it takes matrices or sparse ones."""
    for info in optim_db:
        for given in info.optim_inputs_func(device="cpu"):
            for way in ("forloop", *info.supported_impls):
                kwargs = dict(given.kwargs) | ({way: True} if way != "forloop" else {})
                if way == "forloop" and "foreach" in info.supported_impls:
                    kwargs["foreach"] = False
                name = f"{info.optim_cls.__name__} {kwargs}"
                yield (
                    name,
                    info,
                    lambda made, i=info, k=kwargs: i.optim_cls(
                        made.parameters(), **copy.deepcopy(k)
                    ),
                )


def outcome(world: Any, info: Any, make: Any) -> str:
    """What became of an input: "equal", "refused: …" or "WRONG: …"."""
    sparse, matrices = info.only_supports_sparse_grads, info.optim_cls.__name__ == "Muon"
    for closure, half in ((False, False), (True, False), (False, True)):
        mine, theirs = model(matrices, sparse), model(matrices, sparse)
        try:
            make(theirs)
        except (ValueError, RuntimeError) as error:
            return f"torch refuses: {error}"
        try:
            found = gossiping(world, make, mine, closure, half)
        except JobError as error:
            return f"refused: {error}"
        plain(world, make, theirs, world.rank, closure)
        for got, want in zip(found, theirs.parameters(), strict=True):
            same = torch.equal(got, want.detach())
            if not same if world.size == 1 else not torch.allclose(got, want, 2e-4, 2e-6):
                return f"WRONG: closure {closure}, half {half}: {(got - want).abs().max():.3g}"
    return "equal"


def main() -> int:
    """All inputs."""
    torch.set_num_threads(1)
    found: Counter[str] = Counter()
    with mpigossip.world(120.0) as world:
        for name, info, make in cases():
            said = outcome(world, info, make)
            found[said.partition(":")[0]] += 1
            if said != "equal" and (world.rank == 0 or "WRONG" in said):
                print(f"{name} | {said[:160]}", flush=True)
        if world.rank == 0:
            print(world.size, dict(found))
    return int(found["WRONG"] > 0)


if __name__ == "__main__":
    sys.exit(main())
