"""Exponential graphs (Ying et al. 2021): gaps 1 − ρ and transient iterations by size.

    python jobs/claims/transient.py

D-PSGD minimizes noisy quadratics that differ between nodes. The transient iterations of a graph are
the iterations after which the error of its nodes' own models stays within twice parallel SGD's.
"""

# %% make the runs; finished runs are not repeated
from matplotlib.figure import Figure

import mpigossip
from mpigossip.graphs.theory import averaging_gap

OUT = "runs/claims-figures/transient"
GRAPHS = ["one-peer-exponential", "ring", "exponential", "grid"]
study = mpigossip.study(
    "jobs/claims/jobs/quadratics.toml",
    grid={
        "graph": {"parallel": "algorithm.name=parallel graph.name=complete"}
        | {name: f"graph.name={name}" for name in GRAPHS}
    },
    nodes=[8, 16, 32, 64],
    seeds=3,
    output=OUT,
)
print(study)

# %% compute the gaps of the graphs, and the steps until each one meets parallel SGD
rows = study.transient(y="local_loss", within=2.0)
figure = Figure(figsize=(10, 4), layout="constrained")
gaps, steps = figure.subplots(1, 2)
for name in dict.fromkeys(row["graph"] for row in rows):
    graph_rows = [row for row in rows if row["graph"] == name]
    nodes = [row["nodes"] for row in graph_rows]
    gaps.plot(nodes, [averaging_gap(mpigossip.graph(name, n)) for n in nodes], "o-", label=name)
    steps.plot(nodes, [row["transient"] for row in graph_rows], "o-", label=name)
    print(name, {row["nodes"]: row["transient"] for row in graph_rows})
gaps.set(xlabel="nodes", ylabel="1 − ρ", xscale="log", yscale="log", title="gap")
steps.set(xlabel="nodes", ylabel="steps", xscale="log", title="transient iterations")
nodes = sorted({row["nodes"] for row in rows})
for axes in (gaps, steps):
    axes.set_xticks(nodes, map(str, nodes))
    axes.xaxis.minorticks_off()
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=9)
figure.savefig(study.folder / "transient.png", dpi=150)

# %% draw the curves
study.plot("local_loss", out=study.folder / "curves.png")
