"""FSDP2 inside nodes of several ranks, and Gossip between nodes, compared with full models."""

import io

import pytest
import torch
from torch import nn

from mpigossip.config import JobError
from tests.cases import every, with_world
from tests.optim.in_node import (
    GPT,
    Case,
    batch,
    optimizer_of,
    reference_parameters,
    train_cases,
    whole,
    wrap_model,
)

RING = (("graph", "ring"),)
EQUAL = [  # Opening a case takes four ranks half a second, and its steps take little time.
    Case("gossip-pga", (("period", 2),), steps=4),
    Case("diloco", (("period", 2),), steps=4),
    Case("qg-dmsgd", steps=4, copies=True),
    Case("dsgt", RING, steps=4),
    Case("dsgd", (("style", "awc"),), steps=4),
    Case(steps=4, bf16=True),
    Case("dsgd", (*RING, ("average_state", {"exp_avg_sq": 2, "exp_avg": 3})), steps=4),
]
MORE = [
    Case(steps=4, copies=True),
    Case("dsgd", (("cadence", "adpsgd"), ("total", 8)), steps=8),
    Case("d2", RING, steps=4),
    Case("d2", RING, steps=4, copies=True),
    Case("qg-dmsgd", steps=4),
    Case(steps=4, ddp=True),
    Case(steps=4, compiled=True),
]
NEAR = [Case(steps=4, clip=None), Case("d2", RING, steps=4)]


pytestmark = pytest.mark.usefixtures("one_thread")


def relative_difference(result, wanted):
    """Return the relative difference of two vectors."""
    return float((torch.from_numpy(result) - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("cases", [EQUAL, every(MORE)])
def test_nodes_of_two_ranks_are_bitwise_identical_to_full_models(ranks, cases):
    of_ranks = ranks(4)(train_cases, cases, 2, timeout=240)
    for k, case in enumerate(cases):
        wanted = reference_parameters(2, 2, case)
        for node, result in of_ranks:
            assert torch.equal(torch.from_numpy(result[k]), wanted[node]), case


@pytest.mark.every
def test_uneven_shards_of_three_ranks_equal_full_models_within_rounding(ranks):
    of_ranks = ranks(6)(train_cases, NEAR, 3, timeout=240)
    for k, case in enumerate(NEAR):
        wanted = reference_parameters(2, 3, case)
        for node, result in of_ranks:
            assert relative_difference(result[k], wanted[node]) < 1e-5, case


# -- other operations of a loop --------------------------------------------------------------------


def made(world, **more):
    from mpigossip.optim.gossip import Gossip

    case = Case()
    model = wrap_model(world, GPT(world.nodes.inter_node.rank), case)
    options = {"graph": "ring", "graph_lazy": True} | more
    if options.get("algorithm") == "d2":
        options["algorithm_lazy"] = True
    return model, Gossip(world, model, optimizer_of(model, "dsgd"), **options)


def step(world, model, optimizer, index):
    optimizer.zero_grad()
    loss = model(*batch(world.nodes.inter_node.rank, world.nodes.local_rank, index))
    loss.backward()
    optimizer.step()


@with_world(per=2, timeout_s=30)
def train_and_evaluate(world):
    """Train without and with evaluations inside averaged(), which must not change the training.

    :return: node of this rank, and for both trainings the values that were seen and the parameters
    """
    results = []
    for evaluates in (False, True):
        model, optimizer = made(world)
        seen = []
        for index in range(4):
            step(world, model, optimizer, index)
            if evaluates:
                before = whole(model)
                with optimizer.averaged() as averaged, torch.no_grad():
                    inside = whole(model)
                    # Without a backward pass, FSDP2 keeps the parameters of the root gathered.
                    loss = float(averaged(*batch(0, world.nodes.local_rank, 50)))
                seen.append((before, inside, whole(model), loss, optimizer.consensus_distance()))
        results.append(
            (
                [one.numpy() if hasattr(one, "numpy") else one for t in seen for one in t],
                whole(model).numpy(),
            )
        )
        optimizer.close()
    return world.nodes.inter_node.rank, results


def test_averaged_and_consensus_distance_use_full_models(ranks):
    of_ranks = ranks(4)(train_and_evaluate)
    (_, [_, (first, _)]), _, (_, [_, (second, _)]), _ = of_ranks
    for at in range(0, len(first), 5):
        models = [torch.from_numpy(seen[at]).double() for seen in (first, second)]
        mean = sum(models) / 2
        model = GPT(0)
        nn.utils.vector_to_parameters(torch.from_numpy(first[at + 1]), model.parameters())
        square_distance = sum(float((m - mean).square().sum()) for m in models) / 2
        for node, seen in enumerate((first, second)):
            assert torch.equal(torch.from_numpy(seen[at + 1]), mean.float())
            assert (seen[at + 2] == seen[at]).all(), node
            with torch.no_grad():
                # The loss is float32 and was summed in another order.
                assert seen[at + 3] == pytest.approx(float(model(*batch(0, 0, 50))), rel=1e-5)
            assert seen[at + 4] == pytest.approx(
                square_distance / float(mean.square().sum()), rel=1e-6
            )
    for _, [(_, plain), (_, looked)] in of_ranks:
        assert (plain == looked).all()


@with_world(per=2, timeout_s=30)
def train_and_resume(world):
    """Return whether a training that resumes from state_dict() equals an uninterrupted training."""
    model, optimizer = made(world, algorithm="d2")
    for index in range(6):
        if index == 3:
            kept = io.BytesIO()
            torch.save(optimizer.state_dict(), kept)
            kept.seek(0)
        step(world, model, optimizer, index)
    wanted = whole(model)
    optimizer.close()
    model, optimizer = made(world, algorithm="d2")
    optimizer.load_state_dict(torch.load(kept, weights_only=True))
    for index in range(3, 6):
        step(world, model, optimizer, index)
    result = whole(model)
    optimizer.close()
    return torch.equal(result, wanted)


def test_the_state_of_each_rank_resumes_bitwise(ranks):
    assert ranks(4)(train_and_resume) == [True] * 4


def moved(model):
    model.double()
    model.float()


def loaded(model):
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    set_model_state_dict(model, get_model_state_dict(model))


def set_back(model):
    for p in model.parameters():
        p.data = p.data.clone()


def doubled(model):
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2.0)


def change_between_steps(world, known, *between):
    """Train, change parameters between steps as programs do, and return the values after each step.

    :param known: whether the private attributes of FSDP2 are as expected
    :param between: functions of the model, which are called between two steps
    """
    from mpigossip.engine import sharded

    before = sharded.fsdp_records
    results = []
    if not known:
        sharded.fsdp_records = lambda model: {}
    model, optimizer = made(world)
    for index, what in enumerate([None, *between]):
        if what:
            what(model)
        step(world, model, optimizer, index)
        results.append((whole(model).numpy(), optimizer.consensus_distance()))
    optimizer.close()
    sharded.fsdp_records = before
    return results


@with_world(per=2, timeout_s=30)
def taken_back(world):
    given = moved, loaded, set_back, doubled
    return change_between_steps(world, True, *[None] * 4), [
        change_between_steps(world, one, *given) for one in (True, False)
    ]


def test_parameters_with_replaced_memory_are_copied_back(ranks):
    for plain, (known, copied) in ranks(4)(taken_back):
        for (wanted, far), (values, distance) in zip(plain[:4], known[:4], strict=True):
            assert far > 0 and distance == far
            assert (values == wanted).all()
        assert not (known[4][0] == plain[4][0]).all(), "what a program wrote is kept"
        assert all((a == b).all() for (a, _), (b, _) in zip(known, copied, strict=True))


@with_world(per=2, timeout_s=30)
def train_with_scaler(world):
    """Train with a GradScaler and one overflow on one node; return the steps that were made."""
    model, optimizer = made(world)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    stepped = []
    for index in range(4):
        optimizer.zero_grad()
        loss = model(*batch(world.nodes.inter_node.rank, world.nodes.local_rank, index))
        bad = index == 2 and world.rank == 0
        scaler.scale(loss * float("inf") if bad else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        state = next(iter(optimizer.state.values()))
        stepped.append((optimizer.steps, int(state["step"]), scaler.get_scale()))
    values = whole(model)
    optimizer.close()
    return world.nodes.inter_node.rank, stepped, bool(values.isfinite().all())


def test_an_overflow_in_one_rank_skips_its_nodes_step(ranks):
    for node, stepped, finite in ranks(4)(train_with_scaler):
        assert finite
        assert [one[0] for one in stepped] == [1, 2, 3, 4]
        assert [one[1] for one in stepped] == ([1, 2, 2, 3] if node == 0 else [1, 2, 3, 4])
        assert stepped[-1][2] == (128.0 if node == 0 else 256.0)


@with_world(per=2, timeout_s=30)
def refused(world):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from mpigossip.optim.gossip import Gossip

    mesh = world.node_mesh()
    said = []
    hybrid = init_device_mesh("cpu", (2, 1), mesh_dim_names=("copies", "parts"))

    def partly():
        model = GPT(0)
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        return model

    for model, more in (
        (fully_shard(GPT(0), mesh=hybrid["parts"]), {}),
        (fully_shard(GPT(0), mesh=hybrid), {}),
        (partly(), {}),
        (fully_shard(GPT(0).bfloat16(), mesh=mesh), {}),
        (fully_shard(GPT(0), mesh=mesh), dict(mixer="asynchronous")),
    ):
        try:
            Gossip(world, model, torch.optim.AdamW(model.parameters()), **more)
        except JobError as error:
            said.append(" ".join(error.messages))
    return said


def test_other_kinds_of_sharding_are_rejected(ranks):
    for said in ranks(4)(refused):
        others, hybrid, partly, low, mixer = said
        assert "ranks 0, 1: call fully_shard(model, mesh=world" in others
        assert "neither parallelize_module nor replicas (HSDP)" in hybrid
        assert "aren't sharded" in partly
        assert "MixedPrecisionPolicy(param_dtype=torch.bfloat16)" in low
        assert 'mixer = "asynchronous"' in mixer
