#!/usr/bin/env bash
# compute-sanitizer over one small problem of every GPU kernel (tests/kernels/small_cases.py), a process each, side by side.
#
#   tools/sanitize.sh memcheck|racecheck [NAME ...]
#
# Prints a line for each problem: its own verdict and the tool's. Reports are kept in $OUT (default: .cache/sanitizer).
# Fails if a problem gives wrong results, or the tool reports anything.
set -uo pipefail
cd "$(dirname "$0")/.."
tool=$1
shift
python=${PYTHON:-python3}
sanitizer=${SANITIZER:-$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer | head -1)}
out=${OUT:-.cache/sanitizer}
mkdir -p "$out"
names=("$@")
[ ${#names[@]} -gt 0 ] || read -ra names <<< "$($python -m tests.kernels.small_cases)"

# A buffer is an allocation of its own, so that memcheck knows its bounds; launches one by one.
export XLA_PYTHON_CLIENT_ALLOCATOR=platform
export XLA_FLAGS="--xla_gpu_enable_command_buffer= --xla_gpu_enable_triton_gemm=false --xla_gpu_autotune_level=0"

run() {
    "$sanitizer" --tool "$tool" --print-limit 50 --error-exitcode 9 \
        "$python" -m tests.kernels.small_cases "$1" > "$out/$1.$tool.txt" 2>&1
    local status=$?
    echo "$1: exit $status; $(grep -c ': right' "$out/$1.$tool.txt") right; $(grep SUMMARY "$out/$1.$tool.txt" | tail -1)"
    return $status
}

pids=()
for name in "${names[@]}"; do
    run "$name" &
    pids+=($!)
done
failed=0
for pid in "${pids[@]}"; do
    wait "$pid" || failed=1
done
exit $failed
