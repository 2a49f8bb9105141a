"""Claims of chunks: each chunk is trained in exactly one published round.

A block of chunks is claimed by a place for its next rounds. Where its chain ends early, or its
first round names another claim, the rounds that are missing are void: the block's next claim
covers exactly their chunks. So what is trained follows from chains and claims alone.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from mpigossip.mixing.members.records import Claim

FOLDER = 256
"""Blocks of the ledger in a folder."""
WINDOW = 4
"""Unclaimed blocks among which a claim chooses: two members seldom want the same."""
LOOKS = 4
"""Claimed blocks that are looked at before each claim, the oldest ones."""
TRIES = 64


Rest = tuple[int, int, int]
"""Block, its next attempt, the chunk from which on that claims the block."""


class Ledger:
    """The blocks of a training; ``done`` names are hints that save reading claims."""

    def __init__(self, disk, chunks: int, block: int, chance: random.Random):
        self.disk = disk
        self.chunks = chunks
        self.block = block
        self.chance = chance
        self._first = 0
        """the oldest block that isn't known as done"""

    def claim(self, member: Any) -> tuple[str, Claim, int] | None:
        """Claim chunks for a `Place`'s next rounds: name, claim, number; None where none can be.

        What became void comes first, then one of the first unclaimed blocks at random.
        """
        for _ in range(TRIES):  # others may take what was chosen
            free, rest = self._unclaimed(member)
            if not free and rest is None:
                return None
            block, attempt, chunk = rest or self.chance.choice(free)
            made = Claim(place=member.number, first=member.round, chunk=chunk)
            name = self._name(block, attempt)
            self.disk.make(name.rpartition("/")[0])
            if self.disk.publish(name, made.encode()):
                return name, made, self._end(block) - chunk
        return None

    def finish(self, name: str) -> None:
        """All rounds of this claim are published, and with them its block is done."""
        self.disk.publish(f"{name.rpartition('.')[0]}.done", b"")

    @property
    def finished(self) -> bool:
        """Return whether every block is done."""
        return all(done for _, _, done in self._blocks())

    def _unclaimed(self, member: Any) -> tuple[list[Rest], Rest | None]:
        free: list[Rest] = []
        claimed = []
        for block, attempts, done in self._blocks():
            if attempts and not done:
                claimed.append((block, attempts))
            elif not done:
                free.append((block, 0, block * self.block))
                if len(free) == WINDOW:
                    break
        rests = (self._rest(member, *one) for one in claimed[: LOOKS if free else None])
        return free, next((rest for rest in rests if rest), None)

    def _rest(self, member: Any, block: int, attempts: int) -> Rest | None:
        """Return what the claims of a block have left void."""
        chunk = block * self.block
        end = self._end(block)
        for attempt in range(attempts):
            claim = member.read(name := self._name(block, attempt), Claim, listed=True)
            if not isinstance(claim, Claim) or claim.chunk != chunk:
                continue
            trained, over = member.trained(name, claim, end - chunk)
            if trained == end - chunk:
                self.finish(name)
            if not over or trained == end - chunk:
                return None
            chunk += trained
        return block, attempts, chunk

    def _blocks(self) -> Iterator[tuple[int, int, bool]]:
        """From the oldest block that isn't done: (block, number of attempts, done)."""
        total = -(-self.chunks // self.block)
        all_done = True
        for first in range(self._first // FOLDER * FOLDER, total, FOLDER):
            attempts: dict[int, int] = {}
            done: set[int] = set()
            for name in self.disk.names(f"ledger/{first // FOLDER:04d}"):
                block, _, what = name.partition(".")
                if what == "done":
                    done.add(int(block))
                elif block.isdigit() and what.isdigit():
                    attempts[int(block)] = max(attempts.get(int(block), 0), int(what) + 1)
            for block in range(max(first, self._first), min(first + FOLDER, total)):
                all_done = all_done and block in done
                if all_done:
                    self._first = block + 1
                yield block, attempts.get(block, 0), block in done

    def _end(self, block: int) -> int:
        return min((block + 1) * self.block, self.chunks)

    @staticmethod
    def _name(block: int, what: int) -> str:
        return f"ledger/{block // FOLDER:04d}/{block:06d}.{what}"
