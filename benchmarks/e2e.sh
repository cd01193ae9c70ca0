#!/usr/bin/env bash
# Every record of the shipped E2E adapter. Needs an idle machine and about an hour and a half on two cores.
#   benchmarks/e2e.sh DATA_DIR [TWIN_ADAPTER]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
data=${1:?the folder that holds e2e_nlg/test.jsonl.gz}
twin=${2:-}
adapter=adapters/smollm2-135m-e2e
results=benchmarks/results
run=.venv/bin/forestream
bench=($run bench --adapter "$adapter" --task e2e --data-dir "$data")

# Settings are chosen on the validation split and reported on the test split. Options name the setting here: no settings
# file is left beside the adapter.
$run tune --adapter "$adapter" --task e2e --data-dir "$data" --limit 24 --candidates 8 \
  --output "$(mktemp)" --json $results/e2e-tune-bfloat16.json
"${bench[@]}" --split test --limit 60 --dtype bfloat16 \
  --methods plain,transformers,forestream,budget-8+fused,budget-4+fused,budget-16,full-1+fused \
  --json $results/e2e-test-bfloat16.json
$run tune --adapter "$adapter" --task e2e --data-dir "$data" --limit 12 --candidates 6 --dtype float32 \
  --output decoding.json --json $results/e2e-tune-float32.json
"${bench[@]}" --split test --limit 80 --dtype float32 --settings decoding.json \
  --methods plain,transformers,forestream,budget-5+G4 --json $results/e2e-test-float32.json
rm decoding.json
"${bench[@]}" --split test --limit 200 --dtype bfloat16 \
  --methods plain,full-1,full-1+prune,full-2,full-2+prune --json $results/e2e-test-full-trees-k1-k2.json
"${bench[@]}" --split test --limit 200 --dtype bfloat16 \
  --methods plain,full-3,full-3+prune --json $results/e2e-test-full-trees-k3.json

quality() {
  $run evaluate --adapter "$1" --task e2e --split test --data-dir "$data" --way batched --batch-size 32 \
    --dtype float32 --json "$results/e2e-quality-$2.json"
}
quality "$adapter" joint
if [ -n "$twin" ]; then quality "$twin" twin; fi
.venv/bin/python benchmarks/refresh.py
