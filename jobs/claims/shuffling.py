"""DeTAG (Lu & De Sa 2021): convergence as the nodes' data become different.

    python jobs/claims/shuffling.py

Four methods train on a ring of 8 nodes, each at its own learning rate. The digits are sorted by
label, 100, 50, 25 or 0 % of them are then shuffled, and the nodes get consecutive parts. For
CIFAR-10, use the job jobs/claims/jobs/lenet.toml.
"""

# %% make the runs; finished runs are not repeated
import mpigossip

study = mpigossip.study(
    "jobs/claims/jobs/digits.toml",
    grid={
        "shuffled": {f"{k} %": f"data.shuffled_percent={k}" for k in (100, 50, 25, 0)},
        "method": {
            "DeTAG": "algorithm.name=detag",
            "D-PSGD": "algorithm.name=dsgd",
            "DSGT": "algorithm.name=dsgt",
            "D²": "algorithm.name=d2",
        },
    },
    nodes=8,
    seeds=3,
    rates="search",
    settings=["graph.name=ring", "data.partition=mixed", "schedule.lr=0.05"],
    output="runs/claims-figures/shuffling",
)
print(study)

# %% draw a panel for each fraction
study.plot("accuracy", out=study.folder / "accuracy.png")
study.plot("train_loss", out=study.folder / "loss.png")
