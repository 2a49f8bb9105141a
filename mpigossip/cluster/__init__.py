"""Ranks of a job: the start of MPI, waits with a time limit, the end of a job, and batch scripts.

`mpi_world.open_world` opens the world of a program. The page README.md in this folder describes how
a job ends, and lists the modules.
"""
