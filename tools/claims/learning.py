"""Claims on training, from the runs of `training.py`: the rows, and the picture of curves."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from table import Row
from training import OutOfTime, Protocol, Runs

NAMES = {"dpsgd": "D-PSGD", "d2": "D²", "dsgt": "DSGT", "detag": "DeTAG"}
COLOURS, DASHES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7"), ("-", "--", "-.", ":")
LINES = [{"color": c, "linestyle": d} for c, d in zip(COLOURS, DASHES, strict=True)]
CLEAR = 0.03
"""A clear margin: three points, six standard errors of an accuracy on 10,000 images."""


def _mean(protocol: Protocol, runs: Runs, case: str, method: str, **changes) -> dict[str, float]:
    """Figures of a method, averaged over the protocol's seeds."""
    found = protocol.reported(runs, case, method, **changes)
    keys = [key for key in found[0] if key not in ("curve", "diverged")]
    return {key: sum(run.get(key, float("nan")) for run in found) / len(found) for key in keys}


def _accuracies(protocol: Protocol, runs: Runs, case: str) -> tuple[dict[str, float], str]:
    """Accuracy of each method in a case, and the same in words with the rates."""
    found, words = {}, []
    for method in protocol.table["methods"]:
        found[method] = _mean(protocol, runs, case, method)["accuracy"]
        rate = protocol.rate(runs, case, method)
        words.append(f"{NAMES.get(method, method)} {found[method]:.1%} (lr {rate:g})")
    return found, ", ".join(words)


def _rows(name: str, claim: str, source: str, expected: str, judge: Callable) -> Iterator[Row]:
    """One row; where its runs are missing, one that says why."""
    try:
        measured, holds = judge()
    except OutOfTime as reason:
        measured, holds = f"not run: {reason}", None
    yield Row(name, claim, source, expected, measured, holds)


def do(options, runs: Runs) -> None:
    """All runs of the chosen claims, side by side; what they lack is said by the rows."""
    chosen = [f.__name__ for f in CLAIMS if not options.only or f.__name__ in options.only]
    protocols = {name: Protocol.read(options.protocols / f"{name}.toml") for name in chosen}
    with contextlib.suppress(OutOfTime):
        runs.fill(
            protocol.report(runs, case, method, seed)
            for protocol in protocols.values()
            for case, method in protocol.each()
            if (protocol.name, method) != ("periodic", "cpsgd")  # its period is not known yet
            for seed in protocol.table["seeds"]
        )


def shuffled(options, runs: Runs) -> Iterator[Row]:
    """D-PSGD, D², DSGT and DeTAG as the nodes' data become different."""
    protocol = Protocol.read(options.protocols / "shuffled.toml")
    source, where = "Lu & De Sa, JMLR 2023", "LeNet, 8 nodes, ring"

    def alike():
        found, words = _accuracies(protocol, runs, "100%")
        spread = max(found.values()) - min(found.values())
        return f"{words}; {spread * 100:.1f} points apart", spread <= 0.02

    yield from _rows(
        "shuffled-100%", f"{where}, 100 % shuffled: all alike", source, "within 2 points", alike
    )
    for case in ("50%", "25%", "0%"):

        def ahead(case=case):
            found, words = _accuracies(protocol, runs, case)
            margin = found["detag"] - found["dpsgd"]
            words += f"; DeTAG − D-PSGD: {margin * 100:+.1f} points"
            return words, margin >= CLEAR

        yield from _rows(
            f"shuffled-{case}",
            f"{where}, {case[:-1]} % shuffled: DeTAG ahead of D-PSGD",
            source,
            f"by ≥ {CLEAR * 100:.0f} points",
            ahead,
        )

    def order():
        found, _ = _accuracies(protocol, runs, "0%")
        ranked = sorted(found, key=found.__getitem__, reverse=True)
        return ", ".join(NAMES[m] for m in ranked), ranked == ["detag", "dsgt", "d2", "dpsgd"]

    expected = "DeTAG, DSGT, D², D-PSGD"
    yield from _rows("shuffled-order", f"{where}, 0 % shuffled: order", source, expected, order)


def topologies(options, runs: Runs) -> Iterator[Row]:
    """Parallel SGD and three graphs."""
    protocol = Protocol.read(options.protocols / "topologies.toml")

    def close():
        found, words = _accuracies(protocol, runs, "shuffled")
        lost = found["parallel"] - found["one-peer"]
        return f"{words}; one-peer − parallel: {-lost * 100:+.1f} points", abs(lost) <= 0.01

    def order():
        found, _ = _accuracies(protocol, runs, "shuffled")
        ranked = sorted(found, key=found.__getitem__, reverse=True)
        return ", ".join(ranked), found["one-peer"] >= found["parallel"] >= found["ring"]

    source, where = "Ying et al., NeurIPS 2021", "LeNet, 16 nodes, dmsgd"
    yield from _rows(
        "topologies",
        f"{where}: one-peer exponential like parallel SGD",
        source,
        "within 1 point",
        close,
    )
    expected = "one-peer ≥ parallel ≥ ring"
    yield from _rows("topologies-order", f"{where}: order of accuracy", source, expected, order)


def periodic(options, runs: Runs) -> Iterator[Row]:
    """ADPSGD against CPSGD at equal traffic, and against QSGD."""
    protocol = Protocol.read(options.protocols / "periodic.toml")

    def words(name: str, run: dict[str, float], method: str) -> str:
        return (
            f"{name} (lr {protocol.rate(runs, 'shuffled', method):g}): training loss "
            f"{run['train_loss']:.4f}, test loss {run['loss']:.4f}, accuracy "
            f"{run['accuracy']:.1%}, mean variance {run['consensus']:.1e}, "
            f"{run['bytes'] / 1e6:.1f} MB a node in {run['exchanges']:g} exchanges"
        )

    def against_cpsgd():
        ours = _mean(protocol, runs, "shuffled", "adpsgd")
        period = max(1, int(ours["steps"] // ours["exchanges"]))
        theirs = _mean(protocol, runs, "shuffled", "cpsgd", cadence={"period": period})
        lower = (ours[k] < theirs[k] for k in ("train_loss", "consensus"))
        said = f"{words('ADPSGD', ours, 'adpsgd')}; "
        return said + words(f"CPSGD, period {period}", theirs, "cpsgd"), all(lower)

    def against_qsgd():
        ours = _mean(protocol, runs, "shuffled", "adpsgd")
        theirs = _mean(protocol, runs, "shuffled", "qsgd")
        share = ours["bytes"] / theirs["bytes"]
        said = f"{words('QSGD, 8 bits', theirs, 'qsgd')}; ADPSGD's bytes are {share:.2f} of it"
        return said, share <= 0.5 and ours["train_loss"] <= theirs["train_loss"]

    source = "Jiang & Agrawal 2020"
    yield from _rows(
        "adpsgd-cpsgd",
        "LeNet, 8 nodes: ADPSGD against CPSGD at equal traffic (CPSGD not below)",
        source,
        "lower final training loss, smaller mean variance",
        against_cpsgd,
    )
    yield from _rows(
        "adpsgd-qsgd",
        "LeNet, 8 nodes: ADPSGD against QSGD",
        source,
        "half the bytes, training loss no worse",
        against_qsgd,
    )


def momentum(options, runs: Runs) -> Iterator[Row]:
    """Momentum averaged against momentum kept local, different data on each node."""
    protocol = Protocol.read(options.protocols / "momentum.toml")

    def measured():
        return _accuracies(protocol, runs, "Dirichlet 0.1")[1], None

    yield from _rows(
        "momentum",
        "LeNet, 8 nodes, one-peer exponential, Dirichlet 0.1: dmsgd (averaged) against "
        "dmsgd-vanilla (local)",
        "question of Ying et al., NeurIPS 2021",
        "as measured",
        measured,
    )


CLAIMS = (shuffled, topologies, periodic, momentum)


def draw(options, runs: Runs, out: Path) -> None:
    """Accuracy on a fifth of the test images against steps: a panel for each case with runs.

    A method has one colour, each of its seeds a line.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels: dict[str, list] = {}
    for entry in runs.entries:
        run, result = entry["run"], entry["result"]
        if run["kind"] == "test":
            panels.setdefault(f"{run['claim']}, {run['case']}", []).append((run, result["curve"]))
    columns = 4
    lines = -(-len(panels) // columns)
    figure, axes = pyplot.subplots(
        lines, columns, figsize=(3.6 * columns, 3.3 * lines), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, (title, members) in zip(axes.flat, panels.items(), strict=False):
        styles: dict[str, dict] = {}
        for run, curve in members:
            label = f"{NAMES.get(run['method'], run['method'])}, lr {run['lr']:g}"
            style = styles.get(label) or {"label": label} | LINES[len(styles)]
            styles.setdefault(label, {k: v for k, v in style.items() if k != "label"})
            steps, accuracies = [p[0] for p in curve], [100 * p[2] for p in curve]
            axis.plot(steps, accuracies, linewidth=1.2, **style)
        axis.set(title=title, xlabel="steps", ylabel="test accuracy, %")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.22), ncol=2)
    figure.savefig(out, dpi=80)
    pyplot.close(figure)
