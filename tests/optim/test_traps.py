"""Uses of Gossip that failed without a message in earlier versions.

They must work now, or be rejected with a message.
"""

import contextlib
import copy
import gc
import io
import pickle
import re
import sys
import weakref

import numpy as np
import pytest
import torch
from torch import nn

import mpigossip
from mpigossip.cluster.world import SingleProcess
from mpigossip.config import JobError, readable
from mpigossip.config.errors import NonFiniteError
from mpigossip.mixing.kernels import native
from mpigossip.optim.gossip import LOADED
from mpigossip.optim.node import THAWED
from mpigossip.store import checkpoint
from tests.cases import every, naming, on_each, with_world

N = 3
AHEAD = {"style": "awc"}


@pytest.fixture(autouse=True)
def nothing_said_yet():
    readable.noted.clear()


def make(seed=0, *more):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2), *more)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(optimizer, model, node, steps):
    for step in steps:
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * node + step))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def values(module):
    tensors = [*module.parameters(), *(b for b in module.buffers() if b.is_floating_point())]
    return torch.cat([t.detach().reshape(-1) for t in tensors])


def gather_parameters(world, model):
    """Gather the parameters of all ranks, of shape (n, P)."""
    return torch.stack(world.comm.allgather(values(model)))


# -- parameters that leave the flat memory ---------------------------------------------------------


def cast(model):
    model.to(torch.float64).to(torch.float32)


def put_back(model):
    """Replace parameters for an evaluation and restore them, as moving averages do."""
    backup = {name: p.data.clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.data = torch.zeros_like(p)
    for name, p in model.named_parameters():
        p.data = backup[name]


def from_vector(model):
    nn.utils.vector_to_parameters(
        nn.utils.parameters_to_vector(model.parameters()).clone(), model.parameters()
    )


def nothing(model):
    pass


@with_world
def after(world, name, options):
    model = make(world.rank)
    optimizer = mpigossip.Gossip(world, model, sgd(model), **options)
    globals()[name](model)
    train(optimizer, model, world.rank, range(3))
    globals()[name](model)
    train(optimizer, model, world.rank, range(3, 6))
    globals()[name](model)
    rows = gather_parameters(world, model).double()
    distance = optimizer.consensus_distance()
    with optimizer.averaged() as averaged:
        mean = values(averaged)
    return rows.numpy(), mean.numpy(), distance


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("cast", {}),
        ("put_back", AHEAD),
        every("from_vector", {}),
        every("cast", AHEAD),
        every("put_back", {}),
        every("from_vector", AHEAD),
    ],
)
def test_parameters_with_replaced_memory_are_copied_back(ranks, name, options):
    plain = ranks(N)(after, "nothing", options)
    other = ranks(N)(after, name, options)
    for (a, _, _), (b, mean, difference) in zip(plain, other, strict=True):
        assert (a == b).all()
        centre = b.mean(0)
        assert np.allclose(mean, centre, atol=1e-6) and (mean == other[0][1]).all()
        distance = ((b - centre) ** 2).sum() / N / (centre**2).sum()
        assert difference == pytest.approx(distance, rel=1e-4)


def replace_by_assign(model):
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)


def left_before_the_first_step(model, optimizer):
    replace_by_assign(model)
    train(optimizer, model, 0, range(1))


def left_after_a_step(call):
    """Return a misuse: the model gets other parameters after a step, and then ``call`` is made."""

    def act(model, optimizer):
        train(optimizer, model, 0, range(1))
        replace_by_assign(model)
        call(optimizer)

    return act


def other_type_after_a_step(model, optimizer):
    train(optimizer, model, 0, range(1))
    model.bfloat16()
    optimizer.step()


def look_inside_averaged(optimizer):
    with optimizer.averaged():
        pass


def added_layer(call, steps):
    """Return a misuse: the model gets another layer after some steps, and ``call`` is made."""

    def act(model, optimizer):
        train(optimizer, model, 0, range(steps))
        model.append(nn.Linear(2, 2))
        call(model, optimizer)

    return act


def add_to_gossip(model, optimizer):
    optimizer.add_param_group({"params": model[3].parameters()})


def add_to_inner_optimizer(model, optimizer):
    optimizer._inner.add_param_group({"params": model[3].parameters()})
    train(optimizer, model, 0, range(1))


def remove_again(model, optimizer):
    with contextlib.suppress(JobError):
        add_to_inner_optimizer(model, optimizer)
    del model[3]
    train(optimizer, model, 0, range(1))


LEFT = ("0.weight", "left", "assign=True")
ADDED = ("3.weight, 3.bias", "after Gossip")
ADDED_LAYER = {
    "group of Gossip": (add_to_gossip, ("add_param_group", "2 parameters", "before Gossip")),
    "consensus distance": (lambda _, optimizer: optimizer.consensus_distance(), ADDED),
    "averaged": (lambda _, optimizer: look_inside_averaged(optimizer), ADDED),
    "group of the inner optimizer": (add_to_inner_optimizer, ADDED),
    "removed again": (remove_again, ("2 parameters", "the model")),
}
CHANGED_PARAMETERS = {
    "left before the first step": (
        left_before_the_first_step,
        ("none", "model's parameters"),
    ),
    "left, step": (left_after_a_step(lambda optimizer: optimizer.step()), LEFT),
    "left, distance": (left_after_a_step(lambda optimizer: optimizer.consensus_distance()), LEFT),
    "left, state": (left_after_a_step(lambda optimizer: optimizer.state_dict()), LEFT),
    "other type": (other_type_after_a_step, ("torch.float32 on cpu", "(5, 6) torch.bfloat16")),
    **{
        f"added after {steps} steps, {name}": (added_layer(call, steps), message)
        for name, (call, message) in ADDED_LAYER.items()
        for steps in (0, 1)
    },
}
"""For each case: what a program does with a model and its Gossip, and a pattern of the message."""


@on_each("name", CHANGED_PARAMETERS)
def test_parameters_that_were_changed_after_gossip_are_rejected(name):
    act, message = CHANGED_PARAMETERS[name]
    model = make()
    optimizer = mpigossip.Gossip(SingleProcess(), model, sgd(model))
    with pytest.raises(JobError, match=naming(message)):
        act(model, optimizer)


def test_parameters_that_have_their_type_back_are_accepted():
    model = make()
    optimizer = mpigossip.Gossip(SingleProcess(), model, sgd(model))
    with pytest.raises(JobError):
        other_type_after_a_step(model, optimizer)
    model.float()
    train(optimizer, model, 0, range(1))


def test_an_added_layer_that_nothing_trains_so_far_is_accepted():
    model = make()
    optimizer = mpigossip.Gossip(SingleProcess(), model, sgd(model))
    added_layer(lambda model, optimizer: train(optimizer, model, 0, range(1, 2)), 1)(
        model, optimizer
    )


# -- initial models of nodes -----------------------------------------------------------------------


@with_world
def from_seeds(world, same):
    readable.noted.clear()
    model = make(0 if same else world.rank, nn.BatchNorm1d(2))
    model[2].requires_grad_(False)
    with torch.no_grad():
        model[3].running_mean.fill_(0 if same else world.rank)
        model[3].num_batches_tracked.fill_(0 if same else world.rank)
    first = world.broadcast(model.state_dict())
    begun = io.StringIO()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    with contextlib.redirect_stderr(begun):
        mpigossip.Gossip(world, model, optimizer)
        mpigossip.Gossip(world, model, torch.optim.SGD(model[0].parameters(), lr=0.1))
    equal = all(map(torch.equal, first.values(), model.state_dict().values()))
    return equal, [line for line in begun.getvalue().splitlines() if "differed" in line]


def test_all_nodes_start_with_the_model_of_node_0_and_differences_are_reported_once(ranks):
    for same in (True, False):
        for rank, (equal, said) in enumerate(ranks(N)(from_seeds, same)):
            assert equal and len(said) == (rank == 0 and not same), (same, rank, said)
            assert not said or "2 other ranks" in said[0], said


# -- differences between ranks ---------------------------------------------------------------------


DIFFERENT = {  # function of a rank that makes its model, and regular expression of the message
    "wide": (
        lambda rank: nn.Sequential(nn.Linear(20, 1 + rank)),
        r"rank 1 on .*: parameter 0\.weight is \(2, 20\) float32, .*rank 0 .*\(1, 20\) float32",
    ),
    "ordered": (
        lambda rank: nn.ModuleDict({k: nn.Linear(3, 3) for k in ("ba" if rank == 1 else "ab")}),
        r"rank 1 on .*: .*parameter b\.weight .* where rank 0 has parameter a\.weight",
    ),
    "longer": (
        lambda rank: nn.Sequential(nn.Linear(3, 3), *[nn.Linear(3, 3)] * (rank == 2)),
        r"rank 2 on .*: parameter 1\.weight .* on this rank only",
    ),
    "typed": (
        lambda rank: nn.Linear(3, 3).to(torch.bfloat16 if rank == 1 else torch.float32),
        r"rank 1 on .*: parameter weight is \(3, 3\) bfloat16, .*rank 0 .*\(3, 3\) float32",
    ),
    "graph": (
        lambda _: nn.Linear(3, 3),
        r"rank 1 on .*: graph\.name is 'ring', .*rank 0 .*'complete'",
    ),
}


@with_world
def started(world, name):
    model = DIFFERENT[name][0](world.rank)
    graph = "ring" if name == "graph" and world.rank == 1 else "complete"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        mpigossip.Gossip(world, model, optimizer, graph=graph, timeout_s=5)
    except JobError as error:
        return str(error)
    return ""


@on_each("name", DIFFERENT)
def test_differences_between_ranks_are_named_at_the_start(ranks, name):
    for message in ranks(N)(started, name):
        assert re.search(DIFFERENT[name][1], message), message


@with_world
def frozen_later(world):
    model = make()
    optimizer = mpigossip.Gossip(world, model, sgd(model), timeout_s=5)
    model[2].requires_grad_(world.rank != 1)
    try:
        train(optimizer, model, 0, range(1))
    except JobError as error:
        return str(error)
    return ""


def test_differences_at_the_first_step_are_named_there(ranks):
    for message in ranks(N)(frozen_later):
        assert "rank 1 on" in message and "parameter 2.weight is (2, 5) float32, frozen" in message


# -- norms -----------------------------------------------------------------------------------------


@with_world
def train_batch_norm(world, recalibrate):
    """Train BatchNorm on data with another mean and standard deviation on each rank.

    :return: initial values, values inside averaged(), their expected values, and the values of this
        rank, each (P,)
    """
    model = make(world.rank, nn.BatchNorm1d(2))
    with torch.no_grad():
        model[3].running_mean.fill_(world.rank)
    optimizer = mpigossip.Gossip(world, model, sgd(model))
    began = values(model)
    batches = [
        (world.rank + 1) * torch.randn(8, 6, generator=torch.Generator().manual_seed(k)) + k
        for k in range(3)
    ]
    for x in batches:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    own = values(model)
    counted = model[3].num_batches_tracked.clone()
    by_hand = gather_parameters(world, model).double().mean(0)
    draws = torch.get_rng_state()
    with optimizer.averaged(recalibrate=batches if recalibrate else None) as averaged:
        mean = values(averaged)
        model(batches[0])  # in training mode, this changes the running statistics
    assert torch.equal(own, values(model)) and counted == model[3].num_batches_tracked
    assert torch.equal(draws, torch.get_rng_state())
    if recalibrate:  # compute the expected statistics by torch's update_bn
        nn.utils.vector_to_parameters(mean[: -2 * 2], model.parameters())
        torch.optim.swa_utils.update_bn(batches, model)
        by_hand = gather_parameters(world, model).double().mean(0)
    return began.numpy(), mean.numpy(), by_hand.numpy(), own.numpy()


@pytest.mark.parametrize("recalibrate", [False, True])
def test_buffers_are_averaged(ranks, recalibrate):
    got = ranks(N)(train_batch_norm, recalibrate)
    for began, mean, by_hand, own in got:
        # All ranks begin with the model of node 0, whose running mean is 0.
        assert (began == got[0][0]).all() and (began[-4:-2] == 0).all()
        # The statistics of batches were summed in float32 in another order.
        assert (mean == got[0][1]).all() and np.allclose(mean, by_hand, rtol=1e-5, atol=1e-5)
        assert not np.allclose(mean, own)


def test_recalibration_leaves_dropout_off():
    model = make(0, nn.Dropout(0.5), nn.BatchNorm1d(2))
    model[1].eval()
    optimizer = mpigossip.Gossip(SingleProcess(), model, sgd(model))
    batches = [[torch.randn(8, 6) + k, "targets"] for k in range(3)]
    shown = [model[:3](x).detach() for x, _ in batches]
    with optimizer.averaged(recalibrate=batches):
        mean = torch.stack([x.mean(0) for x in shown]).mean(0)
        assert torch.allclose(model[4].running_mean, mean, atol=1e-6)
        assert [m.training for m in model] == [True, False, True, True, True]
        assert model[4].momentum == 0.1


@on_each(
    ("norms", "batches", "message"),
    [
        ([], [], "BatchNorm"),
        ([nn.BatchNorm1d(2)], [], ("averaged(recalibrate=…)", "rank 0")),
    ],
)
def test_recalibration_needs_a_norm_and_a_batch(norms, batches, message):
    model = make(0, *norms)
    optimizer = mpigossip.Gossip(SingleProcess(), model, sgd(model))
    with pytest.raises(JobError, match=naming(message)):
        optimizer.averaged(recalibrate=iter(batches)).__enter__()


class Named(nn.Module):
    """Model that takes its inputs by name, like the models of transformers."""

    def __init__(self):
        super().__init__()
        self.body = make(0, nn.BatchNorm1d(2))

    def forward(self, values, mask=None):
        return self.body(values if mask is None else values * mask)


class Whole(Named):
    """Model that takes the mapping itself."""

    def forward(self, batch):
        return super().forward(batch["values"], batch["mask"])


class Kept(Named):
    """Model that takes all names."""

    def forward(self, **given):
        assert set(given) == {"values", "mask", "labels"}
        return super().forward(given["values"], given["mask"])


@on_each(
    "kind, twin, paired",
    [
        (Named, False, False),
        (Named, True, False),
        (Whole, False, False),
        (Kept, False, True),
    ],
)
def test_batches_that_are_mappings_recalibrate(kind, twin, paired):
    model = kind()
    optimizer = mpigossip.Gossip(SingleProcess(), model, sgd(model))
    draws = [torch.randn(8, 6) + k for k in range(3)]
    batches = [{"values": x, "mask": torch.full((8, 6), 2.0), "labels": x} for x in draws]
    batches = [(batch, batch["labels"]) for batch in batches] if paired else batches
    with torch.no_grad():
        wanted = torch.stack([model.body[:3](2 * x).mean(0) for x in draws]).mean(0)
    average = torch.optim.swa_utils.AveragedModel(model) if twin else None
    with optimizer.averaged(average, recalibrate=batches) as averaged:
        body = (averaged.module if twin else averaged).body
        assert torch.allclose(body[3].running_mean, wanted, atol=1e-6)


class GraphBatch:
    """Object with tensors and a method `to`, like the batches of PyTorch Geometric."""

    def __init__(self, values):
        self.values = values
        self.device = None

    def to(self, device):
        moved = GraphBatch(self.values.to(device))
        moved.device = device
        return moved


class OnGraphs(Named):
    def forward(self, graph):
        assert graph.device == torch.device("cpu")
        return super().forward(graph.values)


class OnNamedGraphs(OnGraphs):
    def forward(self, *, graph):
        return super().forward(graph)


@on_each("kind, paired", [(OnGraphs, False), (OnGraphs, True), (OnNamedGraphs, True)])
def test_batches_that_are_objects_are_moved_to_the_device(kind, paired):
    model = kind()
    optimizer = mpigossip.Gossip(SingleProcess(), model, sgd(model))
    batches = [GraphBatch(torch.randn(8, 6))]
    if kind is OnNamedGraphs:
        batches = [{"graph": one, "labels": None} for one in batches]
    batches = [(batch, None) for batch in batches] if paired else batches
    with optimizer.averaged(recalibrate=batches):
        assert model.body[3].num_batches_tracked > 0


def test_a_batch_that_raises_during_recalibration_leaves_the_model_as_it_was():
    model = make(0, nn.BatchNorm1d(2, momentum=0.3), nn.Dropout(0.5))
    model[1].eval()
    optimizer = mpigossip.Gossip(SingleProcess(), model, sgd(model))
    train(optimizer, model, 0, [0])
    before = values(model)
    counted = model[3].num_batches_tracked.clone()
    batches = [torch.randn(8, 6), torch.randn(8, 5)]  # the second has a feature too few
    with (
        pytest.raises(RuntimeError, match=naming("shapes")),
        optimizer.averaged(recalibrate=batches),
    ):
        pass
    assert [m.training for m in model] == [True, False, True, True, True]
    assert model[3].momentum == 0.3
    assert torch.equal(values(model), before) and model[3].num_batches_tracked == counted
    train(optimizer, model, 0, [1])


@with_world
def count_roundings_after_error(world):
    """Return how often 16-bit parameters are rounded after a pause that an exception ends."""
    model = make().bfloat16()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = mpigossip.Gossip(world, model, inner, mixer="asynchronous")
    model(torch.ones(4, 6).bfloat16()).float().square().mean().backward()
    optimizer.step()
    node = optimizer._node
    calls = []
    publish = node.publish
    node.publish = lambda: calls.append(publish())
    with pytest.raises(KeyError), optimizer.paused():
        raise KeyError("of the user")
    return len(calls)


def test_an_exception_in_a_pause_leaves_16_bit_parameters_as_their_masters(ranks):
    assert ranks(2)(count_roundings_after_error) == [1, 1]


@with_world
def recalibrated_on_one(world):
    model = make(world.rank, nn.BatchNorm1d(2))
    optimizer = mpigossip.Gossip(world, model, sgd(model), timeout_s=10.0)
    train(optimizer, model, world.rank, [0])
    with optimizer.averaged(recalibrate=None if world.rank else [torch.randn(8, 6)]) as averaged:
        return values(averaged).numpy()


def test_some_ranks_may_have_no_batches_to_recalibrate_with(ranks):
    first, *others = ranks(N)(recalibrated_on_one)
    assert all((one == first).all() for one in others)


@with_world
def with_twin(world):
    model = make(0, nn.BatchNorm1d(2))
    optimizer = mpigossip.Gossip(world, model, sgd(model))
    twin = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
    for step in range(3):
        train(optimizer, model, world.rank, [step])
        twin.update_parameters(model)
    before = values(twin)
    own = values(model)
    expected = gather_parameters(world, twin).double().mean(0)
    with optimizer.averaged(twin) as averaged:
        assert averaged is twin and torch.equal(values(model), own)
        mean = values(twin)
    assert torch.equal(values(twin), before) and not torch.equal(mean, before)
    return mean.numpy(), expected.numpy()


def test_a_twin_is_averaged_as_it_is(ranks):
    got = ranks(N)(with_twin)
    for mean, expected in got:
        assert (mean == got[0][0]).all() and np.allclose(mean, expected, rtol=1e-6, atol=1e-7)


# -- frozen, unfrozen, in several modules ----------------------------------------------------------


@with_world
def unfrozen(world, algorithm):
    model = make(world.rank)
    model[0].requires_grad_(False)
    optimizer = mpigossip.Gossip(
        world, model, torch.optim.SGD(model[2].parameters(), lr=0.1), algorithm
    )
    equal = gather_parameters(world, model)
    train(optimizer, model, world.rank, range(2))
    still = torch.equal(values(model)[:30], equal[0][:30])
    model[0].requires_grad_(True)
    optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.2})
    train(optimizer, model, world.rank, range(2, 4))
    model_apart = gather_parameters(world, model)
    optimizer._inner.param_groups[0]["lr"] = optimizer._inner.param_groups[1]["lr"] = 0.0
    train(optimizer, model, world.rank, range(4, 40))
    return (
        bool((equal == equal[0]).all()),
        still,
        model_apart.numpy(),
        gather_parameters(world, model).numpy(),
        optimizer.engine.index,
    )


@pytest.mark.parametrize("algorithm", ["dsgd", "dsgt"])
def test_parameters_that_are_unfrozen_join_the_exchange(ranks, algorithm):
    for equal, still, distance, end, index in ranks(N)(unfrozen, algorithm):
        assert equal and still and index == 40
        assert np.abs(distance - distance.mean(0)).max() > 1e-4
        assert np.abs(end - end.mean(0)).max() < 1e-5  # also what was frozen


@with_world
def unfrozen_within_a_phase(world):
    """Phases of defacto on three nodes have two local steps and two rounds."""
    model = make(world.rank)
    model[0].requires_grad_(False)
    inner = torch.optim.SGD(model[2].parameters(), lr=0.1)
    optimizer = mpigossip.Gossip(world, model, inner, "defacto")
    first = gather_parameters(world, model)
    train(optimizer, model, world.rank, range(3))
    model[0].requires_grad_(True)
    optimizer.add_param_group({"params": model[0].parameters()})
    train(optimizer, model, world.rank, range(3, 7))
    return first.numpy(), gather_parameters(world, model).numpy()


def test_the_next_phase_is_exact_if_parameters_are_unfrozen_within_a_phase(ranks):
    for first, models in ranks(N)(unfrozen_within_a_phase):
        assert np.abs(models - models[0]).max() < 1e-6
        assert np.abs(models - first).max() > 1e-3


def test_frozen_parameters_are_counted_and_reported_once(capsys):
    for _ in range(2):
        model = make()
        model[0].requires_grad_(False)
        optimizer = mpigossip.Gossip(SingleProcess(), model, sgd(model))
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert printed.startswith("mpigossip: parameters 0.weight, 0.bias (35 values) ")
    train(optimizer, model, 0, range(2))
    model[0].requires_grad_(True)
    train(optimizer, model, 0, range(2, 3))
    assert "step 2: parameters 0.weight, 0.bias require gradients" in capsys.readouterr().err
    few = mpigossip.Gossip(SingleProcess(), model, torch.optim.SGD(model[0].parameters(), lr=0.1))
    assert "2.weight, 2.bias are exchanged" in capsys.readouterr().err
    few.close()


def frozen_since(algorithm, inner):
    model = make()
    optimizer = mpigossip.Gossip(
        SingleProcess(), model, inner(model.parameters(), lr=0.1), algorithm
    )
    train(optimizer, model, 0, range(3))
    model[0].requires_grad_(False)
    before = values(model)
    train(optimizer, model, 0, range(3, 6))
    return torch.equal(values(model)[:35], before[:35]), torch.equal(values(model), before)


def test_parameters_frozen_later_stay_or_are_rejected():
    assert frozen_since("parallel", torch.optim.AdamW) == (True, False)
    with pytest.raises(JobError, match=naming("0.weight, 0.bias", "frozen", "dmsgd")):
        frozen_since("dmsgd", torch.optim.SGD)


@with_world
def frozen_behind_backward(world):
    model = make()
    optimizer = mpigossip.Gossip(world, model, sgd(model), "parallel")
    train(optimizer, model, world.rank, range(2))
    optimizer.zero_grad()
    model(torch.randn(4, 6) + world.rank).square().mean().backward()
    model[0].requires_grad_(False)
    before = values(model)
    optimizer.step()
    return values(model).numpy(), torch.equal(values(model)[:35], before[:35])


def test_gradients_of_frozen_parameters_do_not_separate_nodes(ranks):
    got = ranks(N)(frozen_behind_backward)
    assert all(stays and (own == got[0][0]).all() for own, stays in got)


def test_temporarily_frozen_or_removed_parameters_are_accepted():
    model = make()
    model[2].requires_grad_(False)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = mpigossip.Gossip(SingleProcess(), model, plain, "dmsgd")
    train(optimizer, model, 0, range(2))
    model[0].requires_grad_(False)
    with optimizer.averaged():
        pass
    model[2].requires_grad_(True)  # the new flat parameters do not contain the first layer
    before = values(model)
    train(optimizer, model, 0, range(2, 4))
    assert torch.equal(values(model)[:35], before[:35]) and not torch.equal(values(model), before)


def test_fragments_name_the_modules_that_are_unfrozen_later():
    model = make()
    model[2].requires_grad_(False)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"cadence": "every", "period": 2}
    with pytest.raises(JobError, match=naming("no fragment", '"2.weight"')):
        mpigossip.Gossip(SingleProcess(), model, plain, fragments=["0.weight", "0.bias"], **options)
    optimizer = mpigossip.Gossip(SingleProcess(), model, plain, fragments=["0", "2"], **options)
    train(optimizer, model, 0, range(2))
    before = values(model)
    model[2].requires_grad_(True)
    train(optimizer, model, 0, range(2, 6))
    assert not torch.equal(values(model)[35:], before[35:])


@on_each("algorithm", ["dsgd", "d2"])
def test_master_weights_stay_when_other_parameters_are_unfrozen(algorithm):
    """The model makes ten updates of 1e-3 at 1, each of which bfloat16 would round away."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1)).bfloat16()
    model[1].requires_grad_(False)
    with torch.no_grad():
        model[0].weight.fill_(1.0)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = mpigossip.Gossip(SingleProcess(), model, inner, algorithm)
    for step in range(10):
        if step == 5:
            model[1].requires_grad_(True)
        optimizer.zero_grad()
        model[0].weight.grad = torch.full_like(model[0].weight, 1e-3)
        optimizer.step()
    rows = optimizer.vector.cut(optimizer.vector.x[0][0])
    master = dict(zip(optimizer.vector.flat.names, rows, strict=True))["0.weight"]
    assert master.item() == pytest.approx(0.99, abs=1e-4)


def test_the_loss_of_another_network_passes_through_between_steps():
    """In a GAN, the generator's backward() passes through the discriminator after its step."""
    model = make()
    other = nn.Linear(6, 6)
    optimizer = mpigossip.Gossip(SingleProcess(), model, sgd(model))
    for none in (True, False, True):
        x = torch.randn(4, 6)
        optimizer.zero_grad(set_to_none=none)
        model(x).square().mean().backward()
        optimizer.step()
        model(other(x)).square().mean().backward()
    with pytest.raises(JobError, match=naming("accumulated", "gradients")):
        optimizer.step()


def test_a_closed_gossip_is_freed():
    with SingleProcess() as alone:
        model = make()
        optimizer = mpigossip.Gossip(alone, model, sgd(model))
        train(optimizer, model, 0, range(2))
        optimizer.close()
        last = weakref.ref(model)
        del model, optimizer
        gc.collect()
        assert last() is None


def test_many_gossips_one_after_the_other_leave_nothing_behind():
    """The number of objects of the package does not grow, and no hooks remain."""
    model = make()
    counts = []
    with SingleProcess() as alone:
        for cycle in range(25):
            inner = sgd(model)
            optimizer = mpigossip.Gossip(alone, model, inner)
            train(optimizer, model, 0, range(2))
            optimizer.close()
            assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
            assert not inner._optimizer_step_pre_hooks
            del inner, optimizer
            if cycle in (4, 24):
                # A bounded number of arguments of sums is kept for each process, not for a gossip.
                native._arguments.cache_clear()
                gc.collect()
                counts.append(
                    sum(str(type(o).__module__).startswith("mpigossip") for o in gc.get_objects())
                )
    assert counts[0] == counts[1]


def test_adpsgd_may_begin_at_rate_0():
    model = make()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = mpigossip.Gossip(SingleProcess(), model, inner, "adpsgd", total=20, period=1)
    warm = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, step / 5))
    for step in range(20):
        train(optimizer, model, 0, [step])
        warm.step()
    assert torch.isfinite(values(model)).all()


@with_world
def two_modules(world):
    body = make(world.rank)
    head = nn.Linear(2, 2)
    parameters = [*body.parameters(), *head.parameters()]
    optimizer = mpigossip.Gossip(
        world, nn.ModuleList([body, head]), torch.optim.SGD(parameters, lr=0.1)
    )
    equal = torch.equal(*gather_parameters(world, body)[:2]) and torch.equal(
        *gather_parameters(world, head)[:2]
    )
    train(optimizer, nn.Sequential(body, head), world.rank, range(3))
    expected = gather_parameters(world, head).double().mean(0)
    with optimizer.averaged() as averaged:
        assert averaged[1] is head
        return equal, values(head).numpy(), expected.numpy()


def test_several_modules_are_passed_as_one(ranks):
    for equal, mean, expected in ranks(2)(two_modules):
        assert equal and np.allclose(mean, expected, rtol=1e-6)


# -- the optimizer ---------------------------------------------------------------------


def test_a_step_of_the_inner_optimizer_is_rejected():
    model = make()
    inner = sgd(model)
    optimizer = mpigossip.Gossip(SingleProcess(), model, inner)
    train(optimizer, model, 0, range(2))
    before = values(model)

    def scaled():
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        scaler.scale(model(torch.ones(4, 6)).sum()).backward()
        scaler.step(inner)

    for call in (inner.step, scaled):
        with pytest.raises(JobError, match=naming("SGD.step()", "GradScaler.step()")):
            call()
    assert torch.equal(values(model), before)
    optimizer.close()
    inner.step()  # the user's again


def test_an_optimizer_is_inside_one_gossip_and_has_no_copy():
    model = make()
    inner = sgd(model)
    optimizer = mpigossip.Gossip(SingleProcess(), model, inner)
    with pytest.raises(JobError, match=naming("SGD", "another Gossip", "close()")):
        mpigossip.Gossip(SingleProcess(), model, inner)
    for call in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(JobError, match=naming("copied", "optimizer.state_dict()")):
            call(optimizer)
    optimizer.close()
    mpigossip.Gossip(SingleProcess(), model, inner)


def test_a_parameter_that_the_optimizer_leaves_out_is_not_watched():
    """Its gradient accumulates, because zero_grad() of the optimizer does not clear it."""
    model = make()
    optimizer = mpigossip.Gossip(
        SingleProcess(), model, torch.optim.SGD([model[0].weight, model[2].weight], lr=0.1)
    )
    train(optimizer, model, 0, range(3))


def test_steps_without_a_gradient_are_reported_once(capsys):
    model = make()
    optimizer = mpigossip.Gossip(SingleProcess(), model, sgd(model))
    train(optimizer, model, 0, range(1))
    assert capsys.readouterr().err == ""
    train(optimizer, copy.deepcopy(model), 0, range(1, 3))
    err = capsys.readouterr().err
    assert err.count("without any gradient") == 1 and "that you passed to Gossip" in err


INSIDE_AVERAGED = {
    "step": lambda model, optimizer: train(optimizer, model, 0, range(1)),
    "consensus_distance": lambda _, optimizer: optimizer.consensus_distance(),
    "state_dict": lambda _, optimizer: optimizer.state_dict(),
    "average": lambda _, optimizer: optimizer.average(),
    "save": lambda _, optimizer: optimizer.save(),
    "exit": lambda _, optimizer: optimizer.exit(),
    "averaged": lambda _, optimizer: look_inside_averaged(optimizer),
}


def test_training_and_saving_inside_averaged_are_rejected(tmp_path):
    """Each call is named in its message, and the training continues after the block."""
    world = SingleProcess()
    model = make()
    optimizer = mpigossip.Gossip(world, model, sgd(model), run=tmp_path)
    with optimizer.averaged():
        for name, call in INSIDE_AVERAGED.items():
            with pytest.raises(JobError, match=naming(f"{name}() inside averaged()")):
                call(model, optimizer)
    train(optimizer, model, 0, range(1))
    world.close()


@with_world
def after_its_world(world):
    model = make()
    optimizer = mpigossip.Gossip(world, model, sgd(model))
    world.close()
    with pytest.raises(JobError, match=naming("Gossip", "closed", "mpigossip.world")):
        train(optimizer, model, 0, range(1))


def test_a_step_after_the_end_of_its_world_is_rejected(ranks):
    ranks(2)(after_its_world)


def test_an_exchange_without_a_step_comes_first_or_at_a_rate_of_0():
    model = make()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = mpigossip.Gossip(SingleProcess(), model, inner, "qg-dmsgd")
    optimizer.average()
    inner.param_groups[0]["lr"] = 0.0  # as a schedule ends
    optimizer.average()
    assert optimizer.engine.round == 1
    assert all(bool(part.isfinite().all()) for (part,) in optimizer.engine.parts().values())


# -- arguments ------------------------------------------------------------------------------------


class LazyBuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 2)
        self.register_buffer("mean", nn.parameter.UninitializedBuffer())


def lazy(make_model):
    """Return arguments of Gossip for a model that is made without shapes."""

    def arguments(_):
        model = make_model()
        return SingleProcess(), model, torch.optim.SGD(model.parameters(), lr=0.1)

    return arguments


def sparse(algorithm):
    """Return arguments of Gossip for a model with sparse gradients."""

    def arguments(_):
        model = nn.Embedding(10, 4, sparse=True)
        return SingleProcess(), model, torch.optim.SparseAdam(model.parameters()), algorithm

    return arguments


LAZY = {
    "parameter 0.weight": lambda: nn.Sequential(nn.LazyLinear(3)),
    "buffer mean": LazyBuffer,
}
DENSE = "dense arrays"


@on_each(
    ("arguments", "words"),
    [
        *(
            (lazy(make_model), (name, "no shape", "model(batch)"))
            for name, make_model in LAZY.items()
        ),
        *((sparse(algorithm), DENSE) for algorithm in ("parallel", "dsgt")),
        (
            lambda m: (SingleProcess(), m, sgd(nn.ModuleList([m, make()]))),
            ("4 parameters", "the model", "torch.nn.ModuleList([…])"),
        ),
        (
            lambda m: (SingleProcess(), np.zeros(3), sgd(m)),
            ("ndarray", "mpigossip.Averager"),
        ),
        (
            lambda m: (SingleProcess(), torch.zeros(3), sgd(m)),
            ("Tensor", "mpigossip.Averager"),
        ),
        (
            lambda m: (SingleProcess(), [m, 3], sgd(m)),
            ("model is a list", "torch.nn.Module"),
        ),
        (lambda m: (SingleProcess(), sgd(m), m), "optimizer is Sequential"),
        (lambda m: (SingleProcess(), m, torch.optim.SGD), ("optimizer is SGD", "instance")),
        (lambda m: (m, sgd(m), SingleProcess()), ("Sequential", "mpigossip.world()")),
        (
            lambda m: (SingleProcess(), m.to("meta"), sgd(m)),
            ("0.weight", "meta device", "model.to_empty"),
        ),
    ],
)
def test_arguments_that_do_not_fit_are_rejected(arguments, words):
    with pytest.raises(JobError, match=naming(words)):
        mpigossip.Gossip(*arguments(make()))


ALONE = """
import torch, mpigossip
with mpigossip.world() as world:
    for _ in range(2):
        model = torch.nn.Linear(2, 2)
        mpigossip.Gossip(world, model, torch.optim.SGD(model.parameters(), lr=0.1))
"""


def test_a_node_without_a_launcher_reports_once_that_it_is_alone(mpirun, pooled, tmp_path):
    (tmp_path / "alone.py").write_text(ALONE)
    launched = pooled(1, "alone.py")
    done = mpirun(0, [sys.executable, "alone.py"], cwd=tmp_path)
    for one, count in ((launched, 0), (done, 1)):
        assert one.returncode == 0, one.stderr
        assert one.stderr.count("one node alone: ") == count
        assert ("mpiexec -n 4 python" in one.stderr) == bool(count)


# -- NaN and infinite values -----------------------------------------------------------------------


def poisoned(world, value, save=False, **options):
    """Train with an input of the last rank that is NaN or infinite in step 3."""
    model = make()
    last = world.rank == world.size - 1
    optimizer = mpigossip.Gossip(world, model, sgd(model), **options)
    for step in range(6):
        x = torch.randn(4, 6)
        if last and step == 3:
            x[0, 0] = value
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        assert last or all(bool(p.isfinite().all()) for p in model.parameters())
        _ = save and optimizer.save()


@on_each(("options", "value", "step"), [({}, "nan", 3), (AHEAD, "inf", 4)])
def test_a_non_finite_value_is_named_before_it_is_sent(options, value, step):
    """An algorithm that is ahead sends the model from the start of the step."""
    facts = (f"step {step}", "node 0", "NaN")
    with SingleProcess() as world, pytest.raises(NonFiniteError, match=naming(facts)):
        poisoned(world, float(value), **options)


POISON = """
import mpigossip
from tests.optim.test_traps import poisoned
with mpigossip.world() as world:
    poisoned(world, float("nan"))
"""


def test_a_non_finite_value_on_one_rank_is_reported_by_it_and_ends_the_job(mpirun):
    done = mpirun(3, [sys.executable, "-c", POISON])
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if line.startswith("mpigossip: ")]
    assert len(said) == 1 and re.search(naming("rank 2 of 3", "step 3", "node 2", "NaN"), said[0])
    assert "Traceback" not in done.stderr


def poisoned_run(comm, folder):
    from mpigossip.cluster.mpi_world import MPIWorld

    try:
        with MPIWorld(comm) as world:
            poisoned(world, float("nan"), True, algorithm="cpsgd", run=folder)
    except NonFiniteError as error:
        return str(error)
    return ""


def test_a_non_finite_value_after_a_local_step_is_in_no_checkpoint(ranks, tmp_path):
    for said in ranks(2)(poisoned_run, tmp_path / "run"):
        assert re.search(naming("checkpoint of step 4", "node 1"), said)
        assert re.search(naming("NaN", "parameters", "0.weight"), said)
    assert checkpoint.steps(tmp_path / "run") == [2, 3]


APART = """
import sys, time, torch, mpigossip
torch.set_num_threads(1)
with mpigossip.world(timeout_s=1.5) as world:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    model.weight.requires_grad_(sys.argv[1] != "thaw")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = mpigossip.Gossip(world, model, optimizer, timeout_s=1.5, mixer=sys.argv[2])
    for step in range(3):
        optimizer.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        if world.rank == 0 and step == 1:
            if sys.argv[1] == "averaged":
                with optimizer.averaged():
                    pass
            elif sys.argv[1] == "load":
                optimizer.load_state_dict(optimizer.state_dict())
            elif sys.argv[1] == "thaw":
                model.weight.requires_grad_(True)
            else:
                optimizer.consensus_distance()
"""


CALLS = {
    "averaged": "averaged()",
    "consensus_distance": "consensus_distance()",
    "load": LOADED,
    "thaw": THAWED,
}


@pytest.mark.parametrize(
    ("n", "does"), [(2, "averaged"), every(3, "consensus_distance"), (2, "load"), every(2, "thaw")]
)
def test_a_call_that_only_one_rank_makes_is_named(mpirun, n, does):
    done = mpirun(n, [sys.executable, "-c", APART, does, "synchronous"], timeout=40)
    call = re.escape(CALLS[does])
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if line.startswith("mpigossip: ")]
    said = [line for line in lines if "don't require gradients" not in line]
    assert len(said) == 1, done.stderr
    # The rank whose time limit ends first prints the message, with its own call and the other call.
    assert re.search(f"in {call}, which all ranks", said[0]) or (
        "in step(), which " in said[0] and re.search(rf"rank 0 on \S+ waits in {call}", said[0])
    )


DEFAULT = {
    "Gossip": lambda model, _: mpigossip.Gossip(SingleProcess(), model, sgd(model)),
    "step()": lambda model, optimizer: optimizer.step(),
    "state_dict()": lambda model, optimizer: optimizer.state_dict(),
    "load_state_dict()": lambda model, optimizer: optimizer.load_state_dict({}),
    "average()": lambda model, optimizer: optimizer.average(),
    "Averager": lambda model, _: mpigossip.Averager(SingleProcess(), "ring", like=values(model)),
}


@on_each("call", DEFAULT)
def test_meta_as_the_default_device_is_rejected(call):
    model = make()
    optimizer = mpigossip.Gossip(world := SingleProcess(), model, sgd(model))
    train(optimizer, model, 0, range(1))
    torch.set_default_device("meta")
    try:
        with pytest.raises(JobError, match=naming('"meta"', 'torch.set_default_device("cpu")')):
            DEFAULT[call](model, optimizer)
        world.close()  # The default device of torch is "cpu" here.
    finally:
        torch.set_default_device(None)


@on_each("name", LAZY)
def test_a_twin_without_shapes_is_rejected(name):
    model = make()
    optimizer = mpigossip.Gossip(SingleProcess(), model, sgd(model))
    with pytest.raises(JobError, match=naming("twin", name, "shape")):
        optimizer.averaged(LAZY[name]()).__enter__()


def test_sparse_adam_trains_with_an_algorithm_that_exchanges_models():
    world, model, inner, algorithm = sparse("dsgd")(None)
    optimizer = mpigossip.Gossip(world, model, inner, algorithm=algorithm)
    model(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
