"""States of a loop's nodes that don't belong together."""

import copy

import pytest
import torch
from torch import nn

import mpigossip
from mpigossip.config import JobError


def made(world):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return model, mpigossip.Gossip(world, model, optimizer, timeout_s=20.0)


def train(model, optimizer, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(3, 4)).square().mean().backward()
        optimizer.step()


def mixed_up(comm, has):
    """What each rank is told where it loads the state of step ``has[rank]``."""
    from mpigossip.cluster.ranks import World

    with World(comm) as world:
        model, optimizer = made(world)
        states = [optimizer.state_dict()]
        for _ in range(2):
            train(model, optimizer, 1)
            states.append(copy.deepcopy(optimizer.state_dict()))
        found = []
        again = made(world)
        for model, optimizer in (again, (model, optimizer)):  # before the first step, and later
            optimizer.load_state_dict(states[has[world.rank]])
            with pytest.raises(JobError) as said:
                train(model, optimizer, 1)
            found.append(str(said.value))
        return found


def test_states_of_different_steps_are_refused_on_all_nodes(ranks):
    for early, late in ranks(2)(mixed_up, (2, 1)):
        assert early == late
        assert "rank 0 goes on from step 2, rank 1 from step 1" in early
        assert "load the states of one step" in early


def test_a_state_on_one_node_alone_is_refused_where_nodes_begin(ranks):
    for early in ranks(2)(alone):
        assert "rank 0 goes on from step 1, rank 1 from the start" in early


def alone(comm):
    from mpigossip.cluster.ranks import World

    with World(comm) as world:
        model, optimizer = made(world)
        train(model, optimizer, 1)
        state = optimizer.state_dict()
        model, optimizer = made(world)
        if world.rank == 0:
            optimizer.load_state_dict(state)
        with pytest.raises(JobError) as said:
            train(model, optimizer, 1)
        return str(said.value)
