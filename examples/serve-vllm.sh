#!/bin/sh
# Serves a model with vLLM, its KV caches kept in a directory.
#
#     examples/serve-vllm.sh MODEL [DIRECTORY] [vllm serve options ...]
#
# The directory is $VUA_PATH, or else ./vua_cache, where none is given. Start it again, or on another
# host with the same directory: prompts that begin alike are loaded from there, not computed again.
set -eu

model=${1:?usage: serve-vllm.sh MODEL [DIRECTORY] [vllm serve options ...]}
shift
directory=${VUA_PATH:-./vua_cache}
case ${1:--} in
    -*) ;;  # an option: no directory is given
    *)
        directory=$1
        shift
        ;;
esac

exec "$(dirname "$0")/../bin/vua-vllm" serve "$model" --vua-path "$directory" "$@"
