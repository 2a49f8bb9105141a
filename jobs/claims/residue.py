"""Topology search (Jameel et al. 2020): distance from the average by rounds, and a training.

    python jobs/claims/residue.py

A lattice and a searched graph, both with 16 nodes of degree 4, are compared with Metropolis and
with Laplacian weights. The training is D-PSGD on digits that are sorted by label.
"""

# %% search the graphs
from pathlib import Path

from matplotlib.figure import Figure

import mpigossip
from mpigossip.graphs.search import save, search
from mpigossip.graphs.spectral import residue

OUT = Path("runs/claims-figures/residue")
OUT.mkdir(parents=True, exist_ok=True)
save(search(16, degree=4, evaluations=20_000, seed=0), OUT / "searched.json")
GRAPHS = {"lattice": "ring-lattice", "searched": f"file:{OUT}/searched.json"}
WEIGHTS = ("metropolis-hastings", "laplacian")

# %% draw ‖W^t − J‖ over rounds
figure = Figure(figsize=(5.4, 4.2), layout="constrained")
axes = figure.subplots()
rounds = range(1, 41)
for name, place in GRAPHS.items():
    for weights in WEIGHTS:
        made = mpigossip.graph(place, 16, weights=weights)
        axes.plot(rounds, [residue(made, t) for t in rounds], label=f"{name}, {weights}")
axes.set(xlabel="rounds", ylabel="‖Wᵗ − J‖", yscale="log")
axes.grid(alpha=0.25)
axes.legend(frameon=False)
figure.savefig(OUT / "residue.png", dpi=150)

# %% train; finished runs are not repeated
study = mpigossip.study(
    "jobs/claims/jobs/digits.toml",
    grid={
        "graph": {
            f"{name}, {weights}": f"algorithm.name=dsgd graph.name={place} graph.weights={weights}"
            for name, place in GRAPHS.items()
            for weights in WEIGHTS
        }
    },
    nodes=16,
    seeds=3,
    rates="search",
    output=OUT,
)
print(study)
study.plot("consensus_distance", out=OUT / "consensus.png")
study.plot("accuracy", out=OUT / "accuracy.png")
