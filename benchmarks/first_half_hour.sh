#!/usr/bin/env bash
# bash benchmarks/first_half_hour.sh OUT STAGE ...: programs end to end on one GPU, alone and as several ranks by NCCL.
#
# Stages are facts, train, ranks, pipes, dead and sanitizer; `on_a_gpu.sh` has those that time kernels and steps.  Each
# writes OUT/STAGE.log, takes at most LIMIT seconds, 540 by default, and does not stop the next; the exit status says how
# many failed.  What the compiler needs is installed by `on_a_gpu.sh`, which comes first.  RANKS=2 is for where NCCL refuses four on one GPU.  DEVICE=cpu tries this script without a GPU, by gloo.
set -uo pipefail
cd "$(dirname "$0")/.."
script=$PWD/benchmarks/first_half_hour.sh

out=$(mkdir -p "${1:?where results go}" && cd "$1" && pwd)
shift
export PYTHONPATH=$PWD/.typing${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
python=${PYTHON:-python3} device=${DEVICE:-cuda} ranks=${RANKS:-4}
export WORK=${WORK:-$(mktemp -d)}
wrong=0

# ---- plans and runs

plan() { # NAME MESH SHARD REST PRECISION KERNELS [LAYERS]: a small Llama, compiled to $WORK/NAME
    mkdir -p "$WORK/plans"
    [ -e "$WORK/plans/models" ] || ln -s "$PWD/plans/models" "$WORK/plans/models"
    cat >"$WORK/plans/$1.scale" <<EOF
use "models/llama.scale" {
  dims { vocab = 512  hidden = 256  heads = 4  kv_heads = 2  ffn = 512  layers = ${7:-4} }
}
cluster { gpu = h200 }
mesh { $2 }
${3:+shard { $3 \}}
$4
train {
  seq = 128  global_batch = 16  microbatch = 2  steps = 6  seed = 0  precision = $5  kernels = $6
  optimizer adamw { lr = 1e-3  clip = 1.0 }
  data text { files = [python_stdlib]  tokenizer = bytes  holdout = 5% }
}
EOF
    scalec compile "$WORK/plans/$1.scale" -o "$WORK/$1" >/dev/null
}

scalec() { "$python" -c 'import sys; from scalec.compiler.cli import main; sys.exit(main())' "$@"; }

options() { # RUN: of every run
    printf '%s\n' --device "$device" --out "$WORK/runs/$1" --log-every 1 --eval-every 100
}

one() { # PLAN RUN [OPTION ...]
    mapfile -t given < <(options "$2")
    "$python" "$WORK/$1/train.py" "${given[@]}" "${@:3}"
}

several() { # PLAN RUN [OPTION ...]: NCCL takes ranks that share a GPU if each says that it is on a host of its own
    mapfile -t given < <(options "$2")
    timeout --foreground "${RANKS_LIMIT:-150}" "$python" -m torch.distributed.run --standalone --nproc-per-node="$ranks" \
        --no-python bash -c '
        export NCCL_HOSTID=r$RANK LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 TORCH_NCCL_DUMP_ON_TIMEOUT=1
        export NCCL_SOCKET_IFNAME=lo NCCL_NET=Socket NCCL_IB_DISABLE=1 NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1
        export NCCL_NVLS_ENABLE=0 NCCL_CUMEM_ENABLE=0 NCCL_MAX_NCHANNELS=2
        exec "$@"' - "$python" "$WORK/$1/train.py" "${given[@]}" "${@:3}"
}

alike() { # RUN RUN TOLERANCE: the losses of the steps that both logged
    "$python" - "$WORK/runs/$1/log.jsonl" "$WORK/runs/$2/log.jsonl" "$3" <<'P'
import json, sys
mine, others = ({r["step"]: r["loss"] for r in map(json.loads, open(file)) if "loss" in r} for file in sys.argv[1:3])
both = mine.keys() & others.keys()
worst = max((abs(mine[step] - others[step]) / others[step] for step in both), default=float("inf"))
print(f"{len(both)} steps, at worst {worst:.1e} apart")
sys.exit(not worst <= float(sys.argv[3]))
P
}

check() { # WHAT COMMAND ...
    if "${@:2}"; then echo "ok    $1"; else echo "WRONG $1" && wrong=$((wrong + 1)); fi
}

beside() { # RUN: each plan of standard input, `name|mesh|shard|rest`, against that run, and its record against the plan
    local layers=$2 name mesh shard rest
    while IFS='|' read -r name mesh shard rest; do
        check "$name is compiled" plan "$name" "$mesh" "$shard" "$rest" fp32 triton "$layers"
        SCALEC_RECORD=1 check "$name runs" several "$name" "$name" --steps 3 </dev/null
        check "$name is one rank" alike "$name" "$1" 1e-4
        check "$name communicates as planned" scalec verify --recorded "$WORK/runs/$name/recorded"
    done
}

# ---- stages

facts() {
    [ "$device" = cpu ] || nvidia-smi
    "$python" - "$device" <<'P'
import sys
sys.path.insert(0, "benchmarks")
import torch
from gpu import Machine
print(Machine(torch.device(sys.argv[1]), toy=False, repeats=1))
P
}

train() { # one rank: kernels beside torch's ops and beside the CPU, resume, bf16, export, and all that looks inside
    for kernels in triton torch; do
        plan "one_$kernels" "" "" "" fp32 "$kernels"
        check "$kernels runs" one "one_$kernels" "$kernels" --save-every 3
    done
    device=cpu one one_torch cpu
    check "triton is the CPU" alike triton cpu 1e-4
    check "torch is the CPU" alike torch cpu 1e-4
    one one_triton resumed --steps 3
    check "a run resumes" one one_triton resumed --resume
    check "it is the uninterrupted one" alike resumed triton 1e-6
    plan bf16 "" "" "" bf16 triton
    check "bf16 runs" one bf16 bf16
    check "it is exported" one bf16 bf16 --export "$WORK/weights"
    SCALEC_SANITIZE=1 SCALEC_RECORD=1 check "sanitized and recorded" one bf16 watched --steps 3
    SCALEC_PROFILE="$out/profiled" SCALEC_PROFILE_STEPS=3-3 check "profiled" one bf16 profiled --steps 4
    gzip -f "$out"/profiled/*.json
}

ranks() { # every way of sharing
    plan alone "" "" "" fp32 triton
    one alone alone --steps 3
    local tensors="batch over dp  vocab, heads, kv_heads, ffn over tp" half=$((ranks / 2))
    beside alone 4 <<L
tp|dp = $half  tp = 2|$tensors  seq over tp|
z0|dp = $ranks|batch over dp|
z1|dp = $ranks|batch over dp|state { zero 1 over dp }
z2|dp = $ranks|batch over dp|state { zero 2 over dp }
z3|dp = $ranks|batch over dp|state { zero 3 over dp }
z3tp|dp = $half  tp = 2|$tensors|state { zero 3 over dp }
L
    SCALEC_SANITIZE=1 check "tp is sanitized" several tp tp_sanitized --steps 2
}

pipes() { # messages by NCCL, in groups, as no CPU has them
    plan alone8 "" "" "" fp32 triton 8
    one alone8 alone8 --steps 3
    beside alone8 8 <<L
p1f1b|pp = $ranks|layers over pp|pipeline { schedule = 1f1b }
pint|pp = $ranks|layers over pp|pipeline { schedule = interleaved_1f1b(chunks=2) }
pzbv|pp = $ranks|layers over pp|pipeline { schedule = zbv }
pzb2|pp = 2  dp = $((ranks / 2))|batch over dp  layers over pp|pipeline { schedule = zb_h1 }
L
}

dead() { # how long others wait for a rank that is gone
    plan gone "dp = $ranks" "batch over dp" "" fp32 triton
    rm -f "$out/dead.ranks"
    several gone gone --steps 100000 >"$out/dead.ranks" 2>&1 &
    until grep -qs "^step *2/" "$out/dead.ranks"; do
        sleep 1
        kill -0 $! 2>/dev/null || { check "the ranks begin" false; return; }
    done
    local began=$SECONDS
    kill -9 "$(pgrep -n -f "$WORK/gone/train.py")"
    wait
    echo "the others ended after $((SECONDS - began)) s"
    check "the dead rank is named" grep -q "SIGKILL\|Signal 9" "$out/dead.ranks"
}

sanitizer() { # bad accesses and races in the cases of kernels that compile soon, in one process
    [ "$device" = cuda ] || return 0
    for tool in memcheck racecheck; do
        PYTORCH_NO_CUDA_MEMORY_CACHING=1 PYTHONPATH=$PYTHONPATH:tests check "$tool" \
            timeout --foreground 200 compute-sanitizer --tool "$tool" --error-exitcode 9 "$python" - <<'P'
import importlib
for name in ("norms", "rope", "gates", "accumulate", "adamw"):
    module = importlib.import_module(f"helpers.kernels.cases_{name}")
    for case in sorted(case for case in vars(module) if case.startswith("case_") and "many_programs" not in case):
        print(name, case, flush=True)
        getattr(module, case)("cuda")
P
    done
}

if [ -n "${INSIDE:-}" ]; then # one stage, in a process that can be ended as a whole
    "$1"
    exit "$((wrong > 0))"
fi
failed=0
for stage in "$@"; do
    echo "== $stage"
    INSIDE=1 timeout --kill-after=30 "${LIMIT:-540}" bash "$script" "$out" "$stage" 2>&1 | tee "$out/$stage.log" ||
        { failed=$((failed + 1)) && echo "== $stage failed"; }
done
echo "$failed of $# stages failed"
exit "$failed"
