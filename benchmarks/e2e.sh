#!/usr/bin/env bash
# Every record of the shipped E2E adapter. Needs an idle machine and about an hour on two cores.
#   benchmarks/e2e.sh DATA_DIR [TWIN_ADAPTER]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
data=${1:?the folder that holds e2e_nlg/test.jsonl.gz}
twin=${2:-}
adapter=adapters/smollm2-135m-e2e
results=benchmarks/results
run=.venv/bin/forestream
common=(--adapter "$adapter" --task e2e --split test --data-dir "$data")

$run bench "${common[@]}" --limit 200 --methods plain,forestream --nodes 32 --carriers deferred \
  --dtype float32 --json $results/e2e-test-float32.json
$run bench "${common[@]}" --limit 60 --methods plain,forestream,budget-8+fused,budget-16,budget-32 \
  --dtype bfloat16 --json $results/e2e-test-bfloat16.json
$run bench "${common[@]}" --limit 40 --methods plain,full-1,full-2,full-3,full-1+prune,full-2+prune,full-3+prune \
  --dtype bfloat16 --json $results/e2e-test-full-trees.json
$run evaluate "${common[@]}" --way batched --dtype float32 --json $results/e2e-quality-joint.json
if [ -n "$twin" ]; then
  $run evaluate --adapter "$twin" --task e2e --split test --data-dir "$data" --way batched --dtype float32 \
    --json $results/e2e-quality-twin.json
fi
.venv/bin/python benchmarks/refresh.py
