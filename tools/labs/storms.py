"""Storms: members of a training in a folder are killed, stopped and slowed at random.

    python tools/labs/storms.py --runs 100 [--seed 0]

Stale listings (twice the lease), clocks minutes apart, lost replies of link(2), a full disk. Each
run has to end, with every chunk in exactly one published round and an equal replay.
"""

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from mpigossip.mixing.members.place import Plan  # noqa: E402
from tests.mixing.members.storm import chunks_of, replay, storm  # noqa: E402

PLAN = Plan(120, 4, 0.3)


def one(seed: int) -> tuple[bool, dict[str, int]]:
    """Return whether a storm went right, and how its members ended."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "run"
        ends = storm(root, seed, stale_s=2 * PLAN.lease_s, lost=0.2, full=0.02)
        found = chunks_of(root, PLAN)
        once = all(found[chunk] == 1 for chunk in range(PLAN.chunks))
        return once and not ends["alive"] and replay(root, PLAN) == PLAN.chunks, ends


def main() -> int:
    """Run them; exit code 1 where one went wrong."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    total, wrong, begun = Counter(), [], time.monotonic()
    for seed in range(options.seed, options.seed + options.runs):
        right, ends = one(seed)
        total.update(ends)
        if not right:
            wrong.append(seed)
    seconds = time.monotonic() - begun
    print(f"{options.runs} runs, {seconds:.0f} s, members ended {dict(total)}; wrong: {wrong}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
