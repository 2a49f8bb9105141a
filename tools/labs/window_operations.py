"""Test that `mpigossip.Window` neither loses nor duplicates values, and `mpigossip.Averager`.

    mpirun -n 4 python tools/labs/window_operations.py --graph ring --dtype int64 --count 10000
    mpirun -n 4 python tools/labs/window_operations.py --averager --graph ring --count 10000

Each rank makes ``--count`` random calls of `accumulate`, `update` and `flush` at its own speed. The
calls move parts of the ranks' arrays along the edges of the graph. After the last call,
three conditions must hold:

* The sum of all arrays is the sum at the start: exactly for integers, and to 1e-9 for arrays of
  floating-point numbers. The push-sum weights of the latter add up to the number of ranks.
* The number of messages that a rank has sent to a neighbour equals the number that the neighbour
  has received from it.
* No array was read while it was written. All elements of an array are equal at all times, so
  different elements would prove such a read.

With ``--averager``, all ranks make the same random calls of two Averagers, of float64 and int64
numbers, and compare each result with its formula: to 1e-12, and integers and received arrays
exactly.

The exit code is 1 if a condition does not hold.
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import mpigossip  # noqa: E402
from tests.mixing.averager_operations import random_averages  # noqa: E402
from tests.mixing.window_operations import find_errors, random_operations  # noqa: E402


def main() -> int:
    """Run the calls on all ranks, print the result on rank 0, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--graph", default="ring", help="name of the graph (default: ring)")
    parser.add_argument("--dtype", default="int64", help="dtype of the array (default: int64)")
    parser.add_argument("--count", type=int, default=10000, help="calls of each rank")
    parser.add_argument("--width", type=int, default=257, help="elements of the array")
    parser.add_argument(
        "--averager", action="store_true", help="call Averagers of float64 and int64 numbers"
    )
    options = parser.parse_args()
    with mpigossip.world() as world:
        begin = time.monotonic()
        if options.averager:
            sentences = random_averages(world, options.graph, options.count, options.width)
            seconds = time.monotonic() - begin
            errors = sum(world.gather(sentences) or [], [])
        else:
            result = random_operations(
                world, options.graph, options.dtype, options.count, options.width
            )
            seconds = time.monotonic() - begin
            results = world.gather(result)
            errors = find_errors(results) if world.rank == 0 else []
        for sentence in errors:
            print(sentence)
        if world.rank == 0:
            verdict = f"{len(errors)} errors" if errors else "good"
            print(
                f"{world.size} ranks, {options.graph}, "
                f"{'Averager' if options.averager else options.dtype}, {options.count} calls "
                f"per rank in {seconds:.1f} s: {verdict}"
            )
        return int(world.broadcast(bool(errors)))


if __name__ == "__main__":
    sys.exit(main())
