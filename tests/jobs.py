"""Small jobs, and training of a job on simulated nodes in this process."""

from mpigossip.cluster.world import SingleProcess
from mpigossip.runs import start_and_resume

TINY = ["model.name=mlp", "model.hidden=[4]", "data.batch=8", "data.workers=0"]
"""Settings of a job that trains in less than a second."""


def train(job, nodes: int) -> dict:
    """Train a job to its end on simulated nodes; return its summary."""
    with SingleProcess() as world:
        return start_and_resume.train(job, world, nodes)
