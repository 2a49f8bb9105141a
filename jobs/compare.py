"""Compare D², DSGT, DeTAG and QG-DmSGD on two graphs; write a LaTeX table and a figure.

python compare.py

The 32 nodes have different distributions of labels. The search of the rates makes at least 40 runs
for the 8 points, and 24 runs follow. For all-reduce, add the label "All-reduce" with "parallel
graph.name=complete local.name=sgd" in a grid without the axis graph.name. DeTAG's phase has log2 32
= 5 steps, the period of the one-peer graph (mpigossip/algorithms/README.md).
"""

from pathlib import Path

import mpigossip

methods = {"D²": "d2", "DSGT": "dsgt", "DeTAG": "detag algorithm.phase=5", "QG": "qg-dmsgd"}
study = mpigossip.study(
    "digits",
    grid={
        "method": {label: f"algorithm.name={name}" for label, name in methods.items()},
        "graph.name": ["ring", "one-peer-exponential"],
    },
    nodes=32,
    seeds=3,
    rates="search",
    output="runs/compare",
    settings=["data.partition=dirichlet", "data.dirichlet_alpha=0.1", "local.name=none"],
)
print(study)
Path("runs/compare/table.tex").write_text(study.table("latex"), "utf-8")
study.plot(x="epoch", out="runs/compare/curves.pdf")
