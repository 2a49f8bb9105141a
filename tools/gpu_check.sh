#!/usr/bin/env bash
# Tests and measurements on this machine's GPU, within ten minutes; the table comes last.
# Installs nothing: uses the python3 on PATH (or PYTHON=…), which needs torch with CUDA, mpi4py
# with an mpiexec, CuPy for the fused sum and CUDA IPC, and pytest for the tests.
# Exit code: 0 all good, 1 a test failed or a figure missed its limit, 3 no GPU was found.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
exec </dev/null
# Settings of an outer job would make mpiexec start ranks elsewhere.
for name in $(compgen -v | grep -E '^(SLURM_|PMI_|PMIX_|OMPI_COMM_WORLD_)'); do unset "$name"; done
export OMP_NUM_THREADS=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python3}" tools/gpu/check.py "$@"
