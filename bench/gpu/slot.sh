#!/usr/bin/env bash
# Run stages on a GPU machine without network, from the root of the repository:
#
#   bench/gpu/slot.sh FOLDER STAGE...     FOLDER has the parcels of pack.sh
#
# Stages: check, ordering, weights, smoke, proof, speed, peer. Each has its own time limit, writes one JSON into
# $OUT at once, and adds to $OUT/log.txt; a stage that fails does not stop those after it. What was unpacked stays
# under $ROOT, so that later calls on the same machine go on at once. TRY=1 runs tiny shapes on a CPU; MODES are those that
# `smoke` tries, all unless set.
set -u
parcels=$(cd "${1:?the folder with the parcels}" && pwd)
shift
here=$(cd "$(dirname "$0")" && pwd)
root=${ROOT:-/tmp/baton-gpu}
OUT=${OUT:-$root/out}
python=${PYTHON:-python3}
logs=$root/logs
mkdir -p "$OUT" "$logs" "$root/site"
export PYTHONPATH=$PWD/app:$PWD/connectors:$PWD/plugins${SITE-:$root/site} PYTHONUNBUFFERED=1
export VLLM_CACHE_ROOT=$root/cache TRITON_CACHE_DIR=$root/triton TORCHINDUCTOR_CACHE_DIR=$root/inductor
export VLLM_HOST_IP=127.0.0.1 GLOO_SOCKET_IFNAME=lo NCCL_SOCKET_IFNAME=lo # there is no other network
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 VLLM_LOGGING_LEVEL=INFO
export VLLM_USE_FLASHINFER_SAMPLER=0 # FlashInfer is not among the parcels
began=$(date +%s)
device=cuda small=1b large=8b limits=() large_limits=(--kv-gib 24 --longest 32768)
if [ -n "${TRY:-}" ]; then
  device=cpu small=tiny large=tiny limits=(--kv-gib 0.5 --longest 2048)
  large_limits=(--kv-gib 0.5 --longest 1200 --lengths 300 600 --rounds 2 --pause 0.3)
fi

unpack() { # PARCEL
  test -e "$root/$1.done" || {
    "$python" -c 'import sys, tarfile; tarfile.open(sys.argv[1], "r:xz").extractall(sys.argv[2], filter="tar")' \
      "$parcels/$1.tar.xz" "$root/site" && touch "$root/$1.done"
  }
}
if [ -n "${SITE-:}" ]; then
  for parcel in wheels vllm kernels; do unpack "$parcel" & done
  wait
fi
memory=/dev/shm # in memory, unless there is little
room=$(df --output=avail -B1G /dev/shm 2>/dev/null | tail -1)
[ "${room:-0}" -ge 44 ] || [ -n "${TRY:-}" ] || memory=$root
models=$memory/baton-gpu-models
mkdir -p "$models"
echo "unpacked in $(($(date +%s) - began)) s; /dev/shm has ${room:-no} GiB; models in $models"

check='
import platform, shutil, sys, torch
print(platform.python_version(), torch.__version__, shutil.which("gcc"), shutil.which("nvcc"))
if torch.cuda.is_available():
    print(torch.cuda.get_device_name(0), [round(size / 2**30, 1) for size in torch.cuda.mem_get_info()], "GiB free, in all")
import transformers, triton, vllm
print("transformers", transformers.__version__, "triton", triton.__version__, "vllm", vllm.__version__)
import vllm._C_stable_libtorch
from vllm.vllm_flash_attn import flash_attn_interface as attention
print("FA3", attention.FA3_AVAILABLE, attention.FA3_UNAVAILABLE_REASON)
x = torch.randn(4, 64, device="cuda", dtype=torch.bfloat16)
out, weight = torch.empty_like(x), torch.ones(64, device="cuda", dtype=torch.bfloat16)
torch.ops._C.rms_norm(out, x, weight, 1e-5)
print("rms_norm is off by", (out - torch.nn.functional.rms_norm(x, (64,), weight, 1e-5)).abs().max().item())
'
run() { # NAME SECONDS COMMAND...
  local name=$1 seconds=$2 from=$(date +%s)
  shift 2
  echo "=== $name"
  timeout -k 5 "$seconds" "$@" >"$logs/$name.log" 2>&1
  local code=$?
  grep -v -e INFO -e '^lengths ' -e '^first_tokens ' -e '^beside ' "$logs/$name.log" | cut -c1-600 | tail -n "${TAIL:-25}"
  { echo "=== $name: $code"; grep -v 'rebuild\|^$' "$logs/$name.log" | cut -c1-500 | tail -n 400; } >>"$OUT/log.txt"
  echo "=== $name ended with $code after $(($(date +%s) - from)) s"
}
working() { "$python" -c 'import json, sys; print(*json.load(open(sys.argv[1]))["works"])' "$root/smoke.json" 2>/dev/null; }
best() { # the first mode that works, of those named
  local works=" $(working) "
  for mode in "$@"; do case $works in *" $mode "*) echo "$mode"; return ;; esac; done
  echo "${MODE:-eager}"
}

for stage in "$@"; do
  case $stage in
    check) # the machine, and whether vLLM's kernels load beside this torch
      run check 90 "$python" -c "$check"
      ;;
    ordering) run ordering "${SECONDS_ORDERING:-150}" "$python" "$here/ordering.py" --device $device --folder "$memory" \
      --json "$OUT/ordering.json" ;;
    weights) run weights 90 "$python" "$here/engine_proof.py" weights "$models" $small $large --device $device --json "$OUT/weights.json" ;;
    smoke)
      run smoke 130 "$python" "$here/engine_proof.py" smoke "$models/$small" --device $device --logs "$logs" --folder "$memory" \
        --json "$root/smoke.json" --kv-gib 1 --seconds "${SECONDS_SMOKE:-90}" ${MODES:+--modes $MODES} ${TRY:+--modes eager}
      cp "$root/smoke.json" "$OUT/" 2>/dev/null
      for log in "$logs"/smoke-*.log; do { echo "=== $log"; cut -c1-400 "$log" | tail -n 150; } >>"$OUT/log.txt"; done
      ;;
    proof) # with graphs of whole steps, without, and as vLLM comes, side by side
      modes=$(printf '%s\n' "$(best graphs graphs-v1)" "$(best eager stub)" "$(best compiled eager stub)" | sort -u)
      for mode in $modes; do
        run "proof-$mode" "${SECONDS_PROOF:-280}" "$python" "$here/engine_proof.py" proof "$models/$small" --device $device --mode "$mode" --folder "$memory" \
          --json "$OUT/proof-$mode.json" "${limits[@]}" &
      done
      wait
      ;;
    speed | peer)
      run "$stage" "${SECONDS_SPEED:-200}" "$python" "$here/engine_proof.py" "$stage" "$models/$large" --device $device --folder "$memory" \
        --mode "$(best graphs graphs-v1 compiled eager stub)" --json "$OUT/$stage.json" "${large_limits[@]}"
      ;;
    *) echo "no stage $stage" ;;
  esac
done
echo "all in $(($(date +%s) - began)) s"
