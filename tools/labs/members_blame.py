"""Check that `mpigossip replay --blame` names a member whose labels are wrong.

    python tools/labs/members_blame.py [--seeds 10] [SECTION.KEY=VALUE …]

Four members train `digits` in a folder, under the virtual clock of `members_loss.py`. One of them
trains with shuffled labels: the task of the job looks up the place whose round is trained, so that
a replay shuffles the same labels. For each seed, the program forks the training without a change,
whose digest must equal the digest of the training. It then prints the final loss of forks that lack
one place each. The place without which the loss is lowest is blamed; the exit code is 1 if this is
not the place with the shuffled labels.
"""

import argparse
import io
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

LABS = Path(__file__).resolve().parent
sys.path[:0] = [str(LABS), str(LABS.parents[1])]
import members_loss  # noqa: E402

from mpigossip.cluster.world import SingleProcess  # noqa: E402
from mpigossip.members.records import RecordStore  # noqa: E402
from mpigossip.runs.members import fork  # noqa: E402
from mpigossip.runs.members.member import Member  # noqa: E402
from mpigossip.training.task import Classification  # noqa: E402

MEMBERS = 4
current: dict[str, int | None] = {"place": None}
"""Number of the place whose round is trained, under the key "place"; None during evaluations. It is
global because a step may compute in several threads; members train one at a time."""


class Poisoned(Classification):
    """Classification in which one place trains each sample with the label of another sample."""

    def __init__(self, place: int):
        """Set the number of the place whose labels are wrong."""
        self.place = place

    def loss(self, model, batch):
        """Return loss and metrics of a batch; the labels are wrong if ``place`` trains it."""
        inputs, targets = batch
        if current["place"] == self.place:
            targets = targets.roll(1, 0)
        return super().loss(model, (inputs, targets))


def poisoned(*, place: int = 0) -> Poisoned:
    """Build the task of the job.

    :param place: number of the place whose labels are wrong, the setting `task.place`
    """
    return Poisoned(place)


class PlaceMember(Member):
    """Member that stores its place in ``current`` when it gets a chunk."""

    def train(self, exchange, after=lambda record, chunk: None) -> None:
        """Train as `Member.train` does; the exchange may be a training or a replay."""
        chunk = exchange.chunk

        def chunk_with_place():
            work = chunk()
            place = exchange.place
            current["place"] = place if isinstance(place, int) else place.number
            return work

        exchange.chunk = chunk_with_place
        try:
            super().train(exchange, after)
        finally:
            exchange.chunk = chunk
            current["place"] = None


def measure(seed: int, options) -> tuple[int, float, dict[int, float]]:
    """Train with one seed, fork the training, and compute the loss without each place.

    :param seed: seed of the training; it determines the place whose labels are wrong
    :param options: options of the command line
    :return: the place with wrong labels, the final loss, and the final losses without each place
    :raises ReplayMismatch: if a fork without a change has another digest than the training
    """
    wrong = seed % MEMBERS
    settings = ["task.name=members_blame:poisoned", f"task.place={wrong}", *options.settings]
    lab_options = argparse.Namespace(
        steps=options.steps, delay=0.2, slow=1.0, newcomers=0, unrepeated=True, settings=settings
    )
    members_loss.Member = fork.Member = PlaceMember
    with tempfile.TemporaryDirectory() as temporary, redirect_stderr(io.StringIO()):
        folder = Path(temporary) / "run"
        job = members_loss.job_of(seed, MEMBERS * options.steps, lab_options)
        with redirect_stdout(io.StringIO()):
            members_loss.Lab(folder, MEMBERS, seed, lab_options).run()
            fork.fork(folder, options.steps // 8, Path(temporary) / "fork", job=job)
        disk = RecordStore(folder)
        with SingleProcess() as world:
            setting = fork.Setting(disk, job, (), world)
            loss, losses = fork.blamed(setting, disk, 0)
            setting.close()
    return wrong, loss, losses


def main() -> int:
    """Print a line for each seed; return 1 if another place is blamed for any seed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=200, help="steps of each member")
    parser.add_argument("settings", nargs="*", metavar="SECTION.KEY=VALUE")
    options = parser.parse_args()
    right = 0
    for seed in range(100, 100 + options.seeds):
        wrong, loss, losses = measure(seed, options)
        first = min(losses, key=losses.__getitem__)
        right += first == wrong
        texts = ", ".join(f"{place}: {value:.4f}" for place, value in losses.items())
        print(
            f"seed {seed}: place {wrong} has wrong labels, place {first} is blamed; loss "
            f"{loss:.4f}, loss without each place {texts}",
            flush=True,
        )
    print(f"the right place was blamed for {right} of {options.seeds} seeds")
    return int(right < options.seeds)


if __name__ == "__main__":
    # The job imports this file by its name, and has to get the same `current`.
    import members_blame

    sys.exit(members_blame.main())
