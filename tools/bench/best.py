"""Whether `plan --best` picks a fast way: its proposal, measured beside those it predicts fastest.

    tools/bench/atlas.py --networks "1 Gbit/s" --methods one-peer --out FILE.jsonl  # calibrates
    tools/bench/best.py FILE.jsonl --out BEST.jsonl                                 # needs root

Ten networks of four hosts, as the atlas has them. On each are measured: all-reduce (DDP on gloo),
the proposal, and the two ways with the shortest predicted step, as what is proposed need not be
one of them: of those within a tenth of the fastest `plan` takes what risks least. A way that the
file has isn't measured again.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from atlas import HOSTS, LAB, SMALL, Network, ddp, engine, linked, measured, on_hosts

NETWORKS = (1000, 500, 300, 200, 100, 70, 50, 30, 20, 10)
"""Mbit/s of a host's link."""
OTHERS = 2
"""Of the fastest predicted ways that are measured beside the proposal."""
WITHIN = 1.1
REDUCE = "all-reduce (DDP)"


def chosen(machine, mbit: int) -> list[dict]:
    """The proposal of a network and what is to be measured beside it, as rows."""
    from mpigossip.analysis.plan.best import best, proposals
    from mpigossip.training import assemble
    from mpigossip.training.costs import subject

    what = subject(assemble.load({}, SMALL))[0]
    found, _ = proposals({}, SMALL, what, linked(machine, mbit / 1000), HOSTS)
    pick = best(found)
    fastest = sorted(found, key=lambda one: one.row.step_s)[:OTHERS]
    some = [one for one in found if one is pick or one in fastest or one.label == REDUCE]
    return [
        {"mbit": mbit, "label": one.label, "proposed": one is pick,
         "predicted_s": one.row.step_s, "words": " ".join(one.settings)} for one in some
    ]  # fmt: skip


def ranks(rows: list[dict]) -> None:
    """Measure the ways of one network; a JSON line each on rank 0."""
    import torch

    import mpigossip

    torch.set_num_threads(1)
    with mpigossip.world() as world:
        for row in rows:
            if row["label"] == REDUCE:
                step, close, period = ddp(world, "")
            else:
                step, close, period = engine(world, row["words"], "")
            found = measured(world, step, period)
            close()
            if world.rank == 0:
                print(json.dumps(row | found), flush=True)


def table(rows: list[dict]) -> str:
    """A line a network, and in how many the proposal is the fastest or within a tenth of it."""
    lines = ["| Mbit/s | all-reduce, ms | proposed | ms (predicted) | fastest measured | ms | |",
             "|---|---|---|---|---|---|---|"]  # fmt: skip
    near = 0
    networks = sorted({row["mbit"] for row in rows}, reverse=True)
    for mbit in networks:
        here = [row for row in rows if row["mbit"] == mbit]
        pick = next(row for row in here if row["proposed"])
        reduce = next(row for row in here if row["label"] == REDUCE)
        least = min(here, key=lambda row: row["step_s"])
        ratio = pick["step_s"] / least["step_s"]
        near += ratio <= WITHIN
        lines.append(
            f"| {mbit} | {1e3 * reduce['step_s']:.0f} | {pick['label']} | "
            f"{1e3 * pick['step_s']:.0f} ({1e3 * pick['predicted_s']:.0f}) | {least['label']} | "
            f"{1e3 * least['step_s']:.0f} | {ratio:.2f} |"
        )
    loads = [row["load"] for row in rows]
    lines.append(f"\nwithin {WITHIN - 1:.0%} of the fastest: {near} of {len(networks)}; "
                 f"load {min(loads):.1f} to {max(loads):.1f}")  # fmt: skip
    return "\n".join(lines)


def main() -> None:
    """Measure what is missing, then the table."""
    from mpigossip.training.timing.machines import Machine

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("atlas", type=Path, nargs="?", help="where the calibration is")
    parser.add_argument("--out", type=Path, default=Path("best.jsonl"))
    parser.add_argument("--lab", type=Path, default=LAB)
    parser.add_argument("--networks", type=int, nargs="+", default=NETWORKS, help="Mbit/s")
    parser.add_argument("--ranks", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ranks:
        return ranks(json.loads(options.ranks))
    if options.atlas is None:
        parser.error("name the atlas' file: its first line is the calibration")
    lines = [json.loads(line) for line in options.atlas.read_text().splitlines()]
    machine = Machine(**next(line["machine"] for line in lines if "machine" in line))
    out = options.out
    there = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    have = {(row["mbit"], row["label"]) for row in there}
    for mbit in options.networks:
        picked = chosen(machine, mbit)
        proposed = {row["label"] for row in picked if row["proposed"]}
        for row in there:  # an older program may have proposed another
            if row["mbit"] == mbit:
                row["proposed"] = row["label"] in proposed
        rows = [row for row in picked if (mbit, row["label"]) not in have]
        if not rows:
            continue
        words = [__file__, "--ranks", json.dumps(rows)]
        for row in on_hosts(options.lab, Network(f"{mbit}mbit", mbit / 1000), words):
            there.append(row)
            with out.open("a") as file:
                file.write(json.dumps(row) + "\n")
    print(table(there))
    return None


if __name__ == "__main__":
    main()
