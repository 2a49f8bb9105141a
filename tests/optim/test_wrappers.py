"""Models that other parts of torch wrap or read: checkpoints, compile, DDP, moving averages."""

import re
from contextlib import contextmanager

import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

import mpigossip
from mpigossip.cluster.world import SingleProcess
from mpigossip.config import JobError
from tests.cases import naming, on_each
from tests.optim.in_node import whole

N = 2


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))


def adamw(model):
    return torch.optim.AdamW(model.parameters(), 0.1)


def batches(steps, rank=0):
    draw = torch.Generator().manual_seed(rank)
    return [torch.randn(8, 4, generator=draw) for _ in range(steps)]


def train(forward, optimizer, steps=3, rank=0, after=lambda: None):
    for batch in batches(steps, rank):
        optimizer.zero_grad()
        forward(batch).square().mean().backward()
        optimizer.step()
        after()


def test_each_parameter_has_its_own_storage(tmp_path):
    """Otherwise Accelerate treats them as tied, and its checkpoint contains only one of them."""
    model = net()
    train(model, mpigossip.Gossip(SingleProcess(), model, adamw(model)))
    storages = [p.untyped_storage() for p in model.parameters()]
    assert len({each.data_ptr() for each in storages}) == len(storages)
    torch.save(model.state_dict()["3.bias"], tmp_path / "saved")
    torch.save(torch.zeros(2), tmp_path / "alone")
    assert (tmp_path / "saved").stat().st_size == (tmp_path / "alone").stat().st_size


# -- wrappers that are applied before or after Gossip ---------------------------------------------


@contextmanager
def joined(rank, size, store):
    """Initialize torch.distributed for ``size`` processes."""
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=size)
    try:
        yield
    finally:
        distributed.destroy_process_group()


def compiled(model):
    torch.compiler.reset()
    return torch.compile(model, backend="aot_eager")


def bucketed(model):
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


AROUND = {
    "compile": compiled,
    "DataParallel": DataParallel,
    "DDP": DistributedDataParallel,
    "DDP with bucket views": bucketed,
}


def test_wrappers_change_no_bit_whether_applied_before_or_after(one_thread):
    """Compare the values with each of AROUND before, after and without Gossip."""
    results = {}
    with joined(0, 1, distributed.HashStore()):
        for name, wrap in {"bare": lambda model: model, **AROUND}.items():
            for before in (True, False):
                model = net()
                given = wrap(model) if before else model
                optimizer = mpigossip.Gossip(SingleProcess(), given, adamw(given))
                train(given if before else wrap(model), optimizer)
                results[name, before] = whole(model)
                assert {*optimizer.state_dict()["gossip"]["names"]} == {
                    name for name, _ in model.named_parameters()
                }
    bare = results.pop(("bare", True))
    assert not torch.equal(bare, whole(net()))
    assert {key for key, got in results.items() if not torch.equal(got, bare)} == set()


def over_all_ranks(comm, path, before):
    from mpigossip.cluster.mpi_world import MPIWorld

    with (
        MPIWorld(comm) as world,
        joined(comm.rank, comm.size, distributed.FileStore(path, comm.size)),
    ):
        model = net()
        given = DistributedDataParallel(model) if before else model
        with pytest.raises(JobError) as said:
            optimizer = mpigossip.Gossip(world, given, adamw(model))
            train(given if before else DistributedDataParallel(model), optimizer, steps=1)
    return str(said.value)


@on_each("before", [True, False])
def test_ddp_over_several_nodes_is_refused(ranks, tmp_path, before):
    for said in ranks(N)(over_all_ranks, str(tmp_path / f"store-{before}"), before):
        assert re.search(naming("DistributedDataParallel", "gradients of 2 processes"), said)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_an_optimizer_that_joins_ranks_is_rejected():
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = net()
    with joined(0, 1, distributed.HashStore()):
        sharing = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
        with pytest.raises(JobError, match=naming("ZeroRedundancyOptimizer")):
            mpigossip.Gossip(SingleProcess(), model, sharing)


@on_each("first", [True, False])
def test_a_state_resumes_with_and_without_compile(tmp_path, first):
    model = net()
    given = compiled(model) if first else model
    optimizer = mpigossip.Gossip(SingleProcess(), given, adamw(given))
    train(given, optimizer)
    torch.save(optimizer.state_dict(), tmp_path / "saved")
    again = net()
    other = again if first else compiled(again)
    resumed = mpigossip.Gossip(SingleProcess(), other, adamw(other))
    resumed.load_state_dict(torch.load(tmp_path / "saved", weights_only=True))
    assert torch.equal(whole(again), whole(model))
    train(other, resumed, rank=1)
    train(given, optimizer, rank=1)
    assert torch.equal(whole(again), whole(model))


# -- averages over steps --------------------------------------------------------------------------


@on_each("ema", [True, False])
def test_a_models_average_over_steps_is_that_of_the_plain_optimizer(ema):
    """AveragedModel copies the model before or after the first step; SWALR sets the rate."""
    kept = []
    for wrap in (
        lambda model, inner: inner,
        lambda m, inner: mpigossip.Gossip(SingleProcess(), m, inner),
    ):
        model = net()
        optimizer = wrap(model, adamw(model))
        scheduler = SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
        own = {"multi_avg_fn": get_ema_multi_avg_fn(0.9)} if ema else {}
        early = AveragedModel(model, **own)
        train(model, optimizer, after=lambda one=early, m=model: one.update_parameters(m))
        late = AveragedModel(model, **own)

        def after(averages=(early, late), model=model, scheduler=scheduler):
            scheduler.step()
            for one in averages:
                one.update_parameters(model)

        train(model, optimizer, rank=1, after=after)
        update_bn(batches(2), late)
        kept.append([model.state_dict(), early.state_dict(), late.state_dict()])
        assert not torch.equal(whole(late), whole(model))
    for plain, ours in zip(*kept, strict=True):
        assert all(torch.equal(ours[name], value) for name, value in plain.items())
