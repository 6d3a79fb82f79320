#!/bin/sh
# Measures whole decode steps on this machine's GPU with random weights, and a GPU with many streams; appends the records to engines/results.jsonl and
# writes docs/performance.md. Exit code 1 when a row was wrong. Rows that do not fit the memory are skipped: 8 x 128k tokens of Llama-3.1-8B are 137 GB,
# so 6 x 128k stands beside. On an H200 this took a quarter of an hour when minikv was still held in tensors.
# sh build_scripts/bench_steps.sh [RESULTS]     TRTKV and PYTHON name the programs; TRTKV_COMMIT the commit where the package is installed.
set -eu
cd "$(dirname "$0")/.."
results=${1:-engines/results.jsonl}
trtkv=${TRTKV:-trtkv}
python=${PYTHON:-python}
failed=0
step() { $trtkv bench step --device cuda --weights random --chunk 8192 --output "$results" "$@" || failed=1; }

step --model qwen2.5-7b --batch 1,8 --context 8192,32768 --policy full,fier,quest,freekv --budget 1024
step --model llama-2-7b --batch 1 --context 32768 --policy full,fier,quest --budget 1024
step --model qwen2.5-7b --batch 1,8 --context 131072 --policy full,fier,quest,freekv --budget 2048 --fill direct
step --model llama-3.1-8b --batch 6,8 --context 131072 --policy full,fier,quest,freekv --budget 2048 --fill direct
step --model qwen2.5-7b --batch 1 --context 32768 --policy full,lagkv,minikv --steps 16
step --model llama-3.1-8b --batch 8,24,largest --context 32768 --policy full,minikv,minikv-pyramid
$python build_scripts/bench_busy.py "$results" || failed=1
$python build_scripts/performance_doc.py "$results"
exit $failed
