#!/bin/sh
# Runs transformers on models of random shape, 20 of each family, and our tests on what it wrote.
#
#   tools/random_goldens.sh [options of tools.make_random_goldens, such as --family inkling --count 3]
#   tools/random_goldens.sh sample [SEED] [options]  only two of each family, drawn by SEED (default: the clock), which is printed
#   tools/random_goldens.sh environment    only installs what the other forms need
#
# transformers lives in an environment of its own (Python 3.11, torch for CPU). Where there is no Python 3.11, or torch
# does not install, one line says that this was skipped. An environment of other versions is made anew. Needs .venv
# (make venv).
set -eu
cd "$(dirname "$0")/.."
dir=.cache/golden out=.cache/random-goldens
torch=2.13.0 transformers=5.24.0

skip() {
    echo "random goldens skipped: $1"
    exit 0
}

find_python() {
    for python in "${PYTHON311:-python3.11}" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.11*/bin/python3.11 \
        "${UV_PYTHON_INSTALL_DIR:-$HOME/.local/share/uv/python}"/cpython-3.11*/bin/python3.11; do
        if "$python" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info[:2] != (3, 11))' >/dev/null 2>&1; then
            echo "$python"
            return
        fi
    done
    return 1
}

pinned='import sys, torch, transformers
sys.exit([torch.__version__.split("+")[0], transformers.__version__] != sys.argv[1:])'
if ! "$dir/bin/python" -c "$pinned" "$torch" "$transformers" >/dev/null 2>&1; then
    base=$(find_python) || skip "no Python 3.11 found (python3.11, those of pyenv and uv, or one named in PYTHON311=...)"
    echo "installing torch and transformers into $dir (once)" >&2
    rm -rf "$dir"
    "$base" -m venv "$dir"
    "$dir/bin/python" -m pip --disable-pip-version-check -qq install --no-compile \
        "torch==$torch" "transformers==$transformers" || skip "torch $torch and transformers $transformers did not install"
fi

[ "${1:-}" != environment ] || exit 0

if [ "${1:-}" = sample ]; then
    shift
    case "${1:-}" in
        "" | -*) seed=$(date +%s) ;;
        *) seed=$1 && shift ;;
    esac
    echo "random goldens: two of each family; the same again: tools/random_goldens.sh sample $seed $*"
    set -- --draw "$seed" "$@"
fi

rm -rf "$out"
make_goldens() { "$dir/bin/python" -W ignore -m tools.make_random_goldens --out "$out" "$@"; }
if [ $# = 0 ]; then # the first and the last ten of each family, on a core each
    make_goldens --count 10 &
    first=$!
    make_goldens --seed 10 --count 10
    wait "$first"
else
    make_goldens "$@"
fi
export UKV_RANDOM_GOLDENS=$out
# Nearly all of the work is compiling, which XLA's plain emitters do twice as fast; but what they round depends on the
# layout, so bits are compared without them.
one_module=--xla_cpu_parallel_codegen_split_count=1  # there is a worker for every core
XLA_FLAGS="$one_module --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters" \
    .venv/bin/python -m pytest -n 2 tests/models/test_random_goldens.py -k parity
XLA_FLAGS=$one_module .venv/bin/python -m pytest -n 2 tests/models/test_random_goldens.py -k twin
