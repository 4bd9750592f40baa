#!/bin/sh
# One prefill server, one decode server, and the proxy in front of them, on one machine.
#
#     examples/disaggregated/serve.sh MODEL [DIRECTORY] [vllm serve options ...]
#
# The directory is $VUA_PATH, or else ./vua_cache, where none is given. Each line of output begins
# with the program that wrote it. Ctrl-C or SIGTERM ends all three.
set -eu
model=${1:?usage: serve.sh MODEL [DIRECTORY] [vllm serve options ...]}
shift
directory=${VUA_PATH:-./vua_cache}
case ${1:--} in
    -*) ;;  # an option: no directory is given
    *)
        directory=$1
        shift
        ;;
esac
here=$(cd "$(dirname "$0")" && pwd)
pipes=$(mktemp -d)
servers=

named() {  # named NAME COMMAND...: runs it in the background, its output marked
    name=$1
    shift
    mkfifo "$pipes/$name"
    sed -u "s/^/$name: /" <"$pipes/$name" &
    "$@" >"$pipes/$name" 2>&1 &
    servers="$servers $!"
}

stop() {
    trap - EXIT INT TERM
    kill $servers 2>/dev/null || true
    wait $servers 2>/dev/null || true
    rm -r "$pipes"
}
trap stop EXIT
trap 'stop; exit 143' INT TERM

named prefill "$here/../../bin/vua-vllm" serve "$model" --vua-path "$directory" --port 8100 \
    --kv-transfer-config '{"kv_role": "kv_both"}' "$@"
named decode "$here/../../bin/vua-vllm" serve "$model" --vua-path "$directory" --port 8200 \
    --kv-transfer-config '{"kv_role": "kv_both"}' "$@"
named proxy "${PYTHON:-python3}" "$here/proxy.py" --port 8000 \
    --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200
wait
