"""Ranks of a job: the start of MPI, waits with a time limit, the end of a job, and batch scripts.

A program joins the ranks of its job by `ranks.world`. The page README.md in this folder describes
how a job ends, and lists the modules.
"""
