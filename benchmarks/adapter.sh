#!/usr/bin/env bash
# Every float32 record of the shipped SQL or DialogSum adapter. Needs an idle machine and about half an hour on two cores.
#   benchmarks/adapter.sh sql|dialogsum DATA_DIR [TWIN_ADAPTER]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
task=${1:?sql or dialogsum}
data=${2:?the folder that holds the data sets}
twin=${3:-}
case $task in # prompts to tune with, to sweep prompt lookup with, to measure, to score; what is measured
  sql) tuned=16 swept=24 measured=80 scored=1000 methods=lookup-4-2,forestream,budget-5+G4+lookup-0-4,budget-5+G4,budget-32 ;;
  dialogsum) tuned=12 swept=16 measured=32 scored=500 methods=lookup-2-2,lookup-4-2,forestream,budget-8,budget-32 ;;
  *) echo "no adapter is shipped for $task; expected sql or dialogsum" >&2 && exit 2 ;;
esac
adapter=adapters/smollm2-135m-$task
results=benchmarks/results
run=.venv/bin/forestream
bench=($run bench --adapter "$adapter" --task "$task" --data-dir "$data" --dtype float32)

# Settings, prompt lookup's too, are chosen on the validation split and reported on the test split.
$run tune --adapter "$adapter" --task "$task" --data-dir "$data" --limit $tuned --candidates 5 --dtype float32 \
  --output decoding.json --json "$results/$task-tune-float32.json"
"${bench[@]}" --split validation --limit $swept --settings decoding.json \
  --methods plain,lookup-2-2,lookup-4-2,lookup-4-3,lookup-8-2 --json "$results/$task-lookup-float32.json"
"${bench[@]}" --split test --limit $measured --settings decoding.json \
  --methods plain,transformers,$methods --json "$results/$task-test-float32.json"
rm decoding.json

quality() {
  $run evaluate --adapter "$1" --task "$task" --split test --data-dir "$data" --limit $scored --way batched --batch-size 32 \
    --dtype float32 --json "$results/$task-quality-$2.json"
}
quality "$adapter" joint
if [ -n "$twin" ]; then
  quality "$twin" twin
  $run evaluate --texts "$results/$task-quality-joint.json" --against "$results/$task-quality-twin.json" --task "$task" \
    --split test --data-dir "$data" --json "$results/$task-quality-guard.json" || [ $? -eq 1 ] # 1: it does not hold
fi
.venv/bin/python benchmarks/refresh.py
