"""Adaptive periodic averaging (Jiang & Agrawal 2020): variance and loss against bytes.

    python jobs/claims/variance.py

ADPSGD, CPSGD and QSGD train on digits, each at the learning rate of its smallest training loss. For
CIFAR-10, use the job jobs/claims/jobs/lenet.toml and settings=["data.source=cifar10.h5"].
"""

# %% make the runs; finished runs are not repeated
from matplotlib.figure import Figure

import mpigossip
from mpigossip.studies.drawing import COLOURS

study = mpigossip.study(
    "jobs/claims/jobs/digits.toml",
    grid={
        "method": {
            "ADPSGD": "algorithm.name=adpsgd local.name=sgd",
            "CPSGD, period 4": "algorithm.name=cpsgd local.name=sgd cadence.period=4",
            "CPSGD, period 8": "algorithm.name=cpsgd local.name=sgd cadence.period=8",
            "QSGD, 8 bits": "algorithm.name=qsgd local.name=sgd node.levels=127",
        }
    },
    nodes=8,
    seeds=3,
    rates="search",
    judge="train_loss",
    settings=[
        "data.partition=shuffled",
        "schedule.name=milestones",
        "schedule.milestones=[10,15]",
        "log.consensus_every=1",  # the variance is read at each average
    ],
    output="runs/claims-figures/variance",
)
print(study)

# %% draw the loss against the bytes that a node has sent
study.plot("train_loss", "bytes", study.folder / "loss.png")

# %% draw the variance at each average, (1/n) Σ ‖x̄ − x_i‖², for every seed
figure = Figure(figsize=(5.4, 4.2), layout="constrained")
axes = figure.subplots()
for k, cell in enumerate(study.cells[:3]):  # QSGD averages gradients of equal models
    for seed, run in enumerate(study.ended(cell)):
        steps = run.log.steps
        met = (steps["kind"] == 2).all(1)
        sent = steps["bytes_sent"][met].mean(1)
        distances = steps["mixed_distance"][met]
        label = cell.label("method") if seed == 0 else None
        axes.plot(sent / 1e6, (distances**2).mean(1), ".-", lw=1, color=COLOURS[k], label=label)
axes.set(xlabel="MB sent by a node", ylabel="variance at an average", yscale="log")
axes.grid(alpha=0.25)
axes.legend(frameon=False)
figure.savefig(study.folder / "variance.png", dpi=150)
