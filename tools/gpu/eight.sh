#!/usr/bin/env bash
# What only a node of several GPUs can show, eight of them first of all; the table comes last.
# Uses the python3 on PATH (or PYTHON=…) as gpu_check.sh does. --gpus N: of N GPUs (default: all).
# Exit code: 0 all good, 1 something is wrong, 3 fewer than two GPUs were found.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1
exec </dev/null
for name in $(compgen -v | grep -E '^(SLURM_|PMI_|PMIX_|OMPI_COMM_WORLD_)'); do unset "$name"; done
export OMP_NUM_THREADS=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python3}" tools/gpu/eight.py "$@"
