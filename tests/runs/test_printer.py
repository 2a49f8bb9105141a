"""printer.py and overview.py: the output of a run."""

import io
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from mpigossip.cluster.world import SingleProcess
from mpigossip.engine.measurements import StepMetrics
from mpigossip.mixing.base import ExchangeKind
from mpigossip.mixing.simulated import Simulated
from mpigossip.runs import start_and_resume
from mpigossip.runs.job import JobNode
from mpigossip.runs.overview import overview
from mpigossip.runs.printer import Printer
from mpigossip.runs.progress import Progress
from mpigossip.training import assemble

pytestmark = pytest.mark.usefixtures("warm")

JOB = Path(__file__).parents[2] / "jobs" / "digits.toml"


class Terminal(io.StringIO):
    def isatty(self):
        return True


class FixedTimes(Simulated):
    """A mixer whose exchange and wait times are set by the test."""

    exchange_seconds = wait_seconds = 0.0


def progress_of(assembly, world):
    node = JobNode(assembly, world)
    about = lambda: node.overview_lines(progress)  # noqa: E731
    folder = node.job.run.folder
    n = node.mixer.n
    progress = Progress(node.job, folder, n, about=about, **node.progress_fields())
    return progress


def shown(stream, plain_s=30.0, steps=5, rank=0, thread=False, folder="nowhere/else"):
    """Return the output of a printer in a short run, in which only the overview is real."""
    job = assemble.load(JOB, ["run.steps=20", f"run.output={folder}"])
    with SingleProcess() as alone:
        assembly = assemble.assemble(job, alone, 4)
        alone.rank = rank
        progress = progress_of(assembly, alone)
        mixer = assembly.trainer.mixer
        mixer.__class__ = FixedTimes
        printer = Printer(alone, stream, plain_s)
        printer.start(progress, assembly)
        seconds = {"compute_s": 0.03, "node_s": 0.0, "exchange_s": 0.005, "idle_s": 0.005}
        for k in range(steps):
            loss = torch.full((4,), 2.0 - k, dtype=torch.float64)
            record = StepMetrics(
                k, ExchangeKind.GOSSIP, 0.1, loss, loss, loss, float("nan"), seconds
            )
            mixer.exchange_seconds += 0.04 * thread
            mixer.wait_seconds += 0.01
            printer._shown_at -= 1.0  # simulate that a second has passed
            printer.step(progress, record)
        assembly.close()
    return stream.getvalue()


def test_a_live_line_on_a_terminal_is_rewritten_and_fits():
    text = shown(Terminal())
    lines = text.split("\r\x1b[2K")[1:]
    assert len(lines) == 5 and "\n" not in "".join(lines)
    assert re.match(r"step 5/20  loss 0\.0000  [\d,]+ samples/s  ETA \d:\d\d  ", lines[-1])
    assert lines[-1].endswith(
        "exchange+idle 25%"
    )  # optional parts are dropped first if it is too long
    assert max(map(len, lines)) < 80


def test_the_overview_is_wrapped_on_a_terminal_but_not_in_a_batch_log():
    there, log = (shown(made, folder="runs/of-a-long-name") for made in (Terminal(), io.StringIO()))
    there = re.sub(r"\x1b\[[\d;]*m", "", there.split("\r")[0])
    assert max(map(len, there.splitlines())) <= 80 < max(map(len, log.splitlines()))
    assert there.split() == log.split()


def test_a_batch_log_gets_one_plain_line_per_interval():
    assert "step 5/20" not in shown(io.StringIO(), plain_s=30.0)
    text = shown(io.StringIO(), plain_s=1.5)
    assert "\r" not in text and "\x1b" not in text
    assert "nan" not in text  # a distance that was not measured is not printed
    assert len(re.findall(r"^step \d/20 .* exchange\+idle 25%$", text, re.MULTILINE)) == 2


def test_an_idle_step_keeps_the_metrics_of_the_previous_step():
    with SingleProcess() as alone:
        settings = ["run.output=nowhere/else", "algorithm.name=gasloc", "cadence.period=[1,3]"]
        assembly = assemble.assemble(assemble.load(JOB, settings), alone, 2)
        progress = progress_of(assembly, alone)
        stream = io.StringIO()
        printer = Printer(alone, stream, 0.0)
        printer.start(progress, assembly)
        for k, (loss, rested) in enumerate([(0.5, ()), (float("nan"), (0,))]):
            value = torch.tensor([loss], dtype=torch.float64)
            record = StepMetrics(
                k, ExchangeKind.LOCAL, 0.1, value, value, value, loss, {"compute_s": 1.0}
            )
            record.metrics = {"accuracy": value}
            record.idle_rows = rested
            printer.step(progress, record)
        assembly.close()
    (last,) = [line for line in stream.getvalue().splitlines() if line.startswith("step 2/")]
    assert "loss 0.5000  accuracy 0.5000" in last
    assert assembly.engine.cadence.local_fraction == 4 / 6


def test_the_hidden_part_is_printed_if_a_thread_exchanges():
    assert "hidden" not in shown(io.StringIO(), plain_s=1.5)
    text = shown(io.StringIO(), plain_s=1.5, thread=True)
    assert len(re.findall(r"exchange\+idle 25%  hidden 75%$", text, re.MULTILINE)) == 2


def test_a_run_without_a_step_has_no_rate(tmp_path, capsys):
    small = ["model.name=mlp", "model.hidden=[4]", "run.steps=0", f"run.output={tmp_path / 'run'}"]
    with SingleProcess() as alone:
        start_and_resume.train(assemble.load(JOB, small), alone, 2)
    heading, row = capsys.readouterr().out.split("\n\n")[1].splitlines()
    assert heading.split()[:3] == ["epoch", "step", "rate"]
    assert row.split()[:4] == ["0.00", "0", "–", "–"]


def test_only_rank_0_prints():
    assert shown(io.StringIO(), rank=1, plain_s=0) == ""


@pytest.mark.parametrize(
    "settings, says",
    [
        ([], ["4 simulated", "2 rounds", "86 kB", "(1 vector)"]),
        (["graph.name=ring"], ["2 neighbours", "spectral gap 0.667", "(2 x 1 vector)"]),
        (
            ["algorithm.name=parallel", "graph.name=complete"],
            ["reduce-scatter and all-gather", "(1.5 x 1 vector)"],
        ),
        (
            ["algorithm.name=parallel", "graph.name=complete", "local.name=none"],
            ["parallel (momentum) on complete"],
        ),
        (["local.name=none"], ["dsgd on one-peer"]),
        (["node.wire=bf16"], ["bf16 on", "43 kB per node"]),
        (["graph.name=random-matching"], ["1 neighbour", "no period"]),
        (
            ["algorithm.name=cpsgd", "node.devices=cpu:2"],
            ["2 slots each (cpu)", "129 kB"],
        ),
        (["graph.name=star", "graph.weights=laplacian"], ["signed weights, spectral gap 0.4"]),
        (["algorithm.name=dsgd", "graph.name=star", "graph.weights=uniform"], ["mean drifts"]),
        (["graph.name=identity"], ["nodes never agree"]),
    ],
)
def test_the_overview_describes_the_objects_that_were_built(settings, says, tmp_path):
    job = assemble.load(JOB, [*settings, f"run.output={tmp_path}"])
    with SingleProcess() as alone:
        assembly = assemble.assemble(job, alone, 4)
        screen = dict(overview(progress_of(assembly, alone), assembly, alone))
        assembly.close()
    text = "\n".join(f"{word} {said}" for word, said in screen.items())
    says = [*says, "(schedule.lr = 0.15 x"]
    for part in [*says, "21,386 parameters", "1,437 training and 360 test", str(tmp_path)]:
        assert part in text
    lines = [f"  {word:<9}{said}".replace(str(tmp_path), "") for word, said in screen.items()]
    assert len(screen) <= 12 and max(map(len, lines)) <= 80


def test_the_printed_memory_is_the_allocated_memory(tmp_path):
    job = assemble.load(JOB, ["algorithm.style=atc", "local.name=sgd", f"run.output={tmp_path}"])
    with SingleProcess() as alone:
        assembly = assemble.assemble(job, alone, 2)
        trainer = assembly.trainer
        screen = dict(overview(progress_of(assembly, alone), assembly, alone))
        size = 4 * trainer.replicas.flat.size
        assembly.close()
    # a replica that shares memory with x, a gradient, an outbox, a result, a snapshot
    said = float(re.match(r"([\d.]+) kB", screen["memory"])[1])
    np.testing.assert_allclose(said, 5 * size / 1000, rtol=0.01)


def test_the_overview_of_ranks_is_printed_once(pooled, tmp_path):
    words = ["run.steps=2", "node.same_host=put", "node.devices=cpu:2"]
    done = pooled(3, "train", JOB, *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("3 ranks on 1 host") == 1
    assert "from 1, 2: put into MPI" in done.stdout
    assert done.stdout.count("\n  files ") == 1 and done.stdout.count("accuracy") == 2
    assert (tmp_path / "runs/digits/log.h5").is_file()
