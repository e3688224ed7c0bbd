# Sourced by scripts/quickstart and scripts/test: leaves `python` in an environment that holds torch and paraplan.
#
# The active virtual or conda environment is used if there is one; otherwise .venv in the checkout is made.
# A torch that is there stays: no second one is installed. PARAPLAN_TORCH='2.11.*' asks for a release of torch: it gets
# an environment of its own, .venv-torch-2.11, whatever is active, and on machines without a GPU nothing but a CPU build.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

fail() {
    echo "error: $*" >&2
    exit 1
}

patiently() {
    # Runs a command that is silent for long: says what it does, and on a terminal for how long, so that nobody wonders.
    local what=$1 started=$SECONDS
    shift
    printf '%s ...' "$what" >&2
    "$@" &
    local job=$!
    while [ -t 2 ] && kill -0 "$job" 2>/dev/null; do
        printf '\r%s ... %s s' "$what" $((SECONDS - started)) >&2
        sleep 1
    done
    local status=0
    wait "$job" || status=$?
    printf '\r%s ... %s s\n' "$what" $((SECONDS - started)) >&2
    return "$status"
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
    local folder=.venv
    if [ -n "${PARAPLAN_TORCH:-}" ]; then
        folder=.venv-torch-${PARAPLAN_TORCH%.\*}
    elif [ -n "${VIRTUAL_ENV:-}" ] || [ -n "${CONDA_PREFIX:-}" ]; then
        return
    fi
    if [ ! -e "$root/$folder/bin/activate" ]; then
        local python share=
        python=$(find_python)
        # A torch that the system's Python already has is used from there.
        if [ -z "${PARAPLAN_TORCH:-}" ] && "$python" -c 'import torch' >/dev/null 2>&1; then share=--system-site-packages; fi
        patiently "Making a virtual environment in $folder" "$python" -m venv $share "$root/$folder" || fail "cannot make $root/$folder; is the venv module installed?"
    fi
    # shellcheck disable=SC1091
    . "$root/$folder/bin/activate"
}

has_asked_torch() {
    python - <<'EOF' 2>/dev/null
import fnmatch, importlib.metadata, os, sys
version = importlib.metadata.version("torch").partition("+")[0]
sys.exit(not fnmatch.fnmatchcase(version, os.environ["PARAPLAN_TORCH"]))
EOF
}

install_asked_torch() {
    has_asked_torch && return
    echo "Installing torch $PARAPLAN_TORCH ..." >&2
    if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; then
        python -m pip install --quiet --no-compile "torch==$PARAPLAN_TORCH" || fail "cannot install torch $PARAPLAN_TORCH"
        return
    fi
    # A version in full may be among pip's own sources; uv knows where PyTorch keeps its CPU builds.
    case $PARAPLAN_TORCH in
    *\*) ;;
    *) python -m pip install --quiet --no-compile "torch==$PARAPLAN_TORCH+cpu" 2>/dev/null && return ;;
    esac
    python -m pip install --quiet uv && python -m uv pip install --quiet --torch-backend=cpu "torch==$PARAPLAN_TORCH" ||
        fail "cannot install the CPU build of torch $PARAPLAN_TORCH; is download.pytorch.org reachable?"
}

install_torch() {
    if [ -n "${PARAPLAN_TORCH:-}" ]; then
        install_asked_torch
        return
    fi
    if python -c 'import torch' >/dev/null 2>&1; then return; fi
    if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; then
        patiently "Installing torch for this machine's NVIDIA driver" python -m pip install --quiet --no-compile 'torch>=2.11' || fail "cannot install torch"
        return
    fi
    patiently "Installing the CPU build of torch (no NVIDIA driver here)" install_cpu_torch || fail "cannot install torch"
}

install_cpu_torch() {
    # First from pip's own sources, then through uv, which knows where PyTorch keeps its CPU builds.
    python -m pip install --quiet --no-compile 'torch==2.13.0+cpu' 2>/dev/null && return
    python -m pip install --quiet uv && python -m uv pip install --quiet --torch-backend=cpu 'torch>=2.11' && return
    python -m pip install --quiet --no-compile 'torch==2.13.0'
}

install_paraplan() {
    # The stamp makes a second run start at once; it is older than pyproject.toml after a change there.
    local extra=$1 stamp
    stamp=$(python -c 'import sys; print(sys.prefix)')/.paraplan-$extra
    if [ -e "$stamp" ] && [ "$stamp" -nt "$root/pyproject.toml" ] && [ "$(cat "$stamp")" = "$root" ]; then return; fi
    patiently "Installing paraplan" python -m pip install --quiet --no-compile --editable "$root[$extra]" || fail "cannot install paraplan"
    patiently "Compiling what training imports" compile_what_ranks_import "$extra"
    echo "$root" >"$stamp"
}

compile_what_ranks_import() {
    # pip would compile all that it installs, of which most is never imported. What this imports is kept compiled, also
    # where PYTHONDONTWRITEBYTECODE is set: there every rank would compile it anew.
    env -u PYTHONDONTWRITEBYTECODE python -c "
import torch._dynamo, torch.distributed.checkpoint, torch.distributed.pipelining
import paraplan.launch.command, paraplan.runtime.job_start, paraplan.runtime.pipeline.assembly
if '$1' == 'dev':
    import hypothesis, peft, torch._inductor.cudagraph_trees, transformers.trainer
" >/dev/null 2>&1 || true # what cannot be imported is said where it is needed
}

prepare() {
    activate_environment
    install_torch
    install_paraplan "$1"
    # All of paraplan, which Python would compile in every process where PYTHONDONTWRITEBYTECODE is set: a fifth of the
    # time in which a plan is found.
    python -m compileall -q "$root/paraplan"
}
