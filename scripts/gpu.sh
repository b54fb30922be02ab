#!/bin/sh
# gpu.sh PYTHON [ARGUMENTS of benchmarks.bench_gpu]: the GPU tests, then the benchmarks in the time that is left.
#
# Needs torch and pytest of PYTHON, no other package of a development environment. GPU_SECONDS (530; 2700 does all but the
# longest steps) bounds all of it, GPU_TEST_SECONDS (a quarter, 360 at most) the tests, 0 leaves them out. A failed test
# does not keep the benchmarks from running; the exit code is 1 then.
set -u
python=$1
shift
seconds=${GPU_SECONDS:-530}
quarter=$((seconds / 4 < 360 ? seconds / 4 : 360))
test_seconds=${GPU_TEST_SECONDS:-$quarter}
started=$(date +%s)
# As launches have it; whoever has set the allocator up keeps that.
[ -n "${PYTORCH_ALLOC_CONF:-}${PYTORCH_CUDA_ALLOC_CONF:-}" ] || export PYTORCH_ALLOC_CONF=expandable_segments:True

tests=0
if [ "$test_seconds" -gt 0 ]; then
    # What most depends on the device first. Only files with such tests: the others may need packages that a GPU image
    # lacks. Warnings of other versions of torch are no failures. SIGINT: pytest then still tells what it has seen.
    first='/test_kernels_on_gpu.py|/test_streams_on_gpu.py|/test_fused_kernels_on_gpu.py'
    files=$(grep -rlE 'mark\.gpu' tests --include='test_*.py' | sort)
    timeout -s INT -k 15 "$test_seconds" "$python" -m pytest -m gpu -W default -ra --durations 5 -p no:cacheprovider \
        --continue-on-collection-errors $(echo "$files" | grep -E "$first") $(echo "$files" | grep -vE "$first")
    tests=$?
fi
[ "$tests" -ne 124 ] || echo "GPU tests: stopped after $test_seconds s; files without a line above were left out" >&2
[ "$tests" -eq 0 ] || echo "GPU tests: exit code $tests" >&2

# 25 s: starting, ending, and a measurement that is stopped.
left=$((seconds - ($(date +%s) - started) - 25))
timeout -k 5 "$((left + 20))" "$python" -m benchmarks.bench_gpu --budget-s "$left" "$@"
benchmarks=$?
[ "$benchmarks" -eq 0 ] || echo "benchmarks: exit code $benchmarks" >&2

[ "$tests" -eq 0 ] && [ "$benchmarks" -eq 0 ]
