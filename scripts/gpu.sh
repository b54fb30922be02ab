#!/bin/sh
# gpu.sh PYTHON [ARGUMENTS of benchmarks.bench_gpu]: the GPU tests, then the benchmarks in the time that is left.
#
# Needs torch and pytest of PYTHON, no other package of a development environment. GPU_SECONDS (530) bounds all of it,
# GPU_TEST_SECONDS (150) the tests, 0 leaves them out. A failed test does not keep the benchmarks from running; the exit
# code is 1 then.
set -u
python=$1
shift
seconds=${GPU_SECONDS:-530}
test_seconds=${GPU_TEST_SECONDS:-150}
started=$(date +%s)

tests=0
if [ "$test_seconds" -gt 0 ]; then
    # Only files with such tests: the others may need packages that a GPU image lacks. Warnings of other versions of
    # torch are no failures.
    timeout -k 5 "$test_seconds" "$python" -m pytest -m gpu -W default -q -ra --durations 5 -p no:cacheprovider \
        --continue-on-collection-errors $(grep -rlE 'mark\.gpu' tests/engine --include='*.py')
    tests=$?
fi
[ "$tests" -eq 0 ] || echo "GPU tests: exit code $tests (124: stopped after $test_seconds s)" >&2

# 25 s: starting, ending, and a measurement that is stopped.
left=$((seconds - ($(date +%s) - started) - 25))
timeout -k 5 "$((left + 20))" "$python" -m benchmarks.bench_gpu --budget-s "$left" "$@"
benchmarks=$?
[ "$benchmarks" -eq 0 ] || echo "benchmarks: exit code $benchmarks" >&2

[ "$tests" -eq 0 ] && [ "$benchmarks" -eq 0 ]
