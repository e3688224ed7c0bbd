# Sourced by scripts/quickstart and scripts/test: leaves `python` in an environment that holds torch and paraplan.
#
# The active virtual or conda environment is used if there is one; otherwise .venv in the checkout is made.
# A torch that is there stays: no second one is installed.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

fail() {
    echo "error: $*" >&2
    exit 1
}

find_python() {
    local candidate
    for candidate in python3 python python3.13 python3.12 python3.11; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
            echo "$candidate"
            return
        fi
    done
    fail "no Python 3.11 or newer found on PATH; install one and try again"
}

activate_environment() {
    if [ -n "${VIRTUAL_ENV:-}" ] || [ -n "${CONDA_PREFIX:-}" ]; then
        return
    fi
    if [ ! -e "$root/.venv/bin/activate" ]; then
        local python share=
        python=$(find_python)
        # A torch that the system's Python already has is used from there.
        if "$python" -c 'import torch' >/dev/null 2>&1; then share=--system-site-packages; fi
        echo "Making a virtual environment in .venv ..." >&2
        "$python" -m venv $share "$root/.venv" || fail "cannot make $root/.venv; is the venv module installed?"
    fi
    # shellcheck disable=SC1091
    . "$root/.venv/bin/activate"
}

install_torch() {
    if python -c 'import torch' >/dev/null 2>&1; then return; fi
    if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; then
        echo "Installing torch for this machine's NVIDIA driver ..." >&2
        python -m pip install --quiet 'torch>=2.11' || fail "cannot install torch"
        return
    fi
    echo "Installing the CPU build of torch: no NVIDIA driver here ..." >&2
    # First from pip's own sources, then through uv, which knows where PyTorch keeps its CPU builds.
    python -m pip install --quiet 'torch==2.13.0+cpu' 2>/dev/null && return
    python -m pip install --quiet uv && python -m uv pip install --quiet --torch-backend=cpu 'torch>=2.11' && return
    python -m pip install --quiet 'torch==2.13.0' || fail "cannot install torch"
}

install_paraplan() {
    # The stamp makes a second run start at once; it is older than pyproject.toml after a change there.
    local extra=$1 stamp
    stamp=$(python -c 'import sys; print(sys.prefix)')/.paraplan-$extra
    if [ -e "$stamp" ] && [ "$stamp" -nt "$root/pyproject.toml" ] && [ "$(cat "$stamp")" = "$root" ]; then return; fi
    echo "Installing paraplan ..." >&2
    python -m pip install --quiet --editable "$root[$extra]" || fail "cannot install paraplan"
    echo "$root" >"$stamp"
}

prepare() {
    activate_environment
    install_torch
    install_paraplan "$1"
}
