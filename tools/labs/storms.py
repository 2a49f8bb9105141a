"""Test trainings in a folder whose members are killed, stopped and slowed down at random.

    python tools/labs/storms.py --runs 100 [--seed 0] [--rate 0.01] [--ranks 2 [--streamed]]
        [--mounts A B C]

Such a training is called a storm. It also simulates faults of the file system: listings of folders
that are stale for twice the lease, calls of link(2) that report an error although they have
succeeded, and a full disk. The clocks of members differ by minutes. With ``--rate``, the calls
open, read, readdir, link, unlink and fsync of each member fail at random, too: with EACCES,
ENOTCONN, ESHUTDOWN, EKEYEXPIRED, EINTR, ENOMEM, EIO, ESTALE, and with ENOENT for a file that
exists. Such a fault affects one call, or lasts for half a lease or three leases.

With ``--ranks``, each member has several ranks, which are threads here. Each rank writes a part of
the models. If a rank is killed, its member ends. With ``--streamed``, each rank writes and reads
its elements piece by piece, like the ranks of a program with FSDP2, and ``--rate`` applies to all
ranks.

With ``--mounts``, the folder is on a file system that is mounted at several paths, for example by
the clients of `tools/labs/files.sh`. The replay uses the last path, and members use the others.

Each training has to end. Every chunk has to be in exactly one published round, and a replay has to
compute the same models. A member must not end with a traceback: it has to report a fault of the
file system as a user error.
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


def run_storm(
    seed: int,
    plan: TrainingPlan,
    rate: float,
    ranks: int = 1,
    mounts: Sequence[Path | None] = (None,),
    streamed: bool = False,
) -> tuple[str, dict[str, int]]:
    """Run a storm in a temporary folder, and check its result.

    :param seed: seed of its random numbers
    :param plan: facts about the training
    :param rate: probability that a fault begins at a call of the file system
    :param ranks: number of ranks of each member
    :param mounts: paths at which one file system is mounted. The replay uses the last path, and
        members use the others, or the same path if there is only one; None: folder for temporary
        files
    :param streamed: whether each rank writes and reads its elements piece by piece
    :return: text about the problems, "" if there are none; number of members by the way in which
        they ended, and number of faults by name
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
            streamed=streamed,
            mounts=roots[:-1] or roots,
            stale_s=2 * plan.lease_s,
            lost=0.2,
            full=0.02,
        )
        counts = chunks_of(roots[-1], plan)
        problems = []
        if twice := sum(counts[chunk] > 1 for chunk in range(plan.chunks)):
            problems.append(f"{twice} chunks were trained more than once")
        if never := sum(not counts[chunk] for chunk in range(plan.chunks)):
            problems.append(f"{never} chunks were never trained")
        if ends["alive"]:
            problems.append(f"{ends['alive']} members did not end")
        if ends.get("traceback"):
            problems.append(f"{ends['traceback']} members ended with a traceback")
        try:
            if replay(roots[-1], plan, ranks) != plan.chunks:
                problems.append("the number of replayed rounds is not the number of chunks")
        except Exception as error:  # noqa: BLE001
            problems.append(f"the replay failed: {type(error).__name__}: {str(error)[:60]}")
        return "; ".join(problems), ends


def main() -> int:
    """Run the storms, print a line for each, and return 1 if any of them has problems."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--chunks", type=int, default=120)
    parser.add_argument("--lease", type=float, default=0.3, help="lease of a claim in seconds")
    parser.add_argument(
        "--rate", type=float, default=0.0, help="fraction of operations at which a fault begins"
    )
    parser.add_argument("--ranks", type=int, default=1, help="ranks of each member, 1, 2 or 4")
    parser.add_argument("--streamed", action="store_true", help="write models by pieces (FSDP2)")
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
        problem, ends = run_storm(
            seed, plan, options.rate, options.ranks, options.mounts, options.streamed
        )
        total.update(ends)
        if problem:
            wrong[seed] = problem
        print(f"seed {seed}, {time.monotonic() - began:.0f} s: {problem or 'right'}", flush=True)
    seconds = time.monotonic() - begun
    faults = {name: count for name, count in sorted(total.items()) if " " in name}
    ends = {name: count for name, count in total.items() if " " not in name}
    print(f"{options.runs} runs, {seconds:.0f} s, members ended {ends}; faults {faults}")
    print(f"{len(wrong)} runs went wrong: {wrong}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
