#!/bin/sh
# Serves a model with vLLM, its KV caches kept in a directory.
#
#     examples/serve-vllm.sh MODEL [DIRECTORY] [vllm serve options ...]
#
# Start it again, or on another host with the same directory: prompts that begin alike are loaded
# from there, not computed again.
set -eu

model=${1:?usage: serve-vllm.sh MODEL [DIRECTORY] [vllm serve options ...]}
directory=${2:-./vua_cache}
[ $# -gt 1 ] && shift
shift

exec vua-vllm serve "$model" --kv-transfer-config '{
    "kv_connector": "VUAStorageConnector_V1",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"shared_storage_path": "'"$directory"'"}
}' "$@"
