"""A ResNet with EMA and BatchNorm on skewed data: the average is as good on every rank."""

import copy
import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import mpigossip
from tests.cases import with_world

SCRIPT = Path(__file__).parents[2] / "jobs/loops/resnet.py"
N, STEPS = 4, 60


def script():
    spec = importlib.util.spec_from_file_location("resnet_loop", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.every
def test_the_script_prints_one_average_for_all_ranks(mpirun):
    done = mpirun(3, [sys.executable, str(SCRIPT), "--steps", "12"], timeout=120)
    assert done.returncode == 0, done.stderr
    for name in ("averaged", "EMA averaged"):
        found = re.findall(rf", {name} (\d\.\d{{4}})", done.stdout)
        assert len(found) == 3 and len(set(found)) == 1, done.stdout


@with_world
def trained(world):
    """Accuracies: of averaged(), of floats averaged by hand, of parameters alone so averaged."""
    resnet = script()
    torch.manual_seed(0)
    draw, mine = torch.Generator().manual_seed(world.rank), resnet.of_rank(world.rank)
    test = resnet.pictures(400, torch.Generator().manual_seed(1000), torch.arange(resnet.CLASSES))
    model = resnet.resnet()
    inner = torch.optim.SGD(model.parameters(), resnet.RATE, momentum=0.9)
    optimizer = mpigossip.Gossip(world, model, inner)
    rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for _ in range(STEPS):
        images, kinds = resnet.pictures(resnet.BATCH, draw, mine)
        optimizer.zero_grad()
        F.cross_entropy(model(images), kinds).backward()
        optimizer.step()
        rates.step()
    with optimizer.averaged() as averaged:
        found = [resnet.accuracy(averaged, *test)]
    states = world.comm.allgather(model.state_dict())
    mean = {
        name: torch.stack([state[name].double() for state in states]).mean(0)
        for name, one in states[0].items()
        if one.is_floating_point()
    }
    for names in (mean, dict(model.named_parameters())):
        by_hand = copy.deepcopy(model)
        by_hand.load_state_dict({name: mean[name].float() for name in names}, strict=False)
        found.append(resnet.accuracy(by_hand, *test))
    return found


def test_averaged_is_as_good_everywhere_and_as_by_hand(ranks):
    got = ranks(N)(trained, timeout=120)
    best = got[0][0]
    assert best > 0.8
    assert [averaged for averaged, _, _ in got] == [by_hand for _, by_hand, _ in got] == [best] * N
    alone = [parameters for _, _, parameters in got]  # with each rank's own norms
    assert min(alone) < best - 0.02 and len(set(alone)) > 1
