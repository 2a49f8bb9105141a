"""D², DSGT, DeTAG and QG on two graphs, 32 nodes, different data: LaTeX table and figure.

python jobs/compare.py
"""

import mpigossip

study = mpigossip.study(
    "jobs/digits.toml",
    grid={
        "algorithm.name": ["d2", "dsgt", "detag", "qg-dmsgd"],
        "graph.name": ["ring", "one-peer-exponential"],
    },
    nodes=32, seeds=3, rates="search", output="runs/compare",
    settings=["data.partition=dirichlet", "data.dirichlet_alpha=0.1"],
)  # fmt: skip
print(study.table("latex"))
study.plot(out="runs/compare/curves.pdf")
