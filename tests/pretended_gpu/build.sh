#!/usr/bin/env bash
# build.sh [PYTHON]: builds the pretended CUDA libraries into build/, for the torch that PYTHON imports. Takes seconds.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
build=$here/build
site=$("${1:-python}" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
mkdir -p "$build"

cuda_headers=$(find "$site"/nvidia/cu13/include -maxdepth 0 2>/dev/null) || {
    echo "build.sh: no CUDA 13 headers in $site/nvidia: is torch there a build for CUDA 13 (torch.version.cuda)?" >&2
    exit 1
}

# Every function of the stood-in libraries that one of these calls,
called_by=("$site"/torch/lib/lib{c10_cuda,torch_cuda,torch_python,caffe2_nvrtc}.so)
if [ -f "$site/bitsandbytes/libbitsandbytes_cuda130.so" ]; then
    called_by+=("$site/bitsandbytes/libbitsandbytes_cuda130.so")
fi
{
    for library in "${called_by[@]}"; do nm -D --undefined-only "$library"; done | awk '{print $2}' | sed 's/@.*//' |
        grep -E '^(cuda[A-Z]|__cuda|cu[A-Z]|cublas)' | grep -vE '^(cuFile|cudnn|cublasLtGetVersion)'
    # and what Triton's launcher, which is compiled at run time, calls
    grep -ohE '\bcu[A-Z][A-Za-z0-9]+\(' "$site/triton/backends/nvidia/driver.c" | tr -d '(' |
        sed -E 's/^(cuCtxPushCurrent|cuCtxPopCurrent|cuDeviceTotalMem|cuGetProcAddress|cuMemGetAddressRange)$/\1_v2/'
} | sort -u > "$build/called.txt"
# and the source does not define.
grep '^API' "$here/pretended_cuda.cpp" |
    grep -oE '\b(cuda[A-Z][A-Za-z0-9_]*|__cuda[A-Za-z]*|cu[A-Z][A-Za-z0-9_]*|cublas[A-Za-z0-9_]*)\(' | tr -d '(' |
    sort -u > "$build/defined.txt"
comm -23 "$build/called.txt" "$build/defined.txt" |
    sed -E 's/^(cublas(Set|Destroy|.*SetAttribute).*)$/SETS(\1)/; t; s/^(cublas.*)$/LAUNCHES(\1)/; t; s/^(.*)$/UNEXPECTED(\1)/' > "$build/other_functions.inc"

g++ -O1 -std=c++20 -shared -fPIC -w -I"$cuda_headers" -I"$site/triton/backends/nvidia/include" -I"$build" \
    -Wl,-soname,libcuda.so.1 -o "$build/libcuda.so.1.new" "$here/pretended_cuda.cpp" -ldl
mv "$build/libcuda.so.1.new" "$build/libcuda.so.1" # who runs with the old one keeps it
ln -sf libcuda.so.1 "$build/libcuda.so"
ln -sf libcuda.so.1 "$build/libnvidia-ml.so.1"
echo "built $build/libcuda.so.1: $(wc -l < "$build/called.txt") functions are called," \
    "$(wc -l < "$build/other_functions.inc") of them do nothing"
