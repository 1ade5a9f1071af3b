#!/usr/bin/env bash
# bash benchmarks/on_a_gpu.sh OUT [STAGE ...]: everything that needs a GPU, on a machine that has torch and Triton already.
#
# Stages are tests, tune, kernels, attention, head, ops, 1B, 3B and 8B; by default all, in this order.  What each prints
# goes to OUT/STAGE.log too, tables to OUT/results.md, and tiles that were tuned to OUT/tiles.toml.  A stage that fails
# does not stop the next; the exit status says how many did.  torch and Triton are left as they are; other packages come
# from the folder .whl if there is one, else from the package index.
set -uo pipefail
cd "$(dirname "$0")/.."

out=${1:?where results go}
shift
mkdir -p "$out"
[ $# -gt 0 ] || set -- tests tune kernels attention head ops 1B 3B 8B

export PYTHONPATH=$PWD/.typing${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 PIP_BREAK_SYSTEM_PACKAGES=1
python=${PYTHON:-python3}
wheels=()
[ -d .whl ] && wheels=(--no-index --find-links .whl)
packages=(attrs interegular jinja2 lark numpy pytest hypothesis safetensors)
"$python" -m pip install --quiet --disable-pip-version-check "${wheels[@]}" "${packages[@]}" || exit

measure() { "$python" benchmarks/one_gpu.py --out "$out/results.md" "$@"; }

failed=0
for stage in "$@"; do
    case $stage in
    tests) command=("$python" -m pytest -q -m gpu tests) ;;
    tune) command=("$python" benchmarks/tune_kernels.py) ;;
    kernels | attention | head | ops) command=(measure --only "$stage") ;;
    *) command=(measure --only step --shapes "$stage") ;;
    esac
    echo "== $stage"
    "${command[@]}" 2>&1 | tee "$out/$stage.log" || { failed=$((failed + 1)); echo "== $stage failed"; }
done
cp compiler/tiles.toml "$out/"
exit "$failed"
