"""Models cut by fully_shard, or held by DDP, inside nodes: against full models mixed by W(t).

    python tools/labs/fsdp.py [--shapes 2x2 4x2 2x3] [--steps 20] [--json]

A small GPT with parameters that neither 2 nor 3 divide is trained by ranks of which every node has
some (nodes x ranks of each), and by one process: a full model a node, the mean gradient of the
node's batches, its own torch optimizer, mixed by the graph's W(t) in the simulator
(tests/doors/in_node.py). A row says how far the nodes' models are from those at most, relative to
their norm. Exit code 1 where nodes of two ranks don't have the same bits, or others are further
apart than 1e-5, with clipping 1e-4.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch

REPO = Path(__file__).parents[2]
sys.path.insert(0, str(REPO))

from tests import rankpool  # noqa: E402
from tests.doors.in_node import Case, mixed, on_ranks  # noqa: E402

RING, PERIOD = (("graph", "ring"),), (("period", 6),)
CASES = {
    "dsgd, AdamW": Case(),
    "dsgd, AdamW, not clipped": Case(clip=None),
    "dsgd, AdamW, shards copied": Case(copies=True),
    "dsgd, AdamW, torch.compile": Case(compiled=True),
    "dsgd, AdamW, bf16 policy": Case(bf16=True),
    "dsgd, AdamW, DDP": Case(ddp=True),
    "gossip-pga, AdamW": Case("gossip-pga", PERIOD),
    "diloco, AdamW": Case("diloco"),
    "d2 on a ring, AdamW": Case("d2", RING),
    "dsgt on a ring, AdamW": Case("dsgt", RING),
    "qg-dmsgd, SGD": Case("qg-dmsgd"),
    "qg-dmsgd, SGD, not clipped": Case("qg-dmsgd", clip=None),
}


def compared(nodes: int, per: int, steps: int) -> list[dict]:
    """A row for each case."""
    cases = [case._replace(steps=steps) for case in CASES.values()]
    pools = rankpool.Ranks()
    try:
        of_ranks = pools(nodes * per)(on_ranks, cases, per, timeout=1200)
    finally:
        pools.close()
    rows = []
    for k, (name, case) in enumerate(zip(CASES, cases, strict=True)):
        wanted, far, equal = mixed(nodes, per, case), 0.0, True
        for node, found in of_ranks:
            mine, theirs = torch.from_numpy(found[k]), wanted[node]
            far = max(far, float((mine - theirs).norm() / theirs.norm()))
            equal &= torch.equal(mine, theirs)
        good = equal if per == 2 else far <= (1e-4 if case.clip else 1e-5)
        rows.append({"shape": f"{nodes} x {per}", "training": name, "apart": far, "equal": equal,
                     "good": good})  # fmt: skip
    return rows


def main() -> int:
    """Run the table and print it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shapes", nargs="+", default=["2x2", "4x2", "2x3"])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    began, rows = time.perf_counter(), []
    for shape in options.shapes:
        nodes, per = map(int, shape.split("x"))
        rows += compared(nodes, per, options.steps)
        for row in rows[-len(CASES) :] if not options.json else ():
            how = "equal bits" if row["equal"] else f"{row['apart']:.1e}"
            wrong = "" if row["good"] else "  TOO FAR"
            print(f"| {row['training']} | {row['shape']} | {how} |{wrong}", flush=True)
    wrong = sum(not row["good"] for row in rows)
    if options.json:
        print(json.dumps(rows))
    else:
        print(f"{len(rows)} rows, {wrong} too far; {time.perf_counter() - began:.0f} s")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
