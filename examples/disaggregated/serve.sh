#!/bin/sh
# One prefill server, one decode server, and the proxy in front of them, on one machine.
# Usage: serve.sh MODEL DIRECTORY [arguments of vllm serve]
set -eu
model=$1 directory=$2
shift 2
here=$(dirname "$0")

"$here/../../bin/vua-vllm" serve "$model" --vua-path "$directory" --port 8100 \
    --kv-transfer-config '{"kv_role": "kv_both"}' "$@" &
prefill=$!
"$here/../../bin/vua-vllm" serve "$model" --vua-path "$directory" --port 8200 \
    --kv-transfer-config '{"kv_role": "kv_both"}' "$@" &
decode=$!
trap 'kill "$prefill" "$decode"' EXIT
"${PYTHON:-python3}" "$here/proxy.py" --port 8000 \
    --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200
