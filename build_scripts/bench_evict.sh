#!/bin/sh
# Measures what eviction adds to a prompt and decode steps of engines that evict, on this machine's GPU; appends the records to engines/results.jsonl.
# Exit code 1 when a row was wrong.
# sh build_scripts/bench_evict.sh [RESULTS]     TRTKV names the program; TRTKV_COMMIT the commit where the package is installed.
set -eu
cd "$(dirname "$0")/.."
results=${1:-engines/results.jsonl}
trtkv=${TRTKV:-trtkv}
failed=0
bench() { $trtkv bench "$@" --device cuda --output "$results" || failed=1; }

bench kernel --op prefill-sums --geometry llama-3.1-8b,qwen2.5-7b --context 8192,16384,32768,65536
bench kernel --op lag --geometry llama-3.1-8b --context 131072 --runs 3
bench step --model llama-3.1-8b --weights random --context 32768 --policy full,lagkv,snapkv,streaming,h2o,tova
exit $failed
