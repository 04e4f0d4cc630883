#!/usr/bin/env bash
# Search benchmark of two versions in turns. Usage: search.sh OLD NEW OUT REPEATS
# OLD and NEW are folders with the package as vanilla_transformer; both run in the active environment.
set -euo pipefail
out=$3
mkdir -p "$out"
for repeat in $(seq 1 "$4"); do
    for version in old new; do
        folder=$1
        [ "$version" = new ] && folder=$2
        PYTHONPATH=$folder${PYTHONPATH:+:$PYTHONPATH} python -m vanilla_transformer.benchmarks translation --threads 2 --sizes base \
            --beams 1,4 --batch_sizes 1,32 --batches 1 --rounds 1 --output_dir "$out/$version-$repeat" \
            > "$out/$version-$repeat.log" 2>&1
    done
done
