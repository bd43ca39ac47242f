#!/usr/bin/env bash
# Pack what a GPU machine without network lacks: bench/gpu/pack.sh FOLDER
#
# For a machine with an H100 or H200, Python 3.12 and torch 2.11 for CUDA 13. Writes three parcels into FOLDER:
#   wheels.tar.xz   the packages of wheels.txt, unpacked
#   vllm.tar.xz     vLLM's Python files
#   kernels.tar.xz  vLLM's own compiled kernels, from its CUDA wheel, those of other cards taken out
# PYTHON names a Python 3.12 with pip (default: python3.12); WORK a folder that keeps the downloads.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
target=$(mkdir -p "${1:?the folder to write to}" && cd "$1" && pwd)
python=${PYTHON:-python3.12}
work=${WORK:-$(mktemp -d)}
vllm=0.32.0
most_mib=42 # with the tracked files 64

platforms=()
for libc in 5 12 17 24 25 26 27 28 29 30 31 32 33 34 35 36 37 38 39; do
  platforms+=(--platform "manylinux_2_${libc}_x86_64")
done
download() { # FOLDER ARGUMENT...
  local folder=$1
  shift
  "$python" -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
    "${platforms[@]}" --platform manylinux2014_x86_64 --platform manylinux1_x86_64 --dest "$folder" "$@"
}
pack() { # NAME FOLDER: reproducible, and in blocks, which several threads unpack
  tar --sort=name --mtime=@0 --owner=0 --group=0 -cf - -C "$2" . | xz -9 -T2 --block-size=64MiB >"$target/$1.tar.xz"
}

download "$work/wheels" --requirement "$here/wheels.txt"
download "$work/vllm" "vllm==$vllm"
rm -rf "$work/site" "$work/whole" "$work/code" "$work/kernels"
mkdir -p "$work/site" "$work/code" "$work/kernels/vllm/vllm_flash_attn"
for wheel in "$work"/wheels/*.whl; do unzip -q -o "$wheel" -d "$work/site"; done
rm -rf "$work/site/mistral_common/data" "$work/site/tvm_ffi/3rdparty"
pack wheels "$work/site"

unzip -q -o "$work"/vllm/*.whl -d "$work/whole"
(cd "$work/whole" && find . -type f \( -name '*.py' -o -path '*dist-info/*' -o -name '*.json' -o -name '*.jinja' \) \
  ! -path '*/third_party/fmha*' ! -path '*/deep_gemm/include/*' ! -path '*/configs/*.json' ! -name RECORD -print0 |
  tar -cf - --null -T -) | tar -xf - -C "$work/code"
pack vllm "$work/code"

kernels=$work/kernels/vllm
for name in spinloop fs_io_C cumem_allocator; do cp "$work/whole/vllm/$name.abi3.so" "$kernels"; done
"$python" "$here/one_card.py" "$work/whole/vllm/_C_stable_libtorch.abi3.so" "$kernels/_C_stable_libtorch.abi3.so"
fa3=vllm_flash_attn/_vllm_fa3_C.abi3.so # heads of 64 and 128 numbers in bfloat16 are what the models here have
"$python" "$here/one_card.py" "$work/whole/vllm/$fa3" "$kernels/$fa3" \
  'flash_fwd_combine|flash_prepare_scheduler|flash_fwd_hdim(64|128)_bf16_\w+'
pack kernels "$work/kernels"

for parcel in wheels vllm kernels; do # what the libraries need that no library of torch's has is told by slot.sh
  xz --test "$target/$parcel.tar.xz"
done
size=$(du --total --bytes "$target"/*.tar.xz | tail -1 | cut -f1)
ls -l "$target"/*.tar.xz
echo "$((size / 1048576)) MiB of $most_mib"
test "$size" -le "$((most_mib * 1048576))"
