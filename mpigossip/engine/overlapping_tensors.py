"""Tensors whose elements share memory: with other tensors of a model, or with each other."""

from collections.abc import Iterable

import torch
from torch import nn

from mpigossip.config import JobError


def check_separate(model: nn.Module) -> None:
    """Raise JobError if a trained parameter shares memory with another parameter or a buffer.

    Each trained parameter is moved to its own range of the flat parameters. From then on, two
    tensors that shared memory would have different values, without an error message. Weights that
    are tied by the same Parameter object are one tensor, and are accepted.
    """
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    tensors = [(f"parameter {name}", p) for name, p in model.named_parameters()]
    tensors += [(f"buffer {name}", b) for name, b in model.named_buffers()]
    # Tensors are visited in the order of their addresses. These do not begin after the present
    # tensor, and they end after its first byte, so that they may overlap with it.
    candidates: list[tuple[str, torch.Tensor]] = []
    for name, tensor in sorted(_in_memory(tensors), key=lambda pair: _address(pair[1])):
        device, begin = _address(tensor)
        candidates = [
            (other, before)
            for other, before in candidates
            if str(before.device) == device and before.data_ptr() + _extent(before) > begin
        ]
        for other, before in candidates:
            is_trained = id(tensor) in trained or id(before) in trained
            if is_trained and _overlap(before, tensor):
                raise JobError(overlap_message(other, name))
        candidates.append((name, tensor))


def overwrite(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Copy ``values`` to a tensor that may repeat its elements, as a buffer after expand() does.

    torch's ``copy_`` rejects such a tensor. A dimension with stride 0 repeats its first element, so
    that only this element is written.

    :param tensor: tensor to write
    :param values: values of the same shape, equal for all elements that share memory
    """
    for dim, (length, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and length > 1:
            tensor = tensor.narrow(dim, 0, 1)
            values = values.narrow(dim, 0, 1)
    tensor.copy_(values)


def _address(tensor: torch.Tensor) -> tuple[str, int]:
    return str(tensor.device), tensor.data_ptr()


def _in_memory(tensors: Iterable[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    """Return the dense tensors that occupy memory, with their names.

    Subclasses such as DTensor, sparse tensors, tensors on the meta device and empty tensors are
    left out.
    """
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


def _overlap(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two tensors, of which ``first`` begins first, have a byte in common.

    Two columns of one matrix, for example, overlap as ranges of memory but share no element.
    """
    distance = second.data_ptr() - first.data_ptr()
    covered = torch.zeros(max(_extent(first), distance + _extent(second)), dtype=torch.bool)
    _bytes_of(first, covered, 0).fill_(True)
    return bool(_bytes_of(second, covered, distance).any())


def _bytes_of(tensor: torch.Tensor, memory: torch.Tensor, offset: int) -> torch.Tensor:
    """Return a view of the elements of ``memory`` that stand for the bytes of a tensor.

    :param tensor: tensor, which may have gaps between its elements
    :param memory: array with one element for each byte
    :param offset: index in ``memory`` of the tensor's first byte
    """
    itemsize = tensor.dtype.itemsize
    # A dimension with stride 0, as made by expand(), repeats the same bytes.
    pairs = [(n, itemsize * s) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if s]
    sizes = [n for n, _ in pairs]
    strides = [stride for _, stride in pairs]
    return memory.as_strided((*sizes, itemsize), (*strides, 1), offset)


def overlap_message(first: str, second: str) -> str:
    """Return the error message about two tensors that share memory."""
    return (
        f"{first} and {second} share memory but are not the same Parameter: mpigossip moves each "
        "parameter to separate memory, so their values would differ after the first step; tie "
        "them by the same Parameter (model.b.weight = model.a.weight, without .data), or give one "
        "of them a copy (.clone())"
    )
