"""QSR: the published formula of the period, models in numpy, ranks, resume, plan and errors."""

from math import cos, floor, pi

import numpy as np
import pytest
import torch
from torch import nn

import mpigossip
from mpigossip.algorithms import Step, cadence
from mpigossip.cluster.world import SingleProcess
from mpigossip.config import JobError
from mpigossip.mixing.base import ExchangeKind
from mpigossip.runs import start_and_resume
from mpigossip.training import assemble
from tests.battery import Double, Driver, check_resume
from tests.cases import naming, on_each, with_world
from tests.jobs import train

STEPS = 40
ALPHA = 0.25
GLOBAL = "algorithm.name=dsgd local.name=sgd cadence.name=qsr cadence.alpha=0.25"
GOSSIP = f"{GLOBAL} cadence.kind=gossip cadence.period=3"
ADAM = "algorithm.name=dsgd local.name=adamw cadence.name=qsr cadence.alpha=0.25 cadence.period=2"

pytestmark = pytest.mark.usefixtures("one_thread")


def rate(step):
    """Return the rate of a cosine from 0.1 to 0.02, after a warm-up of four steps."""
    return 0.025 * (step + 1) if step < 4 else 0.02 + 0.04 * (1 + cos(pi * (step - 4) / 36))


def exchanging_steps(period, total=STEPS, rate=rate):
    """Return the last steps of all periods by the published rule, period by period."""
    last = []
    first = 0
    while first < total:
        length = max(period, floor((ALPHA / rate(first)) ** 2)) if first >= 4 else period
        last.append(min(first + length, total) - 1)
        first += length
    return last


class Falling(Driver):
    """Driver whose learning rate follows the schedule."""

    def advance(self):
        self.lr = rate(self.index)
        super().advance()


class FallingDouble(Falling, Double):
    """Driver in float64 whose learning rate follows the schedule."""


def test_periods_follow_the_published_rule():
    made = cadence.BUILDERS["qsr"](period=4, alpha=ALPHA, total=STEPS)
    state = made.init()
    exchanged = []
    for step in range(STEPS):
        kind = made.kind(state, step)
        exchanged += [step] if kind is ExchangeKind.GLOBAL else []
        state = made.observe(state, Step(step, 0, kind, rate(step)), {})
    assert exchanged == exchanging_steps(4)
    lengths = np.diff([-1, *exchanged])
    assert lengths[0] == 4 and max(lengths) > 3 * min(lengths) and exchanged[-1] == STEPS - 1


@on_each(("rates", "lengths"), [
    ([0.1] * 40, [4, 9, 9, 9, 9]),  # 0.3/0.1 is 2.9999999999999996
    ([0.01 * (k + 1) for k in range(40)], [4] * 10),  # the rate rises
    ([0.3] * 4 + [0.0] * 8 + [0.3] * 4 + [0.3] * 24, [4, 10, 4, 4, 4, 4, 4, 4]),
])  # fmt: skip
def test_first_periods_and_restarts_of_the_rate_are_short(rates, lengths):
    """If the rate rises within a long period, the next step exchanges."""
    made = cadence.BUILDERS["qsr"](period=4, alpha=0.3)
    state = made.init()
    exchanged = []
    for step, lr in enumerate(rates):
        kind = made.kind(state, step)
        exchanged += [step] if kind is ExchangeKind.GLOBAL else []
        state = made.observe(state, Step(step, 0, kind, lr), {})
    assert np.diff([-1, *exchanged]).tolist()[: len(lengths)] == lengths[: len(exchanged)]


@on_each("settings", [GLOBAL, GOSSIP])
@on_each("n", [2, 3, 5, 8])
def test_models_equal_the_formula(settings, n):
    driver = FallingDouble(settings, n)
    x = driver.whole().numpy()
    b = torch.cat(driver.b, dim=1).numpy()
    last = exchanging_steps(3 if settings == GOSSIP else 4)
    rounds = 0
    for step in range(STEPS):
        x = x - rate(step) * (x - b)
        if step in last:
            w = driver.graph.matrix(rounds) if settings == GOSSIP else np.full((n, n), 1 / n)
            x = w @ x
            rounds += 1
    result = driver.run(STEPS).whole().numpy()
    assert np.abs(result - x).max() <= 1e-12 * np.abs(x).max()


@on_each("settings", [GLOBAL, GOSSIP, ADAM])
def test_resume_in_the_middle_of_each_period(settings):
    check_resume(lambda: Falling(settings, 3, noise=0.1), STEPS, range(1, STEPS, 3))


def assert_equal_rows(driver):
    models = driver.whole()
    assert torch.equal(models, models[:1].expand_as(models))


@on_each("at", [1, 17, STEPS - 2])
def test_the_last_step_exchanges_if_the_state_was_reset(at):
    driver = Falling(GLOBAL, 3, noise=0.1).run(at)
    driver.restart()
    assert_equal_rows(driver.run(STEPS - at))


@on_each("shift", [-7, 5])
def test_the_last_step_exchanges_if_the_steps_of_the_run_were_counted_again(shift):
    """The run has STEPS steps, which end ``shift`` steps later after a resume with other nodes."""
    driver = Falling(GLOBAL, 3, noise=0.1).run(20)
    driver.shift = shift
    assert_equal_rows(driver.run(STEPS + shift - 20))


def on_ranks(comm, settings):
    from mpigossip.cluster.mpi_world import MPIWorld
    from mpigossip.mixing import open_mixer

    with MPIWorld(comm) as world:

        def windows(graph, layout):
            return open_mixer(graph, layout, world, same_host="read", timeout_s=60)

        driver = Falling(settings, world.size, windows, noise=0.1).run(STEPS)
        driver.mixer.close()
        return driver.whole().numpy()


@pytest.mark.both
@pytest.mark.parametrize("n", [2, 3])
def test_ranks_equal_the_simulator_to_the_last_bit(ranks, n):
    for settings in (GLOBAL, GOSSIP, ADAM):
        got = np.concatenate(ranks(n)(on_ranks, settings))
        assert (got == Falling(settings, n, noise=0.1).run(STEPS).whole().numpy()).all()


SAVED = "dropped: cadence/period, cadence/since, cadence/rate"


@on_each(("saved", "resumed", "message"), [
    ("local.name=sgd", "cadence.name=every", SAVED),
    ("local.name=adamw", "cadence.name=cpsgd", SAVED),
    ("local.name=adamw", "algorithm.name=diloco", "reset: anchor"),
    ("local.name=adamw", "cadence.alpha=0.3", ""),
])  # fmt: skip
def test_a_resume_with_another_cadence_names_the_state_that_is_dropped(
    saved, resumed, message, tmp_path_factory, capsys
):
    folder = tmp_path_factory.mktemp("run") / "run"
    job = {
        "run": {"steps": 6, "evaluate_every": 0, "output": str(folder)},
        "data": {"source": "digits", "batch": 4, "workers": 0},
        "algorithm": {"name": "dsgd"},
        "cadence": {"name": "qsr", "period": 4},
        "model": {"name": "mlp"},
    }
    train(assemble.load(job, [saved]), 3)
    capsys.readouterr()
    with SingleProcess() as world:
        start_and_resume.resume(folder, ["run.steps=8", resumed], world, None)
    printed = "".join(capsys.readouterr())
    assert ("exact average" in printed) == bool(message)
    assert message in printed
    if message.startswith("reset"):  # the cadence of the old and the new job is "qsr"
        dropped, _, reset = printed.partition("reset: ")
        assert SAVED.removeprefix("dropped: ") in dropped
        assert SAVED.removeprefix("dropped: ") in reset


@with_world
def loop(world):
    torch.manual_seed(world.rank)
    model = nn.Linear(4, 2)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    gossip = mpigossip.Gossip(world, model, inner, cadence="qsr", period=2, alpha=0.25)
    schedule = torch.optim.lr_scheduler.LambdaLR(gossip, lambda step: 0.5 ** (step // 8))
    kinds = []
    for _ in range(30):
        gossip.zero_grad()
        model(torch.full((3, 4), 1.0 + world.rank)).square().mean().backward()
        gossip.step()
        schedule.step()
        kinds.append(gossip.record.kind is ExchangeKind.GLOBAL)
    return [step for step, is_global in enumerate(kinds) if is_global]


def test_a_loop_uses_the_rate_of_its_scheduler(ranks):
    """Periods: 2, then ⌊2.5²⌋ = 6, then (0.25/0.05)² = 25 from step 8 on."""
    assert ranks(2)(loop) == [[1, 7]] * 2


def test_a_period_of_one_is_rejected():
    with pytest.raises(JobError, match=naming("cadence.period = 1", "2")):
        assemble.load({}, ["algorithm.name=dsgd", "cadence.name=qsr", "cadence.period=1"])
