"""Studies: simulate grids of settings, nodes and seeds; tables and plots of the results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

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
        """Mean over seeds of a figure at each evaluation, with the 95 % interval as a band.

        ``x = "time"``: virtual seconds, of jobs with a `[clock]`. ``y``: a metric (unset: what is
        judged), "loss" or "consensus_distance"; a band that would include 0 of what is above 0
        reaches as far below the mean, in ratio, as above. ``out``: a file to
        write; the suffix chooses PNG, PDF, SVG or PGF. ``theory``: D-PSGD's rate on each point's
        graph as dots, and the lower bounds in grey: of "gradient_square" against steps, for the
        problems of theory, whose constants are known.
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
        """Transient iterations: the step from which a point's curve stays near a reference's.

        ``against``: the label of the reference, of equal nodes and as many equal labels as there
        are. ``y``: a figure at evaluations of which less is better; of each node's own model it is
        "local_loss", … "Near" is at most ``within`` times as much in all that follows, of the means
        over seeds; inf: not within the run. A row also has n³/(1−ρ)² and n³/(1−ρ)⁴ of its graph, as
        "iid" and "non_iid".
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
    output: str | Path | None = None,
    processes: int | None = None,
    skip: bool = False,
) -> Study:
    """Simulate every point of a grid with every seed, but for what is there already.

    ``grid``: an axis a name: values of a setting (``{"graph.name": ["ring", "exponential"]}``), or
    under a name of your own the settings that each label stands for (``{"method": {"QG":
    "algorithm.name=qg-dmsgd algorithm.beta=0.9"}}``). ``nodes``: one number or several. ``seeds``:
    how many, from 0 on, or which; run.seed draws who has which samples (data.partition, all but
    "sorted"), initial parameters, order of samples and random graphs. ``settings`` hold for all
    (``["run.epochs=5"]``).

    ``rates``: unset, schedule.lr as the job has it. Several: each point takes the one that is best
    by ``judge`` with a seed of its own (`search.SEED`), which is not reported; of rates that
    diverged, if late, only where all did. "search": of ¼, ½, 1, 2, 4 times the job's, going on by
    twos at most 3 times where the best is at an end; "fine": then the geometric means of the best
    and those beside it too.

    ``judge``: a metric of the task or "loss", at the end, of the averaged model, or "train_loss",
    of the nodes' batches in the last twentieth of the steps; unset, the task's first. ``output``:
    the folder of all logs, unset runs/study-JOB; a study that was killed, or asked again with more
    points or seeds, does only what is missing, to the same bits. ``processes``: runs side by side,
    unset one a core, 0 to run nothing. ``skip`` leaves out points whose parts don't go together,
    which else are a mistake.

    Raises JobError for a grid that can't be, Failure where a run ends with an error (with 0
    ``processes``: is missing); a loss that isn't a number is a result, "diverged".
    """
    path = Path(job)
    cells, left_out = cells_of(path, grid or {}, _listed(nodes), settings, skip)
    folder = Path(output) if output is not None else Path("runs") / f"study-{path.stem}"
    runner = Runner(path, folder, processes)
    rate_of, tried = chosen(cells, rates, judge, runner)
    numbers = _listed(range(seeds) if isinstance(seeds, int) else seeds)
    wanted = [(cell, rate_of[cell], seed) for cell in cells for seed in numbers]
    found = runner.fill(wanted)
    return Study(cells, rate_of, numbers, found, judge, tried, left_out, folder)


def _listed(value: Any) -> list[int]:
    return [value] if isinstance(value, int) else list(dict.fromkeys(value))
