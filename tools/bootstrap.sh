#!/bin/sh
# Makes a virtual environment with this project installed in it.
#
#   tools/bootstrap.sh DIR demo      what the demo needs, in the versions of constraints.txt
#   tools/bootstrap.sh DIR pinned    that, and the tools for tests, lint and notebooks
#   tools/bootstrap.sh DIR newest    the newest jax, unpacked into DIR for PYTHONPATH, to go before the one of .venv
#   tools/bootstrap.sh DIR plugins   the CUDA plugin wheels (no CUDA libraries) and jax-triton, unpacked into DIR for
#                                    PYTHONPATH: enough to compile for a GPU on a machine without one. Needs .venv.
#   tools/bootstrap.sh DIR triton-next  jax-triton 0.4 and its Triton, to go before the plugins
#
# A stamp in DIR remembers what was asked for: a second call returns at once until pyproject.toml, constraints.txt or
# this file change.
set -eu
cd "$(dirname "$0")/.."
dir=$1 kind=$2

stamp=$dir/.installed
sum=$(cat pyproject.toml constraints.txt tools/bootstrap.sh | cksum)
if [ -f "$stamp" ]; then
    case "$kind/$(cat "$stamp")" in
        "$kind/$kind $sum" | "demo/pinned $sum") exit 0 ;;
    esac
fi

# The shims of a version manager can exist and fail: an interpreter counts when it really runs.
runs() {
    "$1" -c 'import ensurepip, ssl, sys, venv; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1
}

find_python() {
    for python in "${PYTHON:-python3}" python3 python3.13 python3.12 \
        "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[2-9]*/bin/python3 \
        "${UV_PYTHON_INSTALL_DIR:-$HOME/.local/share/uv/python}"/cpython-3.1[2-9]*/bin/python3; do
        if runs "$python"; then
            echo "$python"
            return
        fi
    done
    echo "no Python >= 3.12 with venv and ensurepip found (looked for python3, python3.13, python3.12, and those of" \
        "pyenv and uv): install one, or name one in PYTHON=..." >&2
    return 1
}

pip() {
    "$python" -m pip --disable-pip-version-check -qq "$@"
}

overlay() {
    python=.venv/bin/python
    echo "fetching the $kind wheels into $dir (once)" >&2
    rm -rf "$dir"
    pip install --no-deps --no-compile --target "$dir" "$@"
    echo "$kind $sum" >"$stamp"
    exit 0
}

case $kind in
    newest) overlay jax jaxlib ml_dtypes ;;
    plugins) overlay --constraint constraints.txt jax-cuda13-plugin jax-cuda13-pjrt jax-triton triton absl-py ;;
    # Later Tritons write PTX 9.4, which the assembler of CUDA 13.0 refuses.
    triton-next) overlay jax-triton==0.4.1 triton==3.7.0 ;;
esac

python=$dir/bin/python
if ! runs "$python"; then
    base=$(find_python)
    rm -rf "$dir"
    "$base" -m venv "$dir"
fi
echo "installing into $dir (once)" >&2
case $kind in
    demo) pip install --no-compile --constraint constraints.txt --editable '.[plot]' ;;
    pinned) pip install --no-compile --constraint constraints.txt --editable '.[dev,plot]' ;;
    *) echo "unknown kind of environment: $kind" >&2 && exit 2 ;;
esac
echo "$kind $sum" >"$stamp"
