#!/bin/sh
# Measures what has not been measured yet, on a machine with a GPU; part of gpu-bundle/ as measure.sh.
#
#   measure.sh [--seconds N] [--list] [PART ...]     (all parts when none is named)
#
# A part is some commands, each with a limit in seconds and a log of its own in $OUT (or logs/ here).
# --seconds bounds all of them together: a command that does not fit into what is left is not begun,
# and is told of. So parts can be spread over as many short loans of a machine as it takes; the most
# wanted come first. Without a GPU every command is declined, and that passes. The table at the end has
# a line for each command: seconds, and passed, FAILED, timeout, declined or left.
#
# Needs what run.sh needs; peers need their packages (gpu_peers.py and train_gpu_peers.py say which, and
# decline one by one), TORCHTITAN the wheel of torchtitan 0.2.2 or its unpacked folder. TRAINERS says beside
# which trainers steps are measured (loop,torchtitan), RECOMPUTE what these compute again (none).
set -u
here=$(cd "$(dirname "$0")" && pwd)
out=${OUT:-$here/logs}
foveate="$here/bin/foveate" corpus="$here/bin/foveate-conformance"
export FOVEATE_CACHE_DIR="${FOVEATE_CACHE_DIR:-$here/kernel-cache}"
parts="blocks dq peers train1b train3b train8b windows states corpus sanitize"
most=1500 only_list=
failed=0

about() {
    case $1 in
        blocks) echo "blocks beside f64 and the CPU, rotations within one rounding among them" ;;
        dq) echo "what the fixed order costs a step of 1B and 135M, with dq on Hopper" ;;
        peers) echo "attention beside every peer: D 64 to 256, plain, sparse and scored, deterministic" ;;
        train1b) echo "1B, causal and 16 documents, beside torchtitan and the loop in one run" ;;
        train3b) echo "3B, the same" ;;
        train8b) echo "8B in bf16, the same; our own in exact, 16 batches a step" ;;
        windows) echo "1B with windows in every other layer, and with a cap, beside the loop" ;;
        states) echo "training beside the CPU: repeats, kill -9 and resume" ;;
        corpus) echo "the whole corpus in worker processes, to its end" ;;
        sanitize) echo "memcheck, synccheck and racecheck on the kernels as they are" ;;
    esac
}

# within SECONDS NAME COMMAND...: runs a command, and writes its line.
within() {
    limit=$1 name=$2
    shift 2
    log="$out/measure-$name.txt"
    left=$((most - ($(date +%s) - began)))
    if [ -z "$gpu" ]; then
        line "$name" 0 "declined: no GPU"
    elif [ "$limit" -gt "$left" ]; then
        line "$name" 0 "left: it may take $limit s, $left s are left"
    else
        echo "== $name: $*"
        since=$(date +%s)
        { echo "$ $*"; echo "$gpu"; } > "$log"
        timeout -k 5 "$limit" "$@" >> "$log" 2>&1
        status=$?
        took=$(($(date +%s) - since))
        nvidia-smi --query-gpu=clocks.sm,clocks.mem,temperature.gpu,power.draw --format=csv,noheader >> "$log" 2>&1
        tail -n 20 "$log"
        case $status in
            0) line "$name" "$took" passed ;;
            124 | 137) line "$name" "$took" timeout; failed=1 ;;
            *) line "$name" "$took" "FAILED ($status)"; failed=1 ;;
        esac
    fi
}

line() { printf '%-36s %6s  %s\n' "$1" "$2" "$3" >> "$table"; }

# attention NAME SECONDS FILTER [OPTION ...]: cases of the bench beside every peer, in one run.
attention() {
    name=$1 limit=$2 filter=$3
    shift 3
    within "$limit" "$name" sh -c '
        set -e
        foveate=$1 benches=$2 out=$3 filter=$4; shift 4
        "$foveate" bench gpu --list --json --filter "$filter" > "$out.cases"
        python3 "$benches/gpu_peers.py" --prepare 8 --peers "${PEERS:-cudnn,fa4,cudnn-flex,flex-flash,flex}" "$out.cases" > "$out.peers" ||
            { echo "no peers: see above"; : > "$out.peers"; }
        "$foveate" bench gpu --filter "$filter" --peers "$out.peers" "$@"' \
        sh "$foveate" "$here/benches" "$out/measure-$name" "$filter" "$@"
}

# steps NAME SECONDS MODEL DOCUMENTS STATE ROWS [PEER'S STATES]: steps beside other trainers.
steps() {
    within "$2" "$1" sh -c '
        set -e
        foveate=$1 benches=$2 peers=$3 model=$4 documents=$5 state=$6 rows=$7 states=$8
        : > "$peers"
        [ -z "$states" ] || python3 "$benches/train_gpu_peers.py" --models "$model" --documents "$documents" --rows "$rows" \
            --peers "${TRAINERS:-loop,torchtitan}" --states "$states" --recompute "${RECOMPUTE:-none}" ${TORCHTITAN:+--torchtitan "$TORCHTITAN"} > "$peers" || echo "no peers: see above"
        "$foveate" bench train --model "$model" --documents "$documents" --state "$state" --rows "$rows" --peers "$peers"' \
        sh "$foveate" "$here/benches" "$out/measure-$1.peers" "$3" "$4" "$5" "$6" "${7:-}"
}

blocks() {
    within 120 blocks "$here/bin/foveate-nn-cuda-tests" --test-threads 1 --nocapture
}
dq() {
    steps dq-1b 120 1b 1 exact 2
    steps dq-1b-documents 120 1b 16 exact 2
    steps dq-135m 60 135m 1 exact 8
    within 400 dq-repeats "$corpus" determinism
}
peers() {
    for head in d64 d128 d192 d256; do attention "peers-$head" 240 "s8192/$head"; done
    attention peers-deterministic 120 s8192/d128 --deterministic
}
train1b() {
    steps train1b-causal 240 1b 1 exact 2 f32,bf16
    steps train1b-documents 240 1b 16 exact 2 f32,bf16
}
train3b() {
    steps train3b-causal 300 3b 1 exact 1 f32,bf16
    steps train3b-documents 300 3b 16 exact 1 f32,bf16
}
train8b() {
    steps train8b-causal 300 8b 1 bf16 1 bf16
    steps train8b-documents 300 8b 16 bf16 1 bf16
    within 240 train8b-exact "$foveate" bench train --model 8b --state exact --recompute auto --accumulate 16 --order any --steps 1
}
windows() {
    within 200 windows sh -c '
        foveate=$1 benches=$2 peers=$3
        for what in "--window 1024" "--cap 30"; do
            python3 "$benches/train_gpu_peers.py" --models 1b --documents 1 --states f32 --peers loop --recompute none $what > "$peers"
            own=$(echo "$what" | sed "s/--cap \(.*\)/--score softcap(\1)/")
            "$foveate" bench train --model 1b --rows 2 --state exact --order any $own --peers "$peers"
        done' sh "$foveate" "$here/benches" "$out/measure-windows.peers"
}
states() {
    within 300 states python3 "$here/train.py" "$foveate" "$out/measure-train" --tokens-per-second
}
corpus() {
    within 1200 corpus "$corpus" run --cases "$here/cases" --timeout 60
}
sanitize() {
    for tool in memcheck synccheck racecheck; do
        within 400 "sanitize-$tool" env SANITIZERS=$tool OUT="$out/sanitize-$tool" sh "$here/run.sh" sanitize
    done
}

while [ $# -gt 0 ]; do
    case $1 in
        --seconds) most=${2:-}; shift; [ $# = 0 ] || shift ;;
        --list) only_list=yes; shift ;;
        -*) echo "error: there is no option $1; there are --seconds N and --list" >&2; exit 2 ;;
        *) break ;;
    esac
done
case $most in '' | *[!0-9]*) echo "error: --seconds takes a whole number of seconds" >&2; exit 2 ;; esac
for part in "$@"; do
    case " $parts " in
        *" $part "*) ;;
        *) echo "error: there is no part $part; there are $parts" >&2; exit 2 ;;
    esac
done
if [ -n "$only_list" ]; then
    for part in $parts; do printf '%-9s %s\n' "$part" "$(about "$part")"; done
    exit
fi
[ -x "$foveate" ] || { echo "error: $foveate is missing; scripts/gpu-bundle.sh makes it" >&2; exit 2; }
mkdir -p "$out"
table="$out/measure-table.txt"
: > "$table"
began=$(date +%s)
gpu=
if "$foveate" doctor --json 2>/dev/null | grep -q '"arch"'; then
    gpu=$(nvidia-smi --query-gpu=name,driver_version,clocks.max.sm --format=csv,noheader 2>/dev/null || echo "a GPU")
fi
for part in ${*:-$parts}; do "$part"; done
printf '\n%-36s %6s  %s\n' command seconds outcome
cat "$table"
exit "$failed"
