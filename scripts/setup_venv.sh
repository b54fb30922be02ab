#!/bin/sh
# Makes the virtual environment that every make target uses: setup_venv.sh FOLDER
#
#   PYTHON=...   the interpreter to start from; default: the first of python3, python3.13, 3.12, 3.11 that is new enough
#
# A CUDA (or ROCm) build of torch that this interpreter already has is kept: its packages stay visible, and neither torch
# nor its Triton is pinned. Otherwise torch comes from constraints.txt, as a CPU wheel where pip is configured to find one.
# An environment that exists is brought up to date, not made anew. FOLDER/.ready marks success.
set -eu

venv=$1
root=$(cd "$(dirname "$0")/.." && pwd)
minimum="3, 11"

say() { printf '%s\n' "setup: $*"; }
fail() { printf '%s\n' "setup: $*" >&2; exit 1; }

is_new_enough() { "$1" -c "import sys; sys.exit(sys.version_info < ($minimum))" 2>/dev/null; }

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        is_new_enough "$PYTHON" || fail "PYTHON=$PYTHON does not run or is older than Python 3.11; name another one."
        command -v "$PYTHON"
        return
    fi
    for name in python3 python3.13 python3.12 python3.11; do
        if command -v "$name" >/dev/null 2>&1 && is_new_enough "$name"; then
            command -v "$name"
            return
        fi
    done
    fail "no Python >= 3.11 found (tried python3, python3.13, python3.12, python3.11)." \
        "Install one, or name it: make PYTHON=/path/to/python3.12"
}

# Exit 0 when the interpreter has a torch that drives accelerators and is new enough for burst.
has_accelerated_torch() {
    "$1" - 2>/dev/null <<'PYTHON'
import sys, torch
version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
sys.exit(not (version >= (2, 11) and (torch.version.cuda or torch.version.hip)))
PYTHON
}

make_venv() {
    python=$(find_python) || exit 1
    "$python" -c "import ensurepip, venv" 2>/dev/null ||
        fail "$python cannot make virtual environments. On Debian or Ubuntu: apt-get install python3-venv" \
            "(for another version than the system's: python3.12-venv and so on)."
    say "new environment in $venv from $python"
    if has_accelerated_torch "$python"; then
        "$python" -m venv --system-site-packages "$venv"
    else
        "$python" -m venv "$venv"
    fi
}

sees_system_packages() { grep -qi '^include-system-site-packages *= *true' "$venv/pyvenv.cfg"; }

install_packages() {
    constraints=$root/constraints.txt
    if sees_system_packages && has_accelerated_torch "$venv/bin/python"; then
        say "the torch for accelerators that this machine already has is kept"
        constraints=$venv/constraints.txt
        grep -v -e '^torch==' -e '^triton==' "$root/constraints.txt" >"$constraints"
        pip_install hatchling
    else
        # Before the rest, so that pip takes the torch it is configured to find (a CPU wheel, a mirror).
        pip_install hatchling "$(grep '^torch==' "$root/constraints.txt")"
    fi
    pip_install --no-build-isolation -e "$root[dev]"
}

pip_install() {
    say "pip install $*"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile -c "$constraints" "$@"
}

[ -x "$venv/bin/python" ] || make_venv
is_new_enough "$venv/bin/python" && "$venv/bin/python" -m pip --version >/dev/null 2>&1 ||
    fail "$venv/bin/python does not run, has no pip or is older than Python 3.11; delete $venv and try again."
rm -f "$venv/.ready"
install_packages
# What pip would do on one core. It fails for files that nobody imports, such as templates of other versions of Python.
"$venv/bin/python" -m compileall -qq -j 0 "$venv/lib" || true
say "ready: $("$venv/bin/python" --version), torch $("$venv/bin/python" -c 'import torch; print(torch.__version__)')"
touch "$venv/.ready"
