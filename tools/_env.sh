# Functions that create the environment .venv. quickstart.sh, test.sh and docs.sh source this file.
# If .venv exists, it is used, and its torch is kept. To use the torch of the system's Python, run
#   python3 -m venv --system-site-packages .venv
set -euo pipefail
exec </dev/null
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# Variables for another Python or MPI would affect the environment. Without stored bytecode, each of the
# hundreds of processes that tests start would compile the package again.
unset PYTHONHOME MPI4PY_LIBMPI MPI4PY_MPIABI PYTHONDONTWRITEBYTECODE
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_ROOT_USER_ACTION=ignore
# Ranks and slots run at the same time, so each of them gets one thread.
export OMP_NUM_THREADS=1

say() { printf '\n== %s\n' "$*"; }

die() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

# Print the name of a Python that can make a venv. Its version is 3.11 to 3.14, because the pinned torch
# is built for these versions.
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

# install_into ENVIRONMENT EXTRAS: install this checkout with these extras, unless that was done before.
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
    # Compile on all cores, because pip would use only one. In tests, a warning about the syntax of a
    # package would be an error. This runs in the background; callers wait for it before they run tests.
    "$venv/bin/python" -W ignore -m compileall -qq -j 0 "$venv/lib" &
    printf '%s\n' "$wanted" >"$stamp"
}
