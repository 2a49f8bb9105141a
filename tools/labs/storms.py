"""Kill, stop and slow down members of a training in a folder at random ("storms").

    python tools/labs/storms.py --runs 100 [--seed 0] [--rate 0.01] [--ranks 2] [--mounts A B C]

A storm also simulates faults of the file system: listings of folders that are stale for twice the
lease, calls of link(2) that report an error although they have succeeded, and a full disk. The
clocks of members differ by minutes. With ``--rate``, the calls open, read, readdir, link, unlink
and fsync of each member fail at random, too: with EACCES, ENOTCONN, ESHUTDOWN, EKEYEXPIRED, EINTR,
ENOMEM, EIO, ESTALE, and with ENOENT for a file that exists. They fail once, for half a lease, or
for three leases.

With ``--ranks``, each member has several ranks, which are threads here. Each of them writes its
part of the models, and may be killed, which ends its member.

With ``--mounts``, the folder is on a file system that is mounted at each of these paths, such as
the clients of `tools/labs/files.sh` have. Members use all paths but the last, and the replay
uses the last.

Each training has to end. Every chunk has to be in exactly one published round, and a replay has to
give the same models. A member may not end with an error of the file system, except for a user
error.
"""

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from mpigossip.members.place import TrainingPlan  # noqa: E402
from tests.members.storm import chunks_of, replay, storm  # noqa: E402


def one(
    seed: int,
    plan: TrainingPlan,
    rate: float,
    ranks: int = 1,
    mounts: Sequence[Path | None] = (None,),
) -> tuple[str, dict[str, int]]:
    """Run a storm.

    :param seed: seed of its random numbers
    :param plan: facts about the training
    :param rate: probability with which a call begins to fail
    :param ranks: number of ranks of each member
    :param mounts: paths at which one file system is mounted: members use all but the last, and the
        replay uses the last. None is the folder for temporary files
    :return: description of the problem after the storm, "" if there is none; and the number of
        members by the way in which they ended
    """
    # A stale listing may hide files from their removal.
    with tempfile.TemporaryDirectory(dir=mounts[0], ignore_cleanup_errors=True) as folder:
        root = Path(folder) / "run"
        roots = [mount / root.relative_to(mounts[0]) if mount else root for mount in mounts]
        ends = storm(
            root,
            seed,
            plan.chunks,
            lease_s=plan.lease_s,
            rate=rate,
            ranks=ranks,
            mounts=roots[:-1] or roots,
            stale_s=2 * plan.lease_s,
            lost=0.2,
            full=0.02,
        )
        counts = chunks_of(roots[-1], plan)
        problems = []
        if twice := sum(counts[chunk] > 1 for chunk in range(plan.chunks)):
            problems.append(f"{twice} chunks trained more than once")
        if never := sum(not counts[chunk] for chunk in range(plan.chunks)):
            problems.append(f"{never} chunks never trained")
        if ends["alive"]:
            problems.append(f"{ends['alive']} members never ended")
        if ends.get("traceback"):
            problems.append(f"{ends['traceback']} members ended with a traceback")
        try:
            if replay(roots[-1], plan, ranks) != plan.chunks:
                problems.append("other rounds than chunks are repeated")
        except Exception as error:  # noqa: BLE001
            problems.append(f"replay: {type(error).__name__}: {str(error)[:60]}")
        return "; ".join(problems), ends


def main() -> int:
    """Run the storms; the exit code is 1 if any of them went wrong."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--chunks", type=int, default=120)
    parser.add_argument("--lease", type=float, default=0.3, help="seconds")
    parser.add_argument(
        "--rate", type=float, default=0.0, help="fraction of operations at which a fault begins"
    )
    parser.add_argument("--ranks", type=int, default=1, help="ranks of each member, 1, 2 or 4")
    parser.add_argument(
        "--mounts",
        type=Path,
        nargs="+",
        default=[None],
        metavar="PATH",
        help="paths at which the file system to use is mounted (default: the temporary folder)",
    )
    options = parser.parse_args()
    plan = TrainingPlan(options.chunks, 4, options.lease)
    total = Counter()
    wrong = {}
    begun = time.monotonic()
    for seed in range(options.seed, options.seed + options.runs):
        began = time.monotonic()
        what, ends = one(seed, plan, options.rate, options.ranks, options.mounts)
        total.update(ends)
        if what:
            wrong[seed] = what
        print(f"seed {seed}, {time.monotonic() - began:.0f} s: {what or 'right'}", flush=True)
    seconds = time.monotonic() - begun
    faults = {name: count for name, count in sorted(total.items()) if " " in name}
    ends = {name: count for name, count in total.items() if " " not in name}
    print(f"{options.runs} runs, {seconds:.0f} s, members ended {ends}; faults {faults}")
    print(f"{len(wrong)} runs went wrong: {wrong}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
