#!/bin/sh
# Checks and times the GPU engine on this machine; part of gpu-bundle/ as run.sh.
#
#   run.sh conformance | determinism | misuse | placement | probes | launches | libraries | blocks |
#       train | families | shard | sanitize | bench | all
#
# Ends in a table of what passed, failed and was declined, and fails when anything failed. Needs an
# NVIDIA driver, and NVRTC from a toolkit or beside the running Python (`bin/foveate doctor`);
# sanitize needs compute-sanitizer, bench a PyTorch with CUDA for its peers, libraries cuBLASLt and
# NCCL, which runs without NVLink multicast unless NCCL_NVLS_ENABLE is set. `train` is all that has to
# do with training on one GPU: blocks, runs, families (which needs transformers, or in FOVEATE_FAMILIES
# the folder that families.py made elsewhere), a run under memcheck, and its bench. Logs go to $OUT, or
# to logs/ here. WORKERS sets the number of worker processes, TIMEOUT the seconds for a case, SUBSET
# how many cases run under memcheck and synccheck, SANITIZERS which of these two and racecheck run,
# PEERS what bench runs beside (flex-autotune takes half a minute a case).
set -u
here=$(cd "$(dirname "$0")" && pwd)
out=${OUT:-$here/logs}
export FOVEATE_CACHE_DIR="${FOVEATE_CACHE_DIR:-$here/kernel-cache}"
export FOVEATE_TIMEOUT="${FOVEATE_TIMEOUT:-20}"
export NCCL_NVLS_ENABLE="${NCCL_NVLS_ENABLE:-0}"
timeout=${TIMEOUT:-60}
corpus="$here/bin/foveate-conformance"
table="$out/table.txt"
failed=0

# row NAME PASSED FAILED DECLINED
row() {
    printf '%-44s %8s %8s %8s\n' "$1" "$2" "$3" "$4" >> "$table"
    [ "$3" = 0 ] || failed=1
}

# A check that is one program: passed when it ends well.
check() {
    name=$1
    log="$out/$(echo "$name" | tr -c 'a-z0-9\n' '-').txt"
    shift
    echo "== $name"
    if "$@" > "$log" 2>&1; then
        row "$name" 1 0 0
    else
        tail -n 30 "$log"
        row "$name" 0 1 0
    fi
}

decline() {
    echo "== $1 declined: $2"
    row "$1" 0 0 1
}

conformance() {
    echo "== conformance"
    log="$out/conformance.txt"
    "$corpus" run --cases "$here/cases" --timeout "$timeout" ${WORKERS:+--workers "$WORKERS"} \
        > "$log" 2>&1
    status=$?
    grep -E ' (failed|declined) ' "$log" | head -n 100
    # Rows of the report's table: name, passed, failed, declined.
    rows=$(awk '/^backend +passed +failed +declined/ { on = 1; next }
                on && /^.+ +[0-9]+ +[0-9]+ +[0-9]+$/ { print; next } { on = 0 }' "$log")
    if [ -n "$rows" ]; then
        echo "$rows" | while read -r line; do
            set -- $line
            n=$#
            eval "passed=\${$((n - 2))} wrong=\${$((n - 1))} declined=\${$n}"
            name=$(echo "$line" | sed -E 's/ +[0-9]+ +[0-9]+ +[0-9]+$//')
            printf '%-44s %8s %8s %8s\n' "corpus: $name" "$passed" "$wrong" "$declined" >> "$table"
        done
        [ "$status" = 0 ] || failed=1
    elif [ "$status" = 0 ]; then
        row "corpus" 0 0 1
    else
        tail -n 5 "$log"
        row "corpus" 0 1 0
    fi
}

# A command of the runner that prints a line for each of its checks.
lines() {
    echo "== $1"
    log="$out/$1.txt"
    "$corpus" "$1" > "$log" 2>&1
    status=$?
    cat "$log"
    if [ "$status" != 0 ]; then
        row "$1" "$(grep -c 'passed$' "$log")" "$(grep -c FAILED "$log")" 0
        failed=1
    elif grep -q "^$1 declined" "$log"; then
        row "$1" 0 0 1
    else
        row "$1" "$(grep -c 'passed$' "$log")" 0 0
    fi
}

determinism() { lines determinism; }
misuse() { lines misuse; }
placement() { lines placement; }
probes() { lines probes; }
launches() { lines launches; }
libraries() { lines libraries; }

# The blocks of a transformer beside f64.
blocks() {
    if "$here/bin/foveate" doctor --json | grep -q '"arch"'; then
        check "blocks" "$here/bin/foveate-nn-cuda-tests" --test-threads 1
    else
        decline "blocks" "no GPU"
    fi
}

# Blocks; runs beside the CPU's, repeated, killed and resumed, and under memcheck; families; speed.
train() {
    blocks
    runs
    families
    bench_train
}

runs() {
    echo "== train"
    log="$out/train.txt"
    python3 "$here/train.py" "$here/bin/foveate" "$out/train" --tokens-per-second > "$log" 2>&1
    cat "$log"
    wrong=$(grep -c 'FAILED$' "$log")
    if grep -q '^train declined' "$log"; then
        row "train" 0 0 1
    else
        row "train" "$(grep -c 'passed$' "$log")" "$wrong" "$(grep -c 'skipped' "$log")"
    fi
}

# Logits and gradients of tiny checkpoints of every family beside those of transformers.
families() {
    made="$out/families.txt"
    if [ -z "${FOVEATE_FAMILIES:-}" ] && ! python3 "$here/families.py" "$out/families" > "$made" 2>&1; then
        decline "families" "no checkpoints: $(tail -n 1 "$made"); FOVEATE_FAMILIES names those made elsewhere"
    elif ! "$here/bin/foveate" doctor --json | grep -q '"arch"'; then
        decline "families" "no GPU"
    else
        tests="$out/families-tests"
        gunzip -c "$here/bin/foveate-families-tests.gz" > "$tests" && chmod +x "$tests"
        check "families beside transformers" env FOVEATE_FAMILIES="$(realpath "${FOVEATE_FAMILIES:-$out/families}")" \
            "$tests" --nocapture --test-threads 1
        rm "$tests"
        cat "$log"
    fi
}

# Training on ranks that share the GPUs beside one rank: meshes up to eight ranks, in every state.
shard() {
    echo "== shard"
    log="$out/shard.txt"
    python3 "$here/shard.py" "$here/bin/foveate" "$out/shard" > "$log" 2>&1
    status=$?
    cat "$log"
    wrong=$(grep -c 'FAILED$' "$log")
    if grep -q '^shard declined' "$log"; then
        row "shard" 0 0 1
    elif [ "$status" != 0 ] && [ "$wrong" = 0 ]; then
        row "shard" 0 1 0
    else
        row "shard" "$(grep -c 'passed$' "$log")" "$wrong" "$(grep -c 'skipped' "$log")"
    fi
}

# under TOOL ARGUMENTS...: the runner with compute-sanitizer's TOOL, which ends with 99 where it
# found something.
under() {
    tool=$1
    shift
    # The end of a kernel's parameters is found by asking past it.
    [ "$tool" = memcheck ] && quiet="--report-api-errors no" || quiet=
    FOVEATE_TIMEOUT=120 FOVEATE_EXACT_MEMORY=1 \
        "$sanitizer" --tool "$tool" --error-exitcode 99 $quiet $spared "$corpus" "$@"
}

# Sets `spared` to the option that spares racecheck the kernels that it cannot judge. In the backward
# kernels one lane arrives at an mbarrier for its warp, after __syncwarp; a racecheck that counts
# only that lane's accesses as ordered complains of a right kernel too, which is tried first.
spare_mbarriers() {
    under racecheck trespass mbarrier > "$out/racecheck-mbarrier.txt" 2>&1
    if [ $? = 99 ]; then
        decline "racecheck of kernels with mbarriers" "it complains of a right one: racecheck-mbarrier.txt"
        spared="--kernel-regex-exclude kns=fv_backward"
    fi
}

sanitize() {
    sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | head -n 1)
    spared=
    for tool in ${SANITIZERS:-memcheck synccheck racecheck}; do
        if [ -z "$sanitizer" ]; then
            decline "$tool" "compute-sanitizer is not here; it is part of the CUDA toolkit"
            continue
        fi
        under "$tool" trespass "$tool" > "$out/trespass-$tool.txt" 2>&1
        if [ $? = 99 ]; then
            row "$tool finds what is wrong on purpose" 1 0 0
        else
            tail -n 5 "$out/trespass-$tool.txt"
            row "$tool finds what is wrong on purpose" 0 1 0
        fi
        # Hazards in shared memory are sought a hundred times slower than kernels run: the smallest
        # cases that have every feature, and the kernel that reads offsets from device memory.
        if [ "$tool" = racecheck ]; then
            spare_mbarriers
            check "$tool" under "$tool" run --cases "$here/cases" --workers 0 --subset cover
            check "$tool placement" under "$tool" placement
        else
            check "$tool" under "$tool" run --cases "$here/cases" --workers 0 \
                --subset "${SUBSET:-120}"
        fi
    done
}

# Steps of 135 million parameters beside a loop in PyTorch, where that is here.
bench_train() {
    if ! "$here/bin/foveate" doctor --json | grep -q '"arch"'; then
        decline "bench train" "no GPU"
        return
    fi
    peers="$out/train-peers.jsonl"
    python3 "$here/benches/train_gpu_peers.py" --models 135m --rows 8 --len 2048 --documents 1 --states f32 \
        --peers loop --recompute none > "$peers" 2> "$out/train-peers.txt" || tail -n 1 "$out/train-peers.txt"
    check "bench train" "$here/bin/foveate" bench train --model 135m --rows 8 --peers "$peers"
    cat "$log"
}

bench() {
    cases="$out/bench-cases.jsonl" peers="$out/bench-peers.jsonl"
    if ! "$here/bin/foveate" doctor --json | grep -q '"arch"'; then
        decline "bench" "no GPU"
        return
    fi
    "$here/bin/foveate" bench gpu --list --json > "$cases" || { row "bench" 0 1 0; return; }
    if python3 -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null; then
        python3 "$here/benches/gpu_peers.py" --prepare "${WORKERS:-8}" \
            --peers "${PEERS:-cudnn,flash2,flex,flex-flash,fa4,cudnn-flex}" "$cases" > "$peers"
        check "bench beside PyTorch" "$here/bin/foveate" bench gpu --peers "$peers"
    else
        echo "PyTorch with CUDA is not here: no peers"
        check "bench" "$here/bin/foveate" bench gpu
    fi
    check "host time" "$corpus" host-time
    cat "$out"/bench*.txt "$out/host-time.txt"
}

case "${1:-}" in
    conformance | determinism | misuse | placement | probes | launches | libraries | blocks | train | families | shard | sanitize | bench | all)
        mkdir -p "$out" && : > "$table" ;;
    *) sed -n '2,17s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac
case $1 in
    conformance | determinism | misuse | placement | probes | launches | libraries | blocks | train | families | shard | sanitize | bench) "$1" ;;
    all) conformance; determinism; misuse; placement; probes; launches; libraries; train; shard; sanitize; bench ;;
esac

printf '\n%-44s %8s %8s %8s\n' check passed failed declined
cat "$table"
exit "$failed"
