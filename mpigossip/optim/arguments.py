"""Checks of the arguments of `Gossip`, and reports about them that are printed once."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from mpigossip.cluster.local_devices import check_device_type, first_device
from mpigossip.cluster.world import World
from mpigossip.config import Job, JobError
from mpigossip.config.readable import abbreviate, print_note_once
from mpigossip.engine.module import LOW
from mpigossip.engine.vector import check_type
from mpigossip.mixing.device.memory import check_default_device
from mpigossip.optim.inner import CombinedOptimizer, check_free

OVERLAPS = ("auto", "never")


def one_module(model: Any, name: str = "model") -> nn.Module:
    """Check that an argument is a module, and return it.

    :param model: the argument to check
    :param name: name of the argument in messages
    :raises JobError: if it is not a module, or if a lazy parameter or buffer has no shape yet
    """
    if isinstance(model, nn.Module):
        for kind, tensors in (
            ("parameter", model.named_parameters()),
            ("buffer", model.named_buffers()),
        ):
            for tensor_name, tensor in tensors:
                if is_lazy(tensor):
                    raise JobError(
                        f"the {name}'s {kind} {tensor_name} has no shape yet, like the "
                        "parameters of LazyLinear before the first batch: call "
                        f"{name}(batch) once, before you create the optimizer"
                    )
        return model
    more = ""
    if isinstance(model, Sequence) and model and all(isinstance(m, nn.Module) for m in model):
        more = "; combine several modules as torch.nn.ModuleList([…])"
    if type(model).__module__ == "numpy" or isinstance(model, torch.Tensor):
        more = "; mpigossip.Averager averages arrays"
    raise JobError(f"{name} is a {type(model).__name__}: pass a torch.nn.Module{more}")


def one_optimizer(optimizer: Any) -> Any:
    """Combine a list of optimizers into one; return anything else unchanged.

    :param optimizer: an optimizer, or a list or tuple of optimizers
    :raises JobError: if the list contains something else, or if two optimizers share a parameter
    """
    if not isinstance(optimizer, list | tuple) or not optimizer:
        return optimizer
    if invalid := [part for part in optimizer if not isinstance(part, torch.optim.Optimizer)]:
        raise JobError(
            f"optimizer: the list contains a {type(invalid[0]).__name__} among its "
            f"{len(optimizer)} elements: pass torch.optim optimizers, such as "
            "[Muon(matrices), AdamW(others)]"
        )
    return optimizer[0] if len(optimizer) == 1 else CombinedOptimizer(optimizer)


def check(world: Any, model: Any, optimizer: Any) -> None:
    """Check that Gossip accepts these objects.

    :param world: object that was given to Gossip as the world
    :param model: object that was given as the model
    :param optimizer: object that was given as the optimizer of the model
    :raises JobError: if one of them has another type; if the optimizer belongs to another Gossip;
        if torch's default device is "meta"; if a parameter is on the meta device, or on a device
        that is neither a CPU nor a GPU; or if a trained parameter is not float32, bfloat16 or
        float16
    """
    if not hasattr(world, "raise_together"):
        raise JobError(
            f"world is a {type(world).__name__}: pass the result of mpigossip.world(), as in "
            "Gossip(world, model, optimizer)"
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        kind = optimizer.__name__ if isinstance(optimizer, type) else type(optimizer).__name__
        raise JobError(
            f"optimizer is {kind}: pass an instance of a torch.optim optimizer, such as "
            "torch.optim.AdamW(model.parameters())"
        )
    check_free(optimizer)
    check_default_device("Gossip")
    for name, p in one_module(model).named_parameters():
        if p.device.type == "meta":
            raise JobError(
                f"the model's parameter {name} is on the meta device, without values: "
                "call model.to_empty(device=…) and initialize it"
            )
        check_device_type(p.device)
        if p.requires_grad:
            check_type(name, p, (torch.float32, *LOW))


def check_overlap(overlap: Any) -> None:
    """Raise JobError if ``overlap`` is not one of `OVERLAPS`."""
    if overlap not in OVERLAPS:
        raise JobError(f'overlap = "{overlap}": choose one of {", ".join(OVERLAPS)}')


def check_callback(job: Job, on_change: object) -> None:
    """Raise JobError if only one of ``survive=True`` and a callable ``on_change`` is given."""
    if job.run.survive and not callable(on_change):
        raise JobError(
            f"survive = True needs a function as on_change, not {on_change!r}: after a rank "
            "failure, only your program can create the data loader again for the remaining nodes; "
            "pass Gossip(…, on_change=function), which is called as function(world)"
        )
    if on_change is not None and not job.run.survive:
        raise JobError(
            "on_change is called after a rank failure, with survive = True only: pass "
            "survive=True, or no on_change"
        )


def report_setup(world: World, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Report, on rank 0, parameters that are not trained, and a single node without a launcher.

    :param world: all ranks
    :param model: model of the program
    :param optimizer: its optimizer
    """
    frozen = [(n, p) for n, p in model.named_parameters() if not p.requires_grad]
    in_groups = {id(p) for group in optimizer.param_groups for p in group["params"]}
    untrained = [
        n for n, p in model.named_parameters() if p.requires_grad and id(p) not in in_groups
    ]
    if world.rank == 0 and frozen:
        count = sum(p.numel() for _, p in frozen)
        print_note_once(
            f"{parameter_list([n for n, _ in frozen])} ({count:,} values) don't require "
            "gradients: all nodes start with the values of rank 0, and exchange these parameters "
            "from the step on at which they require gradients"
        )
    if world.rank == 0 and untrained:
        print_note_once(
            f"{parameter_list(untrained)} are exchanged, but the optimizer does not train them, "
            "because they are in none of its parameter groups"
        )
    if world.comm is not None and world.size == 1 and not world.launched:
        print_note_once(
            "one node alone: no MPI launcher started this process, so nothing is exchanged; "
            "`mpiexec -n 4 python PROGRAM` starts four nodes"
        )


def report_shared_device(world: World, device: str) -> None:
    """Report, for the first such host, that its ranks share GPUs although it has more; collective.

    It has more if `World.device` would give its ranks a larger number of different GPUs.

    :param world: world of all ranks
    :param device: torch device of this rank's parameters, such as "cuda:0"
    """
    index = world.hosts[: world.rank].count(world.hosts[world.rank])
    ranks = world.hosts.count(world.hosts[world.rank])
    gathered = world.gather((device, first_device(index, ranks)))
    for host in sorted(set(world.hosts)) if gathered else ():
        pairs = [
            pair for name, pair in zip(world.hosts, gathered or (), strict=True) if name == host
        ]
        used = {device for device, _ in pairs}
        available = {available for _, available in pairs}
        if all(name.startswith("cuda") for name in used) and len(used) < len(available):
            print_note_once(
                f"{len(pairs)} ranks of {host} train on {', '.join(sorted(used))}, although they "
                f"could use {len(available)} GPUs: move the model to world.device() before "
                "Gossip(…)"
            )
            return


def parameter_list(names: list[str]) -> str:
    """Return "parameter" or "parameters", the first names, and the number of further ones."""
    return f"parameter{'s' * (len(names) > 1)} {abbreviate(names, 3)}"
