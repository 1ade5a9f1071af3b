#!/usr/bin/env bash
# bash benchmarks/on_a_gpu.sh OUT [STAGE ...]: everything that needs a GPU, on a machine that has torch and Triton already.
#
# Stages are tests, tune, rates, kernels, attention, head, 8B, 1B, ops and 3B, in this order by default; tune-CLASS tunes
# one class.  SEQS=8192 takes steps of sequences that long alone, SIZES="4096 8192" tunes these sizes.  What each prints
# goes to OUT/STAGE.log too, tables to OUT/results.md, and tiles, tuned or not, to OUT/tiles.toml.
# A stage that fails, or takes more than LIMIT seconds, 560 by default, does not stop the next, and leaves what it has so
# far; the exit status says how many did.  torch and Triton are left as they are; other packages come from the folder
# .whl if there is one, else from the package index.
set -uo pipefail
cd "$(dirname "$0")/.."

out=${1:?where results go}
shift
mkdir -p "$out"
[ $# -gt 0 ] || set -- tests tune rates kernels attention head 8B 1B ops 3B

export PYTHONPATH=$PWD/.typing${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 PIP_BREAK_SYSTEM_PACKAGES=1
python=${PYTHON:-python3}
wheels=()
[ -d .whl ] && wheels=(--no-index --find-links .whl)
packages=(attrs interegular jinja2 lark numpy 'pytest>=9' pytest-xdist hypothesis safetensors)
"$python" -m pip install --quiet --disable-pip-version-check "${wheels[@]}" "${packages[@]}" || exit

limit=${LIMIT:-560}
measure=(benchmarks/one_gpu.py --out "$out/results.md" ${SEQS:+--seqs "$SEQS"})
sizes=(${SIZES:+--sizes $SIZES})
mapfile -t tests < <(grep -rl --include='*.py' 'mark\.gpu' tests)

failed=0
for stage in "$@"; do
    case $stage in
    tests) command=(-m pytest -q -n 8 -o "faulthandler_timeout=$limit" -m gpu "${tests[@]}") ;; # kernels compile first
    tune) command=(benchmarks/tune_kernels.py "${sizes[@]}") ;;
    tune-*) command=(benchmarks/tune_kernels.py "${stage#tune-}" "${sizes[@]}") ;;
    rates | kernels | attention | head | ops) command=("${measure[@]}" --only "$stage") ;;
    *) command=("${measure[@]}" --only step --shapes "$stage") ;;
    esac
    echo "== $stage"
    timeout --kill-after=30 "$limit" "$python" "${command[@]}" 2>&1 | tee "$out/$stage.log" ||
        { failed=$((failed + 1)); echo "== $stage failed"; }
    cp compiler/analysis/tiles.toml "$out/"
done
exit "$failed"
