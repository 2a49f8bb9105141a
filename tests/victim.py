"""A hook that ends ranks by SIGKILL at steps that are given: VICTIMS="0@2 1@4!", by first number.

A mark behind the step says inside what the rank dies, the next time from then on: `!` a flush of
the log, behind the ranks' meeting and before the file is touched; `e` an evaluation, the others
waiting for its part; `g` an average of all ranks, its messages on their way; `x` the end of an
exchange, whose messages are on their way.

VICTIM_SIGNAL names another signal than SIGKILL, for example "STOP". A rank that survives the signal
continues with what it was about to do.
"""

import os
import runpy
import signal
import sys

from mpigossip.engine.whole import WholeExchange
from mpigossip.mixing import exact_average
from mpigossip.runs.hooks import Hook
from mpigossip.store.log import LogWriter
from mpigossip.training import evaluate

PLACES = {
    "!": ("a flush", LogWriter, "append"),
    "e": ("an evaluation", evaluate, "measure"),
    "g": ("a global average", exact_average, "wait_all"),
    "x": ("an exchange", WholeExchange, "wait"),
}
SIGNAL = signal.Signals[f"SIG{os.environ.get('VICTIM_SIGNAL', 'KILL')}"]


def die(where):
    os.write(2, f"a victim dies in {where}\n".encode())
    os.kill(os.getpid(), SIGNAL)


def die_inside(where, owner, name):
    """Let the next call of a function send the signal first."""
    function = getattr(owner, name)

    def dying(*given, **named):
        setattr(owner, name, function)
        die(where)
        return function(*given, **named)

    setattr(owner, name, dying)


class Victim(Hook):
    def __init__(self, world):
        self.world = world
        self.plan = dict(one.split("@") for one in os.environ["VICTIMS"].split())

    def step(self, progress, record):
        at = self.plan.get(str(self.world.original_ranks[self.world.rank]), "-1")
        if record.index != int(at.rstrip("".join(PLACES))):
            return
        if at[-1] not in PLACES:
            die("training")
        die_inside(*PLACES[at[-1]])


def armed():
    """Let a custom loop kill its process: SIGKILL in the exchange of the step, in an average (`g`),
    before the step's message is sent (`s`), in a checkpoint (`c`), or in the run's end ("end").
    """
    from mpigossip.runs.recorder import Recorder
    from mpigossip.store import checkpoint

    plan = dict(one.split("@") for one in os.environ["VICTIMS"].split())
    at = plan.get(os.environ["OMPI_COMM_WORLD_RANK"], "-1")
    settle = WholeExchange.wait
    send = WholeExchange.send
    write = checkpoint.write_node

    def settled(exchange, engine, *given):
        if at in (f"{engine.index}", f"{engine.index}g"):
            if at.isdigit():
                die("training")
            exact_average.wait_all = lambda *_, **__: die("a global average")
        settle(exchange, engine, *given)

    def sent(exchange, engine, *given):
        if f"{engine.index}s" == at:
            die("training")
        send(exchange, engine, *given)

    def written(folder, node, state):
        if at == f"{state.numbers['index']}c":
            die("a checkpoint")
        return write(folder, node, state)

    WholeExchange.wait = settled
    WholeExchange.send = sent
    checkpoint.write_node = written
    if at == "end":
        Recorder.stop = lambda *_: die("the end of its loop")


if __name__ == "__main__":
    armed()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
