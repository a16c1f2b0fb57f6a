#!/usr/bin/env bash
# run.sh COMMAND...: runs it with the simulated GPU. Below it, pytest computes the values of kernels as well
# (PRETENDED_GPU_VALUES=0: it does not).
here=$(cd "$(dirname "$0")" && pwd)
if [ ! -f "$here/build/libcuda.so.1" ]; then
    echo "run.sh: nothing is built yet: run $here/build.sh PYTHON first" >&2
    exit 1
fi
export PRETENDED_GPU=${PRETENDED_GPU:-H100}
export LD_PRELOAD=$here/build/libcuda.so.1
export LD_LIBRARY_PATH=$here/build${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export TRITON_LIBCUDA_PATH=$here/build
export TORCH_CUDNN_SDPA_ENABLED=0 # of cuDNN nothing is stood in for
export PYTEST_ADDOPTS="-p tests.pretended_gpu.plugin ${PYTEST_ADDOPTS:-}"
exec "$@"
