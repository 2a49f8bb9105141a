"""Description of a custom loop with a run directory: first screen, and settings in its files."""

from __future__ import annotations

import json
import sys
from typing import Any

from mpigossip import config
from mpigossip.cluster.world import World
from mpigossip.config import Job
from mpigossip.config.readable import size
from mpigossip.optim.inner import title
from mpigossip.runs.overview import between, nodes

SECTIONS = ("run", "algorithm", "graph", "cadence", "node", "checkpoint", "log")
"""Sections of a job that a loop has, too."""


def screen(job: Job, node: Any, world: World) -> list[tuple[str, str]]:
    """Return the first screen, as (word, text)."""
    flat = node.flat
    cadence = "" if job.cadence.name == "always" else f", cadence {job.cadence.name}"
    method = f"{job.algorithm.name} ({title(node.inner)}) on {job.graph.name}{cadence}"
    model = f"{type(node.model).__name__}, {flat.count:,} parameters, {size(4 * flat.count)}"
    device = str(next(node.model.parameters()).device)
    return [
        ("nodes", nodes(node.mixer.n, [device], world)),
        ("model", model),
        ("method", method),
        *between(node.engine, node.graph, job.node, world),
        ("files", f"{job.run.folder}: log.h5 every {job.log.flush_steps} steps, checkpoints/ "
                  "by save() and at the end"),
    ]  # fmt: skip


def settings(job: Job, node: Any) -> str:
    """Return a job's sections, and one about the program, as TOML."""
    named = {name for name, _ in node.model.named_buffers()} | set(node.flat.names)
    about = {
        "program": " ".join(sys.argv),
        "model": type(node.model).__name__,
        "optimizer": title(node.inner),
        "left_out": len(node.model.state_dict().keys() - named),
    }
    lines = [f"{key} = {json.dumps(value)}" for key, value in about.items()]
    return config.dump(job, SECTIONS) + "\n".join(["\n[loop]", *lines, ""])
