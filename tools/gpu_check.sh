#!/usr/bin/env bash
# Tests and measurements on this machine's GPUs, within ten minutes for one; the table comes last.
# Installs nothing: uses the python3 on PATH (or PYTHON=…), which needs torch with CUDA, mpi4py
# with an mpiexec, CuPy for the kernel of the sum and for windows, and pytest for the tests.
# --gpus N: of N GPUs (default: all).
# Exit code: 0 all good, 1 a test failed or a figure missed its limit, 3 no GPU was found.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
exec </dev/null
# Settings of an outer job would make mpiexec start ranks elsewhere.
for name in $(compgen -v | grep -E '^(SLURM_|PMI_|PMIX_|OMPI_COMM_WORLD_)'); do unset "$name"; done
export OMP_NUM_THREADS=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python3}" tools/gpu/check.py "$@"
