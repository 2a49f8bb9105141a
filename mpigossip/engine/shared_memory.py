"""Check for tensors of a model that share memory although they aren't the same Parameter."""

from collections.abc import Iterable

import torch
from torch import nn

from mpigossip.config import JobError


def check_separate(model: nn.Module) -> None:
    """Raise JobError if a trained parameter shares memory with another parameter or a buffer.

    Each trained parameter gets memory of its own in the vector that nodes average, which would
    separate the two without notice. Weights that are tied by one Parameter are one tensor.
    """
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    tensors = [(f"parameter {name}", p) for name, p in model.named_parameters()]
    tensors += [(f"buffer {name}", b) for name, b in model.named_buffers()]
    # tensors that begin before the next one and may overlap with it
    reaching: list[tuple[str, torch.Tensor]] = []
    for name, tensor in sorted(_in_memory(tensors), key=lambda one: _address(one[1])):
        device, begin = _address(tensor)
        reaching = [
            (other, before)
            for other, before in reaching
            if str(before.device) == device and before.data_ptr() + _extent(before) > begin
        ]
        for other, before in reaching:
            counts = id(tensor) in trained or id(before) in trained
            if counts and _overlap(before, tensor):
                raise JobError(shared(other, name))
        reaching.append((name, tensor))


def _address(tensor: torch.Tensor) -> tuple[str, int]:
    return str(tensor.device), tensor.data_ptr()


def _in_memory(tensors: Iterable[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors that have an address: plain, with elements, not on the meta device."""
    return [
        (name, tensor)
        for name, tensor in tensors
        if type(tensor) in (torch.Tensor, nn.Parameter)
        and tensor.layout == torch.strided
        and tensor.device.type != "meta"
        and tensor.numel()
    ]


def _extent(tensor: torch.Tensor) -> int:
    """Return the number of bytes from a tensor's first to its last element, both included."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.dtype.itemsize * (1 + sum((n - 1) * stride for n, stride in pairs))


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors, of which ``one`` begins first, have a byte in common.

    Two columns of one matrix, for example, overlap as ranges of memory but share no element.
    """
    ahead = other.data_ptr() - one.data_ptr()
    covered = torch.zeros(max(_extent(one), ahead + _extent(other)), dtype=torch.bool)
    _bytes_of(one, covered, 0).fill_(True)
    return bool(_bytes_of(other, covered, ahead).any())


def _bytes_of(tensor: torch.Tensor, memory: torch.Tensor, at: int) -> torch.Tensor:
    """Return the view of ``memory``, one element for each byte, that a tensor occupies."""
    each = tensor.dtype.itemsize
    # a dimension with stride 0, as made by expand(), repeats the same bytes
    pairs = [(n, each * s) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if s]
    sizes = [n for n, _ in pairs]
    strides = [stride for _, stride in pairs]
    return memory.as_strided((*sizes, each), (*strides, 1), at)


def shared(one: str, other: str) -> str:
    """Return the error message about two tensors that share memory."""
    return (
        f"{one} and {other} share memory but are not the same Parameter: nodes average each "
        "parameter in memory of its own, so they would be separated; tie them by one Parameter "
        "(model.b.weight = model.a.weight, without .data), or give one of them a copy (.clone())"
    )
