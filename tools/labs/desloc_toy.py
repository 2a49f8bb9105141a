"""Compare averages of Adam's moments on the toy problem of DES-LOC (arXiv 2505.22549, figure 2).

    python tools/labs/desloc_toy.py [--nodes 256] [--rounds 60] [--lr 0.003 0.01] [--noise 1.5]

Each node minimizes the Rosenbrock function

    f(x) = (1 − x₁)² + 100 (x₂ − x₁²)²

with Adam, where each gradient has normal noise of standard deviation σ = 1.5. All nodes average x
every K = 192 steps. The methods differ in what happens to Adam's running means m and v:

* "local": m and v stay on their node;
* "Local Adam": m and v are averaged together with x;
* "DES-LOC": m is averaged every 192 steps and v every 692 steps, as in the paper's figure;
* "DES-LOC, 3K, 6K": m is averaged every 3 K steps and v every 6 K steps.

The paper reports that Local Adam and DES-LOC converge, and that x oscillates if m and v stay local.
The package computes the updates and averages (`algorithm.average_state`). Each of 512 columns
is a repetition with noise of its own. The table shows two medians over the repetitions, of f at the
average of all nodes: its median and its largest value over the last quarter of the rounds. The
starting point is (−1, 1). The learning rate that the paper uses is not known.
"""

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.battery import Driver  # noqa: E402

PERIOD = 192
"""Steps between two averages of x."""
METHODS = {
    "local": {},
    "Local Adam": {"first": PERIOD, "second": PERIOD},
    "DES-LOC": {"first": PERIOD, "second": 692},
    "DES-LOC, 3K, 6K": {"first": 3 * PERIOD, "second": 6 * PERIOD},
}
"""Number of steps between two averages of Adam's running means of g and g², by method."""


def rosenbrock(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return f(x, y) for each element."""
    return (1 - x).square() + 100 * (y - x.square()).square()


class Toy(Driver):
    """Driver whose slots hold x₁ and x₂ of 512 repetitions, (nodes, 512) each."""

    def start(self) -> None:
        """Set all nodes to the starting point."""
        self.x[0].fill_(-1.0)
        self.x[1].fill_(1.0)
        self.restart()

    def advance(self) -> None:
        """Make one step of all nodes with noisy gradients of f."""
        self.ahead()
        x, y = self.x
        distance = y - x.square()
        noise = torch.randn(2, *x.shape, generator=self.generator) * self.noise
        self.vector.g[0].copy_(-2 * (1 - x) - 400 * x * distance + noise[0])
        self.vector.g[1].copy_(200 * distance + noise[1])
        self.step(self.lr, loss=torch.ones(len(x), dtype=torch.float64))


def run(periods: dict[str, int], nodes: int, rounds: int, lr: float, noise: float, seed: int):
    """Return f at the average of all nodes, (rounds, 512), at the end of each round.

    :param periods: steps between two averages of each array of Adam's state, by name; arrays that
        it does not name stay on their node
    :param nodes: number of nodes
    :param rounds: number of averages of x
    :param lr: learning rate
    :param noise: standard deviation of the noise of each element of a gradient
    :param seed: seed of the noise
    """
    settings = (
        f"algorithm.name=cpsgd cadence.period={PERIOD} local.name=adamw local.decoupled_decay=0"
    )
    if periods:
        text = ",".join(f"{name}={period}" for name, period in periods.items())
        settings += f" algorithm.average_state={{{text}}}"
    toy = Toy(settings, nodes, lr=lr, noise=noise, steps=rounds * PERIOD)
    toy.generator = torch.Generator().manual_seed(seed)
    toy.start()
    values = []
    for _ in range(rounds):
        toy.run(PERIOD)
        values.append(rosenbrock(toy.x[0].mean(0), toy.x[1].mean(0)))
    return torch.stack(values)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--nodes", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=60, help="number of averages of x")
    parser.add_argument("--lr", type=float, nargs="+", default=[0.003, 0.01])
    parser.add_argument("--noise", type=float, default=1.5)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| rate | m and v | f, median of the last quarter | largest f there |")
    print("|---|---|---|---|")
    for lr in options.lr:
        for name, periods in METHODS.items():
            values = run(periods, options.nodes, options.rounds, lr, options.noise, options.seed)
            last = values[-(options.rounds // 4) :]
            middle = last.median(0).values.median()
            largest = last.max(0).values.median()
            print(f"| {lr:g} | {name} | {middle:.2e} | {largest:.2e} |", flush=True)


if __name__ == "__main__":
    main()
