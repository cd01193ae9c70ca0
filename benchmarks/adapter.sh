#!/usr/bin/env bash
# Every record of the shipped SQL adapter in float32. Needs an idle machine and about half an hour on two cores.
#   benchmarks/sql.sh DATA_DIR [TWIN_ADAPTER]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
data=${1:?the folder that holds sql_create_context/test.jsonl.gz}
twin=${2:-}
adapter=adapters/smollm2-135m-sql
results=benchmarks/results
run=.venv/bin/forestream
bench=($run bench --adapter "$adapter" --task sql --data-dir "$data" --dtype float32)

# Settings, prompt lookup's too, are chosen on the validation split and reported on the test split.
$run tune --adapter "$adapter" --task sql --data-dir "$data" --limit 16 --candidates 4 --dtype float32 \
  --output decoding.json --json $results/sql-tune-float32.json
"${bench[@]}" --split validation --limit 24 --settings decoding.json \
  --methods plain,lookup-2-2,lookup-4-2,lookup-4-3,lookup-8-2 --json $results/sql-lookup-float32.json
"${bench[@]}" --split test --limit 80 --settings decoding.json \
  --methods plain,transformers,lookup-4-2,forestream,budget-32 --json $results/sql-test-float32.json
rm decoding.json

quality() {
  $run evaluate --adapter "$1" --task sql --split test --data-dir "$data" --limit 1000 --way batched --batch-size 32 \
    --dtype float32 --json "$results/sql-quality-$2.json"
}
quality "$adapter" joint
if [ -n "$twin" ]; then quality "$twin" twin; fi
.venv/bin/python benchmarks/refresh.py
