"""`mpigossip bench` under a launcher: each figure as a multiple of the limit of the same run."""

from __future__ import annotations

import json
from pathlib import Path

from mpigossip.commands.arguments import amount, command, size_in_bytes, tell

EXAMPLES = """
mpirun -n 2 mpigossip bench exchange --sizes 1MB 100MB
srun mpigossip bench allreduce --json
"""


def add(commands) -> None:
    """Add it to the parser."""
    summary = "measure under mpirun, each figure as a multiple of the limit found in the same run"
    bench = command(commands, "bench", run, summary, EXAMPLES)
    kinds = ["exchange", "allreduce", "overlap", "checkpoint"]
    bench.add_argument("what", choices=kinds, help="what to measure")
    bench.add_argument("--graphs", nargs="+", metavar="GRAPH", help="for exchange")
    bench.add_argument(
        "--sizes", nargs="+", type=size_in_bytes, metavar="BYTES",
        default=[10**k for k in range(3, 10)],
        help="bytes of a message, such as 1KB or 100MB; default: 1KB 10KB … 1GB, as memory allows",
    )  # fmt: skip
    bench.add_argument("--seconds", type=amount, default=1.0, help="spent on each row, about")
    bench.add_argument(
        "--same-host", choices=["read", "put"], default="read", help="as node.same_host"
    )
    bench.add_argument("--folder", type=Path, default=Path(), help="for checkpoint: where to write")
    bench.add_argument("--json", action="store_true", help="a list of rows")
    bench.add_argument(
        "--out", type=Path, metavar="FILE", help="also into a file: HDF5, or JSON if named .json"
    )


def run(options) -> None:
    """Measure and print, on rank 0; ``--json`` prints one list of rows at the end.

    ``--out`` writes them into a file too.
    """
    import torch

    from mpigossip.analysis.bench import MEASURES, save
    from mpigossip.cluster.ranks import world
    from mpigossip.graphs import BUILDERS, graph

    torch.set_num_threads(1)
    for name in options.graphs or ():
        if name not in BUILDERS and not name.startswith("file:"):
            graph(name, 2)
    with world() as ranks:
        speaks, rows = ranks.rank == 0, []
        if speaks and not options.json:
            hosts = len(set(ranks.hosts))
            tell(f"{ranks.size} ranks on {hosts} host{'s' * (hosts > 1)}; medians")
            tell(f"{'':24} {'bytes':>13} {'ms':>9} {'spread':>7} {'GB/s':>7} {'x limit':>8}")
        for line in MEASURES[options.what](ranks, options):
            rows.append(line)
            if speaks and not options.json:
                hidden = f"  {line['hidden']:.0%} hidden" if "hidden" in line else ""
                tell(
                    f"{line['graph']:24} {line['bytes']:13,} {1e3 * line['seconds']:9.3f} "
                    f"{line['spread']:7.0%} {line['gigabytes_per_second']:7.2f} "
                    f"{line['times_limit']:8.2f}{hidden}",
                    flush=True,
                )
        if speaks and options.json:
            tell(json.dumps(rows))
        if speaks and options.out:
            save(rows, options.out, ranks, options.what)
