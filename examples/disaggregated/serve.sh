#!/bin/sh
# One prefill server, one decode server, and the proxy in front of them, on one machine.
#
#     examples/disaggregated/serve.sh MODEL [DIRECTORY] [vllm serve options ...]
#
# The directory is $VUA_PATH, or else ./vua_cache, where none is given. Each line of output begins
# with the program that wrote it. Ctrl-C or SIGTERM ends all three.
set -eu
: "${1:?usage: serve.sh MODEL [DIRECTORY] [vllm serve options ...]}"
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

named prefill "$here/../serve-vllm.sh" "$@" --port 8100
named decode "$here/../serve-vllm.sh" "$@" --port 8200
named proxy "${PYTHON:-python3}" "$here/proxy.py" --port 8000 \
    --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200
wait
