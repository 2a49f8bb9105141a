"""Studies: simulate grids of settings, nodes and seeds; tables and plots of the results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mpigossip.config import JobError
from mpigossip.studies.grid import Axis, cells_of
from mpigossip.studies.results import Results
from mpigossip.studies.running import Runner
from mpigossip.studies.search import chosen
from mpigossip.studies.tables import with_greek

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Study(Results):
    """The results of a grid, tables and curves; made by :func:`study`."""

    def plot(
        self,
        y: str | None = None,
        x: Literal["step", "epoch", "bytes", "time"] = "step",
        out: str | Path | None = None,
        theory: bool = False,
    ) -> Figure:
        """Draw a metric at each evaluation: mean over seeds, and 95 % interval as a band.

        A band that would include 0 of what is above 0 reaches as far below the mean, in ratio, as
        above.

        :param y: a metric, "loss" or "consensus_distance"; None: ``judge`` of the study
        :param x: steps, epochs, bytes sent by a node, or "time": virtual seconds, of jobs with a
            `[clock]`
        :param out: file to write; the suffix chooses PNG, PDF, SVG or PGF
        :param theory: also draw D-PSGD's rate on each graph (dots) and the lower bounds (grey), of
            "gradient_square" against steps, for the problems of theory
        """
        from mpigossip.store.hdf5 import replacing
        from mpigossip.studies.drawing import curves

        made = curves(self, y or self.judge, x, theory)
        if out is not None:
            with replacing(Path(out)) as beside:
                made.savefig(beside, dpi=150)
                if beside.suffix == ".pgf":
                    beside.write_text(with_greek(beside.read_text()))
        return made

    def transient(
        self, against: str = "parallel", y: str = "loss", within: float = 2.0
    ) -> list[dict[str, Any]]:
        """Return for each point the step from which its curve stays near a reference's; inf: never.

        A row also has n³/(1−ρ)² and n³/(1−ρ)⁴ of its graph, as "iid" and "non_iid".

        :param against: label of the reference, of equal nodes and as many equal labels as there are
        :param y: a metric of which less is better; of each node's own model "local_loss", …
        :param within: near is at most so many times the reference's mean over seeds, to the end
        """
        from mpigossip.studies.theory import transients

        return transients(self, against, y, within)


def study(
    job: str | Path,
    grid: Mapping[str, Axis] | None = None,
    *,
    nodes: int | Sequence[int] = 8,
    seeds: int | Sequence[int] = 3,
    rates: Sequence[float] | Literal["search", "fine"] | None = None,
    settings: Sequence[str] = (),
    judge: str | None = None,
    larger: bool | None = None,
    output: str | Path | None = None,
    processes: int | None = None,
    skip: bool = False,
) -> Study:
    """Simulate every point of a grid with every seed, but for what is there already.

    A study that was killed, or is asked again with more points or seeds, does only what is missing,
    to the same bits. A loss that isn't a number is a result, "diverged".

    :param job: a job file, or the name of an example, such as "digits"
    :param grid: an axis for each name: values of a setting
        (``{"graph.name": ["ring", "base-2"]}``); or under a name of your own the settings that each
        label stands for (``{"method": {"QG": "algorithm.name=qg-dmsgd algorithm.beta=0.9"}}``)
    :param nodes: one number of nodes or several, which are one more axis
    :param seeds: how many, from 0 on, or which; `run.seed` draws who has which samples (but for
        `data.partition = "sorted"`), initial parameters, order of samples and random graphs
    :param rates: None: `schedule.lr` of the job. Several: each point takes the best by ``judge``
        with one further seed, which is not reported; rates that diverged only where all did.
        "search": the best of ¼, ½, 1, 2, 4 times the job's, going on by twos at most 3 times
        where the best is at an end; "fine": then also the geometric means beside the best
    :param settings: of all runs: ``["run.epochs=5"]``
    :param judge: a metric of the task or "loss", at the end, of the averaged model; or
        "train_loss", of the nodes' batches in the last twentieth of the steps; None: the task's
        first metric, "loss" of a task of one's own
    :param larger: whether larger values of ``judge`` are better; None: of accuracies
    :param output: folder of all logs; None: runs/study-JOB
    :param processes: runs side by side; None: one for each core; 0: run nothing
    :param skip: leave out points whose parts don't go together, which else are an error
    :raises JobError: for a grid that can't be
    :raises Failure: where a run ends with an error; with ``processes=0``, where one is missing
    """
    path = Path(job)
    cells, left_out = cells_of(path, grid or {}, _listed("nodes", nodes), settings, skip)
    folder = Path(output) if output is not None else Path("runs") / f"study-{path.stem}"
    runner = Runner(path, folder, processes)
    numbers = _listed("seeds", range(seeds) if isinstance(seeds, Integral) else seeds)
    rate_of, tried = chosen(cells, rates, judge, runner, larger)
    wanted = [(cell, rate_of[cell], seed) for cell in cells for seed in numbers]
    found = runner.fill(wanted)
    return Study(cells, rate_of, numbers, found, judge, tried, left_out, folder, larger)


def _listed(name: str, value: Any) -> list[int]:
    try:
        found = list(dict.fromkeys(map(index, [value] if isinstance(value, Integral) else value)))
    except TypeError:
        raise JobError(f"{name} = {value!r}: needs a whole number or a list of them") from None
    if not found:
        raise JobError(f"{name}: needs at least one")
    return found
