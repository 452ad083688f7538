#!/usr/bin/env bash
# Checks a machine with a GPU, within ten minutes: the tests marked gpu, then steps of the engine.
#
# OUT names the folder for what is found (default: a new one), MODEL what is measured (as --model of
# mesh bench engine; default: a tiny random model, which says that it runs and little about speed),
# MESH_PYTHON the interpreter (default: .venv's, else python3). Nothing is downloaded. Without CUDA
# the tests are skipped and the engine is measured on the CPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly OUT="${OUT:-$(mktemp -d /tmp/mesh-gpu-check.XXXXXX)}"
readonly TESTS_S=300 BENCH_S=240
readonly PACKAGES="gguf hypothesis llguidance msgspec nats numpy psutil pytest pytest_asyncio
    pytest_timeout rich starlette structlog tokenizers torch transformers typer xxhash"

say() { printf 'gpu_check: %s\n' "$*" >&2; }

python="${MESH_PYTHON:-.venv/bin/python}"
[[ -n "${MESH_PYTHON:-}" || -x "$python" ]] || python=python3
mkdir -p "$OUT"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1

# shellcheck disable=SC2086 # one word per package
missing=$("$python" -c 'import sys; from importlib.util import find_spec
print(*(name for name in sys.argv[1:] if find_spec(name) is None))' $PACKAGES)
if [[ -n "$missing" ]]; then
    say "$python lacks: $missing"
    exit 2
fi

{
    "$python" -c 'import torch, transformers
print("torch", torch.__version__, "transformers", transformers.__version__)
print("cuda", torch.version.cuda, "devices", torch.cuda.device_count())
for n in range(torch.cuda.device_count()):
    print(torch.cuda.get_device_name(n), torch.cuda.get_device_capability(n))'
    command -v nvidia-smi >/dev/null && nvidia-smi || echo "no nvidia-smi"
} >"$OUT/machine.txt" 2>&1
if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    say "torch sees no CUDA device: the tests are skipped, the CPU is measured"
fi

failed=0
run() { # seconds, file, command: its output goes to the file, the end of it is shown
    local limit_s=$1 file=$2
    shift 2
    local rc=0
    timeout "$limit_s" "$@" >"$OUT/$file" 2>"$OUT/$file.log" || rc=$?
    tail -n 25 "$OUT/$file"
    if ((rc != 0)); then
        tail -n 25 "$OUT/$file.log" >&2
        say "$file: ended with $rc"
        failed=1
    fi
}

run "$TESTS_S" tests.txt "$python" -m pytest -m gpu -q -ra -p no:cacheprovider \
    tests/workers/engine/device

model="${MODEL:-}"
sizes=(--context 250 --prompt-len 512)
if [[ -z "$model" ]]; then
    model=$("$python" -c 'import sys; from pathlib import Path; from tests.tiny_models import *
print(tiny_model(Path(sys.argv[1])))' "$(mktemp -d)" 2>"$OUT/model.log")
    sizes=(--context 250 --prompt-len 256)
fi
run "$BENCH_S" bench.json "$python" -m infra.cli bench engine --json --device auto \
    --model "$model" "${sizes[@]}" --batches 1,8,32 --references ""

say "results are in $OUT"
exit "$failed"
