"""Exponential graphs (Ying et al. 2021): accuracy by topology and number of nodes.

    python jobs/claims/topology.py

DmSGD trains LeNet on digits, on each graph at its own learning rate. For CIFAR-10, use the job
jobs/claims/jobs/lenet.toml and settings=["data.source=cifar10.h5"].
"""

# %% make the runs; finished runs are not repeated
from matplotlib.figure import Figure

import mpigossip
from mpigossip.studies.drawing import COLOURS

study = mpigossip.study(
    "jobs/digits.toml",
    grid={
        "graph": {
            "one-peer": "graph.name=one-peer-exponential",
            "parallel": "algorithm.name=parallel graph.name=complete",
            "exponential": "graph.name=exponential",
            "ring": "graph.name=ring",
        }
    },
    nodes=[4, 8, 16, 32],
    seeds=3,
    rates="search",
    output="runs/claims-figures/topology",
    settings=[
        "algorithm.name=dmsgd",
        "local.name=none",
        "run.epochs=30",
        "schedule.lr=0.2",
        "schedule.name=milestones",
        "schedule.milestones=[20,26]",
    ],
)
print(study)

# %% draw final accuracy by number of nodes: means, 95 % intervals in [0, 1], and each seed
figure = Figure(figsize=(5.4, 4.2), layout="constrained")
axes = figure.subplots()
for k, name in enumerate(dict.fromkeys(row["graph"] for row in study.rows)):
    rows = [row for row in study.rows if row["graph"] == name]
    half = [[min(row["accuracy_high"], 1) - row["accuracy"] for row in rows]]
    half.insert(0, [row["accuracy"] - max(row["accuracy_low"], 0) for row in rows])
    places = [row["nodes"] * 1.03 ** (k - 1.5) for row in rows]  # next to each other
    accuracies = [row["accuracy"] for row in rows]
    axes.errorbar(places, accuracies, half, fmt="o-", capsize=3, color=COLOURS[k], label=name)
    runs = [study.ended(cell) for cell in study.cells if cell.label("graph") == name]
    for x, runs_of_seeds in zip(places, runs, strict=True):
        values = [run.last("accuracy") for run in runs_of_seeds]
        axes.plot([x] * len(values), values, "_", color=COLOURS[k], ms=7, mew=1.5)
nodes = sorted({row["nodes"] for row in study.rows})
axes.set_xscale("log")
axes.set_xticks(nodes, map(str, nodes))
axes.minorticks_off()
axes.set(xlabel="nodes", ylabel="test accuracy")
axes.grid(alpha=0.25)
axes.legend(frameon=False)
figure.savefig(study.folder / "topology.png", dpi=150)
