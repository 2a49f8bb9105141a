# Shared by quickstart.sh and test.sh (sourced): the environment in .venv, made once.
# A .venv that exists is used, and a torch in it kept. To use a torch of the system's Python:
#   python3 -m venv --system-site-packages .venv
set -euo pipefail
exec </dev/null
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# Settings of another Python or MPI would reach into the environment; and without bytecode kept,
# each of the hundreds of processes that tests start would compile the package for itself.
unset PYTHONHOME MPI4PY_LIBMPI MPI4PY_MPIABI PYTHONDONTWRITEBYTECODE
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_ROOT_USER_ACTION=ignore
# One thread per device: ranks and slots are what runs side by side here.
export OMP_NUM_THREADS=1

say() { printf '\n== %s\n' "$*"; }

die() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

# Prints a Python 3.11 to 3.14 (those that the pinned torch is built for) that can make a venv.
find_python() {
    local candidate
    for candidate in ${PYTHON:-} python3 python3.13 python3.12 python3.11 python3.14; do
        if "$candidate" -c '
import ensurepip, sys, venv
sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' >/dev/null 2>&1; then
            echo "$candidate"
            return
        fi
    done
    die "no Python 3.11 to 3.14 with venv found on PATH; install one" \
        "(Debian, Ubuntu: apt install python3-venv) or name it: PYTHON=/path/to/python3.11"
}

# install_into ENVIRONMENT EXTRAS: this checkout with extras, unless that is there already.
install_into() {
    local venv=$1 extras=$2 python torch
    if [ ! -x "$venv/bin/python" ]; then
        python=$(find_python)
        echo "making $venv with $("$python" --version)"
        "$python" -m venv "$venv"
    fi
    local stamp="$venv/.installed-${extras//,/-}" wanted
    wanted=$("$venv/bin/python" --version; pwd; cat pyproject.toml tools/constraints.txt)
    if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
        echo "$venv is ready"
        return
    fi
    cp tools/constraints.txt "$venv/constraints.txt"
    torch=$("$venv/bin/python" -c '
from importlib.metadata import version; print(version("torch"))' 2>/dev/null || true)
    if [ -n "$torch" ]; then
        sed -i "s/^torch==.*/torch==$torch/" "$venv/constraints.txt"
    fi
    echo "installing mpigossip[$extras] with torch ${torch:-$(sed -n 's/^torch==//p' \
        tools/constraints.txt)} into $venv (the first time: minutes)"
    if [ -z "$torch" ] && [ ! -e /dev/nvidiactl ]; then
        echo "(the default wheel of torch contains CUDA, gigabytes that this machine doesn't need. To use"
        echo " the CPU wheel, stop this script, install it into $venv as tools/docs/install.md says,"
        echo " and start the script again)"
    fi
    "$venv/bin/python" -m pip install -qq --no-compile -c "$venv/constraints.txt" -e ".[$extras]" ||
        die "pip could not install; the lines above say why. Run this script again afterwards"
    # On all cores, where pip takes one; in tests a warning of a package's syntax would be an error.
    # In the background: who runs what is installed waits for it.
    "$venv/bin/python" -W ignore -m compileall -qq -j 0 "$venv/lib" &
    printf '%s\n' "$wanted" >"$stamp"
}
