"""Buffers of unusual kinds in custom loops: repeated elements, conjugate views, sparse tensors."""

import copy

import pytest
import torch
from torch import nn

import mpigossip
from mpigossip.cluster.world import SingleProcess
from mpigossip.config import JobError
from tests.cases import naming, on_each, with_world


class Model(nn.Module):
    """Linear model with one buffer, which it does not use."""

    def __init__(self, buffer):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 2)
        self.register_buffer("mask", buffer)

    def forward(self, x):
        return self.linear(x)


def make(world, buffer, **options):
    model = Model(buffer)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, mpigossip.Gossip(world, model, inner, **options)


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(2, 3)).square().mean().backward()
    optimizer.step()


REPEATED = (
    torch.tensor([2.0]).expand(4),
    torch.tensor([[1], [5]]).expand(2, 3),
    torch.tensor(3.0).expand(2, 2),
)


@on_each("buffer", REPEATED)
def test_a_buffer_of_repeated_elements_is_averaged_and_restored(buffer):
    model, optimizer = make(SingleProcess(), copy.deepcopy(buffer))
    assert model.mask.stride() == buffer.stride() and 0 in buffer.stride()
    step(model, optimizer)
    with optimizer.averaged():
        assert torch.equal(model.mask, buffer)
    step(model, optimizer)
    assert torch.equal(model.mask, buffer)


@on_each("buffer", [*REPEATED, torch.tensor([1 + 2j, 3 - 1j]).conj()])
def test_such_buffers_are_restored_from_a_checkpoint(buffer, tmp_path):
    folder = tmp_path / str(len(list(tmp_path.iterdir())))
    with SingleProcess() as world:
        model, optimizer = make(world, copy.deepcopy(buffer), run=folder)
        step(model, optimizer)
    with SingleProcess() as world:
        model, optimizer = make(world, copy.deepcopy(buffer), run=folder)
        model.mask[tuple(slice(0, 1) for _ in buffer.shape)].add_(1)
        assert optimizer.resume() == 1 and torch.equal(model.mask, buffer)


@with_world
def first_values(world):
    kinds = (
        lambda value: torch.tensor([value]).expand(3),
        lambda value: torch.tensor([value * (1 + 2j)]).conj(),
    )
    return [make(world, kind(1.0 + world.rank))[0].mask.resolve_conj().numpy() for kind in kinds]


def test_all_ranks_start_with_the_buffers_of_rank_0(ranks):
    for repeated, conjugate in ranks(2)(first_values):
        assert repeated.tolist() == [1, 1, 1] and conjugate.tolist() == [1 - 2j]


@on_each("kind", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr])
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_sparse_buffers_are_rejected(kind):
    with pytest.raises(JobError, match=naming("mask", "sparse", "to_dense()")):
        make(SingleProcess(), kind(torch.eye(3)))
