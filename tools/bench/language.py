"""What each method makes of equal tokens, and of equal bytes between nodes, on a language model.

    python tools/data/make_corpus.py corpus --megabytes 10
    mpigossip data pack --text corpus corpus.h5 --tokenizer bpe --vocabulary 4096
    python tools/bench/language.py corpus.h5 runs/language --hours 2    # again, until the table

Nodes are simulated. Each method has the learning rate that is best on a tenth of the tokens (a
seed of its own; 1/4 to 4 times 0.004, going on by twos), then trains on all of them, once, with two
seeds. What is done stays; a call that was stopped, or whose hours were over, goes on where it was,
inside of runs too. The last call writes table.md and loss_by_bytes.png.

Sizes: "cpu", 4 nodes, 2.6 million parameters with 4,096 entries of vocabulary; "gpu", gpt-10m and
8 nodes on one GPU; "tiny", a rehearsal of minutes. A step of "cpu" is 4,096 tokens and took 1.6 s
of one core (with 8,192 entries), so that all nine methods on 10 MB should take about six hours of
two cores: an estimate. What they made of 6 MB with half the batch in three: BENCHMARKS.md.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mpigossip.analysis.study.grid import Cell
from mpigossip.analysis.study.running import Runner
from mpigossip.analysis.study.search import chosen
from mpigossip.store.hdf5 import replacing
from mpigossip.store.log import read
from mpigossip.training import assemble

JOB = Path(__file__).parents[2] / "jobs/claims/jobs/language.toml"
JUDGE = "nats_per_byte"
SEEDS = (1, 2)
WITHIN = 1.02
"""Equal loss: at most 2 % above what `parallel` has at its end."""
SMOOTH = 0.05
"""Share of the steps over which the training loss is averaged."""
AGAIN = 75
"""Exit code of a call that ended before all was done."""

LOCAL = "local.name=adamw local.beta2=0.95 local.decoupled_decay=0.1"
METHODS = {
    "parallel": f"algorithm.name=parallel {LOCAL}",
    "dsgd": f"algorithm.name=dsgd graph.name=one-peer-exponential {LOCAL}",
    **{
        f"diloco-{period}": f"algorithm.name=diloco cadence.period={period} {LOCAL}"
        for period in (8, 32, 128)
    },
    "muloco-32": "algorithm.name=diloco cadence.period=32 local.name=muon "
    "local.decoupled_decay=0.1",
    "noloco-32": f"algorithm.name=noloco cadence.period=32 {LOCAL}",
    "gasloc-32": f"algorithm.name=gasloc cadence.period=32 {LOCAL}",
    "sparseloco-32": f"algorithm.name=sparseloco cadence.period=32 {LOCAL}",
}


class Size(NamedTuple):
    """How large everything is."""

    nodes: int
    settings: str
    processes: int | None = None


SIZES = {
    "tiny": Size(4, "model.layers=1 model.heads=2 model.width=16 data.context=16 data.batch=2"),
    "cpu": Size(4, "model.layers=4 model.heads=4 model.width=192 data.context=256 data.batch=4"),
    "gpu": Size(
        8,
        "model.layers=10 model.heads=4 model.width=256 data.context=512 data.batch=16 "
        "node.devices=cuda:0",
        processes=1,
    ),
}


def cells(size: Size, pack: Path, methods: Sequence[str], every: int) -> list[Cell]:
    """The methods, each on every so many-th sample."""
    common = (f"data.source={pack.resolve()}", f"data.every={every}", *size.settings.split())
    kind = "all" if every == 1 else f"one of {every}"
    return [
        Cell((("method", name), ("tokens", kind)), (*common, *METHODS[name].split()), size.nodes)
        for name in methods
    ]


class Curve(NamedTuple):
    """A run: smoothed training loss in nats a byte, and bytes that a node had sent, by steps."""

    loss: np.ndarray
    sent: np.ndarray
    last: float
    """test loss of the averaged model at the end"""

    def bytes_to(self, bar: float) -> float:
        """What a node had sent when the training loss first was at the bar; NaN: never."""
        at = np.flatnonzero(self.loss <= bar)
        return float(self.sent[at[0]]) if len(at) else float("nan")


def curve(folder: Path) -> Curve:
    """Of a finished run; loss inf where it diverged."""
    log = read(folder / "log.h5", ("bytes_sent", JUDGE))
    loss, sent = log.steps[JUDGE].mean(1), log.steps["bytes_sent"].mean(1)
    width = max(1, round(SMOOTH * len(loss)))
    total = np.concatenate([[0.0], np.cumsum(loss)])
    smooth = (total[width:] - total[:-width]) / width
    return Curve(smooth, sent[width - 1 :], float(log.summary.get(JUDGE, "inf")))


def table(rates: Mapping[str, float], curves: Mapping[str, Sequence[Curve]]) -> str:
    """One line a method, in Markdown."""
    first = curves.get("parallel", next(iter(curves.values())))
    final = statistics.mean(one.last for one in first)
    bar = WITHIN * statistics.mean(float(one.loss[-1]) for one in first)
    whole = statistics.mean(float(one.sent[-1]) for one in first)
    reached = statistics.mean(one.bytes_to(bar) for one in first)
    lines = [
        "| method | rate | nats/byte, test | against the first | bytes of a node | fewer | "
        "bytes to equal loss | fewer |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, runs in curves.items():
        mean = statistics.mean(one.last for one in runs)
        spread = max(one.last for one in runs) - min(one.last for one in runs)
        sent = statistics.mean(float(one.sent[-1]) for one in runs)
        needed = statistics.mean(one.bytes_to(bar) for one in runs)
        equal = "never" if np.isnan(needed) else f"{needed / 1e6:.1f} MB"
        times = "" if np.isnan(needed) or not needed else f"{reached / needed:.1f} x"
        lines.append(
            f"| {name} | {rates[name]:g} | {mean:.4f} ± {spread / 2:.4f} | "
            f"{100 * (mean / final - 1):+.2f} % | {sent / 1e6:.1f} MB | "
            f"{whole / sent if sent else float('inf'):.1f} x | {equal} | {times} |"
        )
    lines.append(
        f"\nEqual loss: training loss (mean over nodes and {100 * SMOOTH:g} % of the steps) at "
        f"most {bar:.4f} nats/byte, {100 * (WITHIN - 1):.0f} % above the first line's at its end."
    )
    return "\n".join(lines)


def draw(curves: Mapping[str, Sequence[Curve]], out: Path) -> None:
    """Training loss over the bytes that a node has sent."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for name, runs in curves.items():
        for k, one in enumerate(runs):
            label = name if k == 0 else None
            some = one.sent > 0
            axes.plot(
                one.sent[some] / 1e6,
                one.loss[some],
                label=label,
                color=f"C{list(curves).index(name)}",
            )
    axes.set(xscale="log", xlabel="MB that a node has sent", ylabel="training loss, nats per byte")
    axes.legend(fontsize="small")
    with replacing(out) as beside:
        figure.savefig(beside, dpi=150, format="png")
    plt.close(figure)


def run(pack: Path, out: Path, size: Size, methods: Sequence[str]) -> str:
    """All that isn't there yet, then the table."""
    runner = Runner(JOB, out, size.processes)
    trials = cells(size, pack, methods, 10)
    best, _ = chosen(trials, "search", JUDGE, runner)
    rates = {name: best[cell] for name, cell in zip(methods, trials, strict=True)}
    keys = {
        name: [(cell, rates[name], seed) for seed in SEEDS]
        for name, cell in zip(methods, cells(size, pack, methods, 1), strict=True)
    }
    runner.fill([key for each in keys.values() for key in each])
    curves = {name: [curve(runner.place(key)) for key in each] for name, each in keys.items()}
    text = table({name: rate or 0.0 for name, rate in rates.items()}, curves)
    with replacing(out / "table.md") as beside:
        beside.write_text(text + "\n")
    draw(curves, out / "loss_by_bytes.png")
    return text


def main(words: Sequence[str] | None = None) -> int:
    """0 with the table printed, 75 where hours are over."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pack", type=Path, help="of data pack --text")
    parser.add_argument("out", type=Path, help="folder of all runs")
    parser.add_argument("--size", choices=SIZES, default="cpu")
    parser.add_argument("--hours", type=float, help="of this call; unset: until all is done")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--settings", nargs="*", default=[], help="more of [section.key=value]")
    options = parser.parse_args(words)
    size = SIZES[options.size]
    size = size._replace(settings=" ".join([size.settings, *options.settings]))
    for cell in cells(size, options.pack, options.methods, 1):  # mistakes, before any work
        job = assemble.load(JOB, cell.settings)
        if found := assemble.mistakes(job, cell.nodes):
            raise SystemExit("\n".join(found))
    if options.hours:
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 3600 * options.hours)
    try:
        print(run(options.pack, options.out, size, options.methods))
    except KeyboardInterrupt:
        print(f"not all is done yet: call again with {options.out}", file=sys.stderr)
        return AGAIN
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
