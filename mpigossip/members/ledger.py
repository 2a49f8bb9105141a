"""Claims of chunks: each chunk is trained in exactly one published round.

A place claims a block of consecutive chunks for its next rounds. A round trains one chunk or
several (see `members/pace.py`). If the place's chain of records ends early, or if the first of
these rounds names another claim, then the missing rounds are void, which means that they will never
be published. The next claim to the block covers exactly the chunks of void rounds. The set of
trained chunks therefore follows from chains and claims alone.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from mpigossip.members.records import Claim

FOLDER = 256
"""Number of blocks in each subfolder of the ledger."""
WINDOW = 4
"""Number of unclaimed blocks among which a claim chooses, so that two members seldom choose the
same one."""
LOOKS = 4
"""Number of claimed blocks, the oldest ones, that are checked for void rounds before each claim."""
TRIES = 64
"""Number of failed attempts to claim a block, after which the member waits."""


Remainder = tuple[int, int, int]
"""Chunks of a block that can be claimed: the number of the block, the number of its next claim
(from 0), and the first chunk that this claim covers. The claim extends to the end of the block."""


class Ledger:
    """Blocks of a training and the claims to them.

    An empty file whose name ends in ".done" marks a block that is completely trained. It is only a
    hint, which saves reading the claims.
    """

    def __init__(self, disk, chunks: int, block: int, chance: random.Random):
        """Create an object for the ledger of a training; it does not read the folder yet.

        :param disk: the `RecordStore` of the training's folder
        :param chunks: number of chunks in the whole training
        :param block: number of chunks in a block; the last block may have fewer
        :param chance: generator that chooses between unclaimed blocks
        """
        self.disk = disk
        self.chunks = chunks
        self.block = block
        self.chance = chance
        self._first = 0
        """Number of the oldest block that is not known to be done."""

    def claim(self, member: Any) -> tuple[str, Claim, int] | None:
        """Claim chunks for the next rounds of a place.

        Chunks of void rounds are claimed first; otherwise, one of the first unclaimed blocks is
        chosen at random.

        :param member: the `Place` of this member
        :return: name of the claim in the ledger, the claim, and the number of its chunks; None if
            no chunk can be claimed now
        """
        # Another member may claim the chosen block first.
        for _ in range(TRIES):
            free, remainder = self._unclaimed(member)
            if not free and remainder is None:
                return None
            block, attempt, chunk = remainder or self.chance.choice(free)
            claim = Claim(place=member.number, first=member.round, chunk=chunk)
            name = self._name(block, attempt)
            self.disk.make(name.rpartition("/")[0])
            if self.disk.publish(name, claim.encode()):
                return name, claim, self._end(block) - chunk
        return None

    def finish(self, name: str) -> None:
        """Mark a block as done, because all of its chunks are trained and published.

        :param name: name of one of the claims to the block
        """
        self.disk.mark(f"{name.rpartition('.')[0]}.done")

    @property
    def finished(self) -> bool:
        """True if all blocks are done, so that all chunks are trained."""
        return all(done for _, _, done in self._blocks())

    def _unclaimed(self, member: Any) -> tuple[list[Remainder], Remainder | None]:
        """Return the chunks that can be claimed now: whole blocks, and the rest of a claimed block.

        The whole blocks are the first `WINDOW` unclaimed blocks. The rest consists of the chunks of
        void rounds; it is None if none of the oldest `LOOKS` claimed blocks has void rounds. If no
        block is unclaimed, all claimed blocks are checked for void rounds.

        :param member: the `Place` of this member
        """
        free: list[Remainder] = []
        claimed = []
        for block, attempts, done in self._blocks():
            if attempts and not done:
                claimed.append((block, attempts))
            elif not done:
                free.append((block, 0, block * self.block))
                if len(free) == WINDOW:
                    break
        remainders = (
            self._find_remainder(member, *claimed_block)
            for claimed_block in claimed[: LOOKS if free else None]
        )
        return free, next((remainder for remainder in remainders if remainder), None)

    def _find_remainder(self, member: Any, block: int, attempts: int) -> Remainder | None:
        """Return the chunks of a block that no member trains any more; None if there are none.

        :param member: the `Place` of this member
        :param block: number of the block
        :param attempts: number of claims to the block so far
        """
        chunk = block * self.block
        end = self._end(block)
        for attempt in range(attempts):
            claim = member.read(name := self._name(block, attempt), Claim, listed=True)
            if not isinstance(claim, Claim) or claim.chunk != chunk:
                continue
            trained, is_over = member.trained(name, claim, end - chunk)
            if trained == end - chunk:
                self.finish(name)
            if not is_over or trained == end - chunk:
                return None
            chunk += trained
        return block, attempts, chunk

    def _blocks(self) -> Iterator[tuple[int, int, bool]]:
        """Iterate over the blocks, from the oldest block that is not known to be done.

        Each item is the number of a block, the number of claims to it so far, and whether the block
        is done, which means that all of its chunks are trained.
        """
        total = -(-self.chunks // self.block)
        all_done = True
        for first in range(self._first // FOLDER * FOLDER, total, FOLDER):
            attempts: dict[int, int] = {}
            done: set[int] = set()
            for name in self.disk.names(f"ledger/{first // FOLDER:04d}"):
                block, _, suffix = name.partition(".")
                if suffix == "done":
                    done.add(int(block))
                elif block.isdigit() and suffix.isdigit():
                    attempts[int(block)] = max(attempts.get(int(block), 0), int(suffix) + 1)
            for block in range(max(first, self._first), min(first + FOLDER, total)):
                all_done = all_done and block in done
                if all_done:
                    self._first = block + 1
                yield block, attempts.get(block, 0), block in done

    def _end(self, block: int) -> int:
        return min((block + 1) * self.block, self.chunks)

    @staticmethod
    def _name(block: int, suffix: int) -> str:
        return f"ledger/{block // FOLDER:04d}/{block:06d}.{suffix}"
