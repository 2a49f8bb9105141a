"""Edits of many 16-bit parameters, which few operations detect on a GPU (engine/module.py)."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from mpigossip.engine import module
from mpigossip.engine.module import ModuleParameters
from mpigossip.engine.vector import bits

VIEWS = ("as_strided", "slice", "view", "detach", "alias", "select")


class Counter(TorchDispatchMode):
    """Context manager that counts the operations that would be launched on a GPU."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name not in VIEWS:
            self.names.append(name)
        return function(*args, **(kwargs or {}))


def edited_parameters():
    """Return the parameters of a model of three types after some elements were edited."""
    torch.manual_seed(0)
    layers = [nn.Linear(7, 7).bfloat16() for _ in range(20)]
    layers[3].float()
    layers.append(nn.Conv2d(3, 5, 3).bfloat16().to(memory_format=torch.channels_last))
    layers += [nn.Linear(9, 9).half() for _ in range(4)]
    parameters = ModuleParameters([nn.Sequential(*layers)])
    draw = torch.Generator().manual_seed(1)
    for master in parameters.x:  # The master weights then differ from their rounded values.
        master.add_(1e-5 * torch.randn(master.shape, generator=draw))
    parameters.publish()
    for p in parameters.rows[0]:
        if p.dtype != torch.float32:
            p.data[torch.rand(p.shape, generator=draw) < 0.2] = -0.25
            p.data[(0,) * p.ndim] = float("nan")
    return parameters


@pytest.mark.parametrize("compared", [1 << 24, 256, 16])
def test_edits_are_equal_at_once_and_one_by_one(monkeypatch, compared):
    monkeypatch.setattr(module, "COMPARED", compared)
    one_by_one = edited_parameters()
    at_once = edited_parameters()
    before = at_once.x[0].clone()
    one_by_one.take_edits()
    at_once._take_edits_at_once(0)
    assert torch.equal(bits(at_once.x[0]), bits(one_by_one.x[0]))
    assert not torch.equal(bits(at_once.x[0]), bits(before))


def test_the_number_of_operations_is_independent_of_the_number_of_parameters():
    parameters = edited_parameters()
    with Counter() as counter:
        parameters._take_edits_at_once(0)
    assert len(counter.names) <= 2 * 7, counter.names  # bfloat16 and float16
