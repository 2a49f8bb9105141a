"""Adaptive periodic averaging (Jiang & Agrawal 2020): variance and loss against bytes.

    python jobs/claims/variance.py

ADPSGD, CPSGD and QSGD on digits, each at the rate of its least training loss; with CIFAR-10 it is
the job jobs/claims/jobs/lenet.toml, settings=["data.source=cifar10.h5"].
"""

# %% the runs: what is there already isn't repeated
import mpigossip

study = mpigossip.study(
    "jobs/claims/jobs/digits.toml",
    grid={
        "method": {
            "ADPSGD": "algorithm.name=adpsgd algorithm.local=sgd",
            "CPSGD, period 4": "algorithm.name=cpsgd algorithm.local=sgd cadence.period=4",
            "CPSGD, period 8": "algorithm.name=cpsgd algorithm.local=sgd cadence.period=8",
            "QSGD, 8 bits": "algorithm.name=qsgd algorithm.local=sgd node.levels=127",
        }
    },
    nodes=8,
    seeds=3,
    rates="search",
    judge="train_loss",
    settings=["data.partition=shuffled", "schedule.name=milestones", "schedule.milestones=[10,15]"],
    output="runs/claims-figures/variance",
)
print(study)

# %% against what a node has sent
study.plot("train_loss", "bytes", study.folder / "loss.png")
study.plot("consensus_distance", "bytes", study.folder / "variance.png")
