"""Steps of a member: its batches and its learning rate come from different steps."""

import torch

from mpigossip.cluster.world import SingleProcess
from mpigossip.runs.members.member import Member
from mpigossip.training.assemble import assemble, load

SETTINGS = [
    "algorithm.name=dsgd",
    "model.name=mlp",
    "cadence.name=every",
    "cadence.period=2",
    "schedule.name=cosine",
    "data.batch=16",
]


def assembled():
    return assemble(load({}, SETTINGS), SingleProcess(), 1)


def test_a_step_takes_its_batches_and_its_rate_from_the_steps_that_it_is_given():
    late, plain = assembled().trainer, assembled().trainer
    drawn = []
    batches = late.batches
    late.batches = lambda step: drawn.append(step) or batches(step)
    record = late.step(6, 9)
    assert drawn == [6] and record.lr == plain.rate(9) and record.index == 0
    assert late.step(7).lr == plain.rate(7)
    plain.step()
    assert late.step().lr == plain.rate(2)  # the engine's step


class Script:
    """Exchange of two chunks without another member."""

    def __init__(self):
        self.chunks = 1
        self.script = iter([(5, 9), (3, 2), None])
        self.sent = []

    def chunk(self):
        return next(self.script)

    def send(self, state):
        self.sent.append(dict(state.numbers))
        return 0

    def receive(self):
        return None


def test_a_member_trains_chunks_at_the_rate_of_the_progress():
    member = Member(assembled())
    plain = assembled().trainer
    trainer = member.trainer
    drawn = []
    batches = trainer.batches
    trainer.batches = lambda step: drawn.append(step) or batches(step)
    rates = []
    member.begin([])
    script = Script()
    member.train(script, lambda record, chunk: rates.append((chunk, record.index, record.lr)))
    assert drawn == [10, 11, 6, 7]
    assert rates == [
        (5, 0, plain.rate(18)),
        (5, 1, plain.rate(19)),
        (3, 2, plain.rate(6)),
        (3, 3, plain.rate(7)),
    ]
    # The index of a published model is never below its number of local steps.
    assert script.sent == [{"index": 11, "local_steps": 2}, {"index": 7, "local_steps": 4}]
    assert member.done == 4 and member.engine.round == 2


def test_a_member_can_begin_again_from_its_seed():
    member = Member(assembled())
    seed = torch.from_numpy(member.seed.parameters).clone()
    member.begin([])
    member.train(Script())
    member.begin([])
    assert member.done == member.engine.round == 0 and member.engine.counts == [0]
    assert torch.equal(member.engine.vector.full[0].flatten()[: len(seed)], seed.flatten())
