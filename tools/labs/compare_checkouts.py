"""Two checkouts of this package side by side: the same jobs give the same bits.

    python tools/labs/compare_checkouts.py OLD NEW [--only JOB …] [--may-differ NAME …]
                                           [--cache FOLDER] [--at-once K] [--json]

Each job of `TABLE` is trained in both checkouts (folders that hold mpigossip/ and jobs/) on this
machine, in this Python environment, by the command line alone. Compared are

* the digest: SHA-256 over the parameters of all nodes, as printed and as in the checkpoint;
* the columns of the log, but for times;
* the digest that each reaches from OLD's last checkpoint but one, and where the table says
  `stops`, that of its own run stopped at half and resumed.

Then NEW reads what OLD has written: log, plot, report, checkpoint. A job that OLD refuses and NEW
trains is new, not different. Exit code 1 if anything fails or differs (but for `--may-differ`,
the jobs and columns of the log where that is meant), 2 for a wrong call.

The launcher is MPIGOSSIP_MPIEXEC, or the mpiexec beside this Python or on PATH. `--cache` keeps the
results of an OLD without local changes, by its commit and by what else bits depend on.
"""

from __future__ import annotations

import argparse
import difflib
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from checkouts import REFUSED, Checkout, Job, Result, Store, Wrong, measured, surroundings

COMMON = """
model.name=mlp schedule.warmup_epochs=0 run.steps=24 checkpoint.every_steps=12 run.epochs=30
algorithm.name=dmsgd local.name=none schedule.name=milestones schedule.lr=0.2
schedule.milestones=[20,26]
log.flush_steps=6 log.consensus_every=2
"""
"""Settings that come before a job's own."""
COLUMNS = ("steps/", "evaluations/")
"""How the names of columns of the log begin."""

TABLE = """
# JOB              simulate|ranks NODES  settings of jobs/digits.toml in place of COMMON's;
#                     indented lines go on. Words without "=":
#   stops             each checkout's own run is also stopped at half and resumed
#   forgets           resuming isn't exact by design, so nothing is resumed
#   whole             without COMMON

# parallel SGD; averages over all nodes
parallel           simulate 3  algorithm.name=parallel algorithm.clip_norm=1 graph.name=complete
parallel-adamw     simulate 4  algorithm.name=parallel local.name=adamw schedule.lr=0.01
                      local.decoupled_decay=0.01 algorithm.accumulate=2 node.wire=bf16
                      graph.name=complete node.devices=cpu:2
parallel-sign      simulate 2  algorithm.name=parallel local.name=nesterov node.wire=sign
                      graph.name=complete node.devices=cpu:2 node.shard=false
qsgd               simulate 5  algorithm.name=qsgd algorithm.decay_all=false graph.name=complete
                      node.levels=7
cpsgd              simulate 3  algorithm.name=cpsgd local.name=nesterov cadence.period=5
                      node.wire=bf16
adpsgd             simulate 4  algorithm.name=adpsgd local.name=momentum local.beta=0.8
                      cadence.period=3 data.partition=sorted node.devices=cpu:2 stops
gossip-pga         simulate 6  algorithm.name=gossip-pga local.name=adamw schedule.lr=0.01
                      schedule.scale=none graph.name=hyper-hypercube graph.p=2
gossip-aga         simulate 4  algorithm.name=gossip-aga local.name=accumadam
                      local.period=4 schedule.lr=0.01 cadence.warmup=2 cadence.period=2
                      graph.name=hypercube node.wire=qsgd

# averages with neighbours
dsgd               simulate 5  algorithm.name=dsgd graph.name=ring data.partition=dirichlet
                      node.wire=bf16 node.precision=bf16
dsgd-ahead         simulate 6  algorithm.name=dsgd algorithm.style=awc local.name=momentum
                      algorithm.clip_norm=0.5 graph.name=exponential node.devices=cpu:2
dsgd-ahead-decay   simulate 4  algorithm.name=dsgd algorithm.style=awc local.name=adamw
                      local.decoupled_decay=0.01 schedule.lr=0.01 graph.name=half-random
dsgd-vmap          simulate 6  algorithm.name=dsgd local.name=nesterov algorithm.accumulate=2
                      graph.order=permuted run.seed=3 node.vmap=true
dsgd-asynchronous  simulate 5  algorithm.name=dsgd local.name=momentum graph.degree=2
                      graph.name=ring-lattice node.mixer=asynchronous faults.slow_times=3
                      faults.slow_steps=4 faults.lost=0.2 forgets
dsgd-erdos-renyi   simulate 6  algorithm.name=dsgd local.name=adamw algorithm.clip_norm=1
                      schedule.name=cosine schedule.lr=0.01 graph.name=erdos-renyi graph.seed=5
                      graph.weights=max-degree graph.lazy=true node.wire=qsgd
dmsgd-base-2       simulate 5  graph.name=base-2 cadence.name=every cadence.period=3
                      algorithm.accumulate=2 node.wire=bf16 node.devices=cpu:2
dmsgd-lenet        simulate 4  model.name=lenet algorithm.momentum=delayed node.precision=bf16
                      graph.name=random-matching run.steps=12 checkpoint.every_steps=6
dmsgd-resnet       simulate 2  model.name=resnet20 algorithm.decay_all=false node.devices=cpu:2
                      data.augment=crop-flip run.steps=8 checkpoint.every_steps=4
dmsgd-never        simulate 3  cadence.name=never graph.name=identity node.devices=cpu:3
dmsgd-vanilla      simulate 6  algorithm.name=dmsgd-vanilla local.name=nesterov
                      local.beta=0.95 algorithm.clip_norm=2 graph.name=grid
                      graph.weights=metropolis-hastings schedule.milestones=[0.1,0.3]
qg-dmsgd           simulate 6  algorithm.name=qg-dmsgd algorithm.nesterov=true graph.name=base-3
                      data.partition=sorted node.wire=qsgd node.levels=15 node.devices=cpu:2 stops
decentlam          simulate 4  algorithm.name=decentlam algorithm.clip_norm=1 graph.name=torus
                      algorithm.accumulate=2 node.devices=cpu:2 node.shard=false

# corrections for data that differ
d2                 simulate 5  algorithm.name=d2 local.name=momentum graph.name=ring
                      data.partition=dirichlet node.wire=bf16
d2-adamw           simulate 4  algorithm.name=d2 local.name=adamw algorithm.clip_norm=1
                      schedule.lr=0.01 graph.name=u-equistatic node.devices=cpu:2
dsgt               simulate 3  algorithm.name=dsgt local.name=momentum graph.name=exponential
                      data.partition=sorted node.wire=qsgd node.devices=cpu:2
dsgt-asynchronous  simulate 4  algorithm.name=dsgt algorithm.style=awc graph.name=complete
                      node.mixer=asynchronous faults.slow_times=2 faults.slow_nodes=2 forgets
momentum-tracking  simulate 5  algorithm.name=momentum-tracking algorithm.accumulate=2
                      graph.name=star cadence.name=every cadence.period=2
                      data.partition=mixed data.shuffled_percent=50
detag              simulate 4  algorithm.name=detag algorithm.phase=3 algorithm.beta=0.5
                      graph.name=path node.wire=bf16 node.devices=cpu:2
defacto            simulate 5  algorithm.name=defacto algorithm.accumulate=2
                      graph.name=spanning-tree

# directed graphs, compressed differences, outer steps
sgp                simulate 5  algorithm.name=sgp algorithm.clip_norm=1 graph.name=path
                      graph.weights=push node.wire=qsgd
ceca               simulate 4  algorithm.name=ceca local.name=momentum graph.name=ceca
ceca-6             simulate 6  algorithm.name=ceca local.name=adamw schedule.lr=0.01
                      graph.name=ceca node.precision=bf16 node.devices=cpu:2
choco              simulate 5  algorithm.name=choco local.name=momentum graph.name=ring
                      cadence.name=every cadence.period=2 node.wire=top-k node.kept=0.2 stops
slowmo             simulate 4  algorithm.name=slowmo local.name=adamw algorithm.slow_beta=0.7
                      schedule.lr=0.01 graph.name=ou-equidyn node.wire=bf16 node.devices=cpu:2
gasloc             simulate 5  algorithm.name=gasloc cadence.period=3 algorithm.outer_beta=0.5
                      schedule.lr=0.01 graph.name=base-2 node.wire=fp4 stops
sparseloco         simulate 4  algorithm.name=sparseloco cadence.period=4 node.kept=0.1
                      schedule.lr=0.01 node.devices=cpu:2 stops
sparta             simulate 3  algorithm.name=sparta node.kept=0.05 schedule.lr=0.01
noloco-fp4         simulate 4  algorithm.name=noloco node.wire=fp4
                      schedule.lr=0.01

# ranks: neighbours on the same host are read in place, or put into windows
ranks-dmsgd        ranks 4     algorithm.clip_norm=1 node.devices=cpu:2 stops
ranks-dmsgd-put    ranks 3     graph.name=base-3 algorithm.accumulate=2 node.wire=bf16
                      node.same_host=put
ranks-dsgd-ahead   ranks 3     algorithm.name=dsgd algorithm.style=awc local.name=accumadam
                      schedule.lr=0.01 graph.name=exponential node.same_host=put
ranks-sgp          ranks 3     algorithm.name=sgp local.name=adamw schedule.lr=0.01
                      graph.name=exponential node.wire=qsgd node.same_host=put node.devices=cpu:2
ranks-dsgt         ranks 4     algorithm.name=dsgt graph.name=one-peer-hypercube
                      data.partition=sorted node.wire=bf16
ranks-choco        ranks 2     algorithm.name=choco algorithm.clip_norm=1 graph.name=complete
                      node.wire=sign node.same_host=put node.devices=cpu:2
ranks-random-k     ranks 3     algorithm.name=choco algorithm.accumulate=2 graph.name=d-equistatic
                      node.wire=random-k node.kept=0.3
ranks-diloco       ranks 3     algorithm.name=diloco schedule.lr=0.01 cadence.period=4
                      node.same_host=put node.devices=cpu:2
ranks-noloco       ranks 4     algorithm.name=noloco schedule.lr=0.01 cadence.period=2
                      graph.name=random-matching node.wire=qsgd node.precision=bf16
ranks-slowmo       ranks 2     algorithm.name=slowmo cadence.period=4 node.same_host=put
                      node.devices=cpu:2 node.shard=false
ranks-parallel     ranks 2     algorithm.name=parallel algorithm.accumulate=2 graph.name=complete
                      node.devices=cpu:2

# what tools/quickstart.sh trains, and commands that read the RUN that OLD made of it
quickstart         ranks 4     node.devices=cpu:2 whole
read-show          read quickstart  log show RUN
read-csv           read quickstart  log export RUN --csv OUT.csv
read-plot          read quickstart  log plot RUN --out OUT.png
read-report        read quickstart  report RUN --html OUT.html
read-verify        read quickstart  checkpoint verify RUN
read-model         read quickstart  checkpoint export RUN --out OUT.safetensors
"""


def table(text: str = TABLE) -> dict[str, Job]:
    """The jobs by name, in the table's order."""
    rows: list[list[str]] = []
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            if not line.startswith(" "):
                rows.append([])
            rows[-1] += line.split()
    return {row[0]: _job(*row) for row in rows}


def _job(name: str, how: str, of: str, *words: str) -> Job:
    if how == "read":
        return Job(name, how, of, words)
    settings = [word for word in words if "=" in word]
    marks = frozenset(words) - set(settings)
    common = [] if "whole" in marks else COMMON.split()
    return Job(name, how, of, (*common, *settings), marks)


def compared(job: Job, store: Store, new: Checkout, work: Path, meant: Sequence[str]) -> dict:
    """A row: the verdict, its reasons, and both results."""
    before = store.get(job)
    after = measured(new, job, work / job.name, store.run)
    shutil.rmtree(work / job.name)
    word, reasons = verdict(before, after, meant)
    return {
        "job": job.name,
        "verdict": word,
        "reasons": reasons,
        "old": asdict(before),
        "new": asdict(after),
    }


def verdict(old: Result, new: Result, meant: Sequence[str] = ()) -> tuple[str, str]:
    """One of "equal", "new", "differs", "failed"; and the reasons.

    `meant`: columns of the log that may differ.
    """
    if old.code == REFUSED and not new.code:
        return "new", "OLD refuses it"
    failed = [f"{who}: {r.said}" for who, r in (("OLD", old), ("NEW", new)) if r.code]
    if failed:
        return "failed", "; ".join(failed)
    wrong = ["parameters"] if old.digest != new.digest else []
    both = [c for c in old.figures if c in new.figures and c not in meant]
    columns = [c for c in both if new.figures[c] != old.figures[c]]
    wrong += [f"log: {', '.join(columns)}"] if columns else []
    for what in ("onward", "stopped"):
        was, is_now = getattr(old, what), getattr(new, what)
        if is_now not in (was, old.digest):  # OLD may have resumed inexactly
            wrong.append(f"resumed ({what}): {is_now[:8]}, in OLD {was[:8]}")
    if wrong:
        return "differs", "; ".join(wrong)
    inexact = {old.onward, old.stopped} - {old.digest, ""}
    return "equal", "OLD resumes inexactly" if inexact else ""


def gone(rows: Sequence[dict]) -> list[str]:
    """Columns of the log that OLD writes and NEW doesn't: told, not counted as a difference."""
    pairs = [(row["old"]["figures"], row["new"]["figures"]) for row in rows]
    return sorted({name for old, new in pairs if new for name in old.keys() - new.keys()})


def line(job: Job, row: dict) -> str:
    """A row as it is printed."""
    old, new = row["old"], row["new"]
    shown = (old["digest"], new["digest"], new["onward"])
    digests = " ".join(f"{text[:8] or '-':8}" for text in shown)
    seconds = f"{old['seconds']:6.1f} {new['seconds']:6.1f}"
    found = f"{row['verdict']}: {row['reasons']}" if row["reasons"] else row["verdict"]
    return f"{job.name:18} {f'{job.how} {job.of}':15} {digests} {seconds}  {found}"


def chosen(only: Sequence[str]) -> list[Job]:
    """The jobs of these names, all without any."""
    jobs = table()
    for name in only:
        if name not in jobs:
            near = difflib.get_close_matches(name, jobs, n=1)
            raise Wrong(f'no job "{name}"; {f"did you mean {near[0]}?" if near else "see TABLE"}')
    return [job for name, job in jobs.items() if name in only or not only]


def main() -> int:
    """Compare, print the table, give the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("old", type=Path, metavar="OLD")
    parser.add_argument("new", type=Path, metavar="NEW")
    parser.add_argument("--only", nargs="+", default=[], metavar="JOB", help="names of the table")
    parser.add_argument("--may-differ", nargs="+", default=[], metavar="NAME", help="not counted")
    parser.add_argument("--cache", type=Path, help="folder where OLD's results are kept")
    parser.add_argument("--at-once", type=int, default=1, metavar="K", help="jobs at the same time")
    parser.add_argument("--json", action="store_true", help="print rows as JSON, no table")
    options = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory(prefix="checkouts-") as work:
            return compare(options, Path(work))
    except Wrong as wrong:
        print(f"{Path(sys.argv[0]).name}: {wrong}", file=sys.stderr)
        return 2


def compare(options: argparse.Namespace, work: Path) -> int:
    """The exit code of a whole comparison."""
    begin, jobs = time.monotonic(), chosen(options.only)
    chosen([name for name in options.may_differ if not name.startswith(COLUMNS)])
    old, new = Checkout(options.old), Checkout(options.new)
    commit = old.commit() if options.cache else None
    if options.cache and commit is None:
        print(f"{options.old} has no commit or local changes: nothing cached", file=sys.stderr)
    kept = options.cache.resolve() / f"{commit[:12]}-{surroundings()}" if commit else work / "old"
    store, rows = Store(old, kept), []
    say: Callable = (lambda text: None) if options.json else lambda text: print(text, flush=True)
    say(f"{'job':18} {'':15} {'OLD':8} {'NEW':8} {'resumed':8} {'OLD s':>6} {'NEW s':>6}")
    for name in {job.of for job in jobs if job.how == "read"}:
        store.get(table()[name])
    with ThreadPoolExecutor(options.at_once) as pool:
        results = pool.map(
            lambda job: compared(job, store, new, work / "new", options.may_differ), jobs
        )
        for job, row in zip(jobs, results, strict=True):
            rows.append(row)
            say(line(job, row))
    bad = [row for row in rows if row["verdict"] in ("differs", "failed")]
    meant = [r for r in bad if r["verdict"] == "differs" and r["job"] in options.may_differ]
    if lost := gone(rows):
        say(f"columns of OLD's logs that NEW's lack: {', '.join(lost)}")
    for row in bad:
        say(f"\n{row['job']} {row['verdict']}:\n  {row['new']['command']}")
    say(
        f"\n{len(rows)} jobs, {len(bad)} differ or fail, {len(meant)} of them may; "
        f"{time.monotonic() - begin:.0f} s, "
        f"{len(store.known)} of OLD's results from the cache"
    )
    if options.json:
        print(json.dumps(rows, indent=1))
    return int(len(bad) > len(meant))


if __name__ == "__main__":
    sys.exit(main())
