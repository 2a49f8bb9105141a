"""A hook that ends ranks by SIGKILL at steps that are given: VICTIMS="0@2 1@4!", by first number.

With `!` the rank dies behind the meeting of the ranks for a flush of the log, and before the file
is touched.
"""

import os
import signal

from mpigossip.runs.hooks import Hook
from mpigossip.store.log import LogWriter


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


class Victim(Hook):
    def __init__(self, world):
        self.world = world
        self.plan = dict(one.split("@") for one in os.environ["VICTIMS"].split())

    def step(self, progress, record):
        name = str(self.world.names[self.world.rank])
        at = self.plan.get(name, "-1")
        if record.index == int(at.rstrip("!")):
            if not at.endswith("!"):
                die()
            LogWriter.append = die
