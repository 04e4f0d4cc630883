#!/usr/bin/env bash
# Trains on two machines for real, loses one, loses the other, and compares the result bit for bit
# with a run that lost none. The machines are two network namespaces joined by a cable (a veth pair);
# they share the file system, as the nodes of a cluster do. Needs Linux, root and `ip`; takes minutes.
#
#     sudo tests/several_hosts.sh [PYTHON]
set -euo pipefail

python=${1:-python3}
tests=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
id=$$
address=10.77.0
steps=240
longest_wait=180

say() { echo "[$(date +%H:%M:%S)] $*"; }
fail() { say "FAILED: $*"; exit 1; }

[ "$(id -u)" = 0 ] || { echo "must be run as root, to make network namespaces" >&2; exit 2; }
command -v ip > /dev/null || { echo "needs ip, of iproute2" >&2; exit 2; }

# Everything that runs on machine $1, and nothing else, dies at once.
kill_machine() {
    local pids
    pids=$(ip netns pids "vt$id-$1")
    # shellcheck disable=SC2086
    [ -z "$pids" ] || kill -9 $pids 2> /dev/null || true
}

clean_up() {
    status=$?
    for rank in 0 1; do
        if ip netns list | grep -q "^vt$id-$rank\b"; then
            kill_machine $rank
            ip netns delete "vt$id-$rank"
        fi
    done
    if [ $status = 0 ]; then rm -rf "$work"; else say "what was left is in $work"; fi
}
trap clean_up EXIT

say "making two machines, $address.1 and $address.2, and a cable between them"
for rank in 0 1; do
    ip netns add "vt$id-$rank"
    ip -n "vt$id-$rank" link set lo up
done
ip link add eth0 netns "vt$id-0" type veth peer name eth0 netns "vt$id-1"
for rank in 0 1; do
    ip -n "vt$id-$rank" address add "$address.$((rank + 1))/24" dev eth0
    ip -n "vt$id-$rank" link set eth0 up
done

say "writing a toy corpus and a recipe for each of two runs"
PYTHONPATH="$tests${PYTHONPATH:+:$PYTHONPATH}" "$python" - "$work" "$steps" << 'PYTHON'
import sys
from pathlib import Path

import train_toys

work, steps = Path(sys.argv[1]), int(sys.argv[2])
corpus = train_toys.write_corpus(work / "corpus")
for name in ("whole", "broken"):
    settings = train_toys.toy_settings(
        corpus, work / name, max_steps=steps, save_every_steps=10, eval_every_steps=60
    )
    train_toys.write_recipe(work / f"{name}.yaml", settings)
PYTHON

# Start run $1 on both machines, each a process of its own; the rest are flags.
start() {
    local name=$1 rank
    shift
    for rank in 0 1; do
        ip netns exec "vt$id-$rank" env ACCELERATE_USE_CPU=true OMP_NUM_THREADS=1 \
            GLOO_SOCKET_IFNAME=eth0 HF_HOME="$work/home-$rank" \
            "$python" -m accelerate.commands.launch --multi_gpu --num_machines 2 \
            --num_processes 2 --machine_rank $rank --main_process_ip "$address.1" \
            --main_process_port 29500 --mixed_precision no --dynamo_backend no \
            -m vanilla_transformer.train "$work/$name.yaml" "$@" \
            > "$work/$name-$rank.log" 2>&1 &
        machines[rank]=$!
    done
}

wait_for_step() {
    local name=$1 step=$2 waited=0
    until grep -q "\"step\": $step," "$work/$name/metrics.jsonl" 2> /dev/null; do
        sleep 0.1
        waited=$((waited + 1))
        [ $waited -lt $((10 * longest_wait)) ] || fail "step $step did not come in $longest_wait s"
        kill -0 "${machines[0]}" 2> /dev/null || {
            tail -n 20 "$work/$name-0.log" "$work/$name-1.log"
            fail "the run ended before step $step"
        }
    done
}

# Lose machine $1 of the run under way, and do not speak of its death as of a failure here.
lose_machine() {
    kill_machine "$1"
    { wait "${machines[$1]}"; } 2> /dev/null || true
}

# The machine that is left must notice and end by itself, with an error.
expect_the_other_to_end() {
    local rank=$1 began=$SECONDS status=0
    while kill -0 "${machines[$rank]}" 2> /dev/null; do
        [ $((SECONDS - began)) -lt $longest_wait ] \
            || fail "machine $((rank + 1)) did not end by itself in $longest_wait s"
        sleep 0.2
    done
    wait "${machines[$rank]}" || status=$?
    [ $status != 0 ] || fail "machine $((rank + 1)) ended as if nothing had happened"
    say "machine $((rank + 1)) ended by itself after $((SECONDS - began)) s, with status $status:"
    grep -o -m 1 -E "[A-Za-z]*Error: .*" "$work/broken-$rank.log" | cut -c1-150 | sed 's/^/    /'
}

finish() {
    local name=$1 rank
    for rank in 0 1; do
        wait "${machines[$rank]}" || {
            tail -n 30 "$work/$name-$rank.log"
            fail "machine $((rank + 1)) could not finish the run"
        }
    done
}

machines=()
say "run 1: $steps steps on both machines, undisturbed"
start whole
finish whole

say "run 2: the same, until step 80"
start broken
wait_for_step broken 80
say "killing machine 2, which computes"
lose_machine 1
expect_the_other_to_end 0

say "both machines again, with --resume, until step 160"
start broken --resume
wait_for_step broken 160
say "killing machine 1, which saves and where all others meet"
lose_machine 0
expect_the_other_to_end 1

say "both machines again, with --resume, to the end"
start broken --resume
finish broken
grep -h "^first_step" "$work/broken/environment.txt" | sed 's/^/    /'

say "comparing the models"
PYTHONPATH="$tests${PYTHONPATH:+:$PYTHONPATH}" "$python" - "$work" "$steps" << 'PYTHON'
import sys
from pathlib import Path

import train_toys

work, steps = Path(sys.argv[1]), sys.argv[2]
environment = (work / "broken/environment.txt").read_text(encoding="utf-8")
first = [int(line.split()[1]) for line in environment.splitlines() if "first_step" in line]
assert first[0] == 1 < first[1] < first[2], f"it was not resumed: {first}"
assert environment.count("processes: 2") == 3
for part in ("", f"checkpoints/step-{steps}"):
    train_toys.assert_same_bits(work / "whole" / part, work / "broken" / part)
print(f"    {len(train_toys.weights(work / 'whole'))} tensors are the same in every bit")
PYTHON
say "done: two machines lost, nothing else"
