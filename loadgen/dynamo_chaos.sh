#!/usr/bin/env bash
# The faults of `mesh chaos` against NVIDIA Dynamo: its frontend and two simulated workers, with
# migration switched on, under the load and the judgement of loadgen.peers_chaos.
# Usage: dynamo_chaos.sh VENV MODEL_DIR [--count N and other flags of loadgen.peers_chaos]
#   VENV       a virtual environment that has ai-dynamo and ai-dynamo-runtime
#   MODEL_DIR  a model folder with its tokenizer
set -euo pipefail
if [[ $# -lt 2 || ! -x $1/bin/python || ! -d $2 ]]; then
  sed -n '2,6s/^# \?//p' "$0" >&2
  exit 2
fi
venv=$1 model=$2 port=${PORT:-8100} mesh=${PYTHON:-python}
shift 2
state=$(mktemp -d)
export HF_HUB_OFFLINE=1 DYN_FILE_KV=$state/kv
mkdir "$DYN_FILE_KV"
plane=(--discovery-backend file --request-plane tcp --event-plane zmq)
pids=()
finish() {
  kill "${pids[@]}" 2>/dev/null || true
  wait 2>/dev/null || true
  rm -rf "$state"
}
trap finish EXIT

start() { # NAME MODULE FLAGS…
  "$venv/bin/python" -m "$2" "${@:3}" "${plane[@]}" >"$state/$1.log" 2>&1 &
  pids+=("$!")
}
for worker in worker-1 worker-2; do
  start "$worker" dynamo.mocker --model-path "$model" --model-name peer --num-workers 1 \
    --speedup-ratio "${SPEEDUP:-1}"
done
start frontend dynamo.frontend --http-host 127.0.0.1 --http-port "$port" --migration-limit 3
for _ in $(seq 300); do
  if curl -fs "http://127.0.0.1:$port/v1/models" 2>/dev/null | grep -q '"peer"'; then break; fi
  kill -0 "${pids[@]}" || { tail -n 5 "$state"/*.log >&2; exit 1; }
  sleep 0.2
done
"$mesh" -m loadgen.peers_chaos --url "http://127.0.0.1:$port" --model peer --restart \
  --pid "worker=${pids[0]}" --pid "frontend=${pids[2]}" --verb kill --verb freeze "$@"
