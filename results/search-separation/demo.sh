#!/usr/bin/env bash
# The demo with three seeds; two versions run at the same time on one core each, and swap cores with each seed.
# Usage: demo.sh OLD_PYTHON OLD NEW_PYTHON NEW OUT
set -euo pipefail
out=$5
mkdir -p "$out"
one() {  # NAME PYTHON FOLDER CORE SEED
    run=$out/$1-seed-$5
    export PYTHONPATH=$3 OMP_NUM_THREADS=1
    taskset -c "$4" "$2" -m vanilla_transformer.train demo --seed "$5" --output_dir "$run" > "$run.log" 2>&1
    taskset -c "$4" "$2" -m vanilla_transformer.train.evaluate "$run" >> "$run.log" 2>&1
}
for seed in 1 2 3; do
    one old "$1" "$2" $((seed % 2)) "$seed" &
    old=$!
    one new "$3" "$4" $(((seed + 1) % 2)) "$seed" &
    wait $old
    wait $!
done
