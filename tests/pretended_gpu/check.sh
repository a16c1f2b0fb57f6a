#!/usr/bin/env bash
# Run the tests on the simulated GPU in a separate environment. GPU_TESTS selects them by marks. PRETENDED_GPU_ENV names the
# environment; one that has all packages is used unchanged. If the environment cannot be created, print the reason and succeed. Fail if
# a test fails. With --install, only create the environment.
set -euo pipefail
cd "$(dirname "$0")/../.."
here=tests/pretended_gpu
environment=${PRETENDED_GPU_ENV:-.venv-pretended-gpu}
python=$environment/bin/python

skip() {
    echo "simulated GPU: SKIPPED, $1"
    exit 0
}

[ "$(uname -sm)" = "Linux x86_64" ] || skip "it needs Linux on x86_64, and this is $(uname -sm)"
for tool in g++ nm; do
    command -v $tool > /dev/null || skip "it needs $tool, which is not on the PATH"
done
if ! "$python" -c 'import torch, bitsandbytes, torchao, transformers, peft, pytest, xdist, hypothesis' 2> /dev/null; then
    free_gb=$(($(df -Pk . | awk 'NR == 2 {print $4}') / 1000000))
    [ "$free_gb" -ge 8 ] || skip "its environment needs 8 GB of disk, and $free_gb GB are free here"
    torch=$(sed -n 's/^torch==//p' constraints.txt)
    echo "simulated GPU: installing torch $torch for CUDA into $environment: about 2.6 GB to download, 5 GB of disk"
    pip() { "$python" -m pip --disable-pip-version-check install --quiet --no-cache-dir "$@"; }
    # `===`: with `==`, pip would prefer a CPU-only build if the index has one.
    "${PYTHON:-python3}" -m venv "$environment" && pip "torch===$torch" && pip -c constraints.txt -e '.[dev]' ||
        skip "the packages could not be installed (above is why)"
fi
cuda=$("$python" -c 'import torch; print(torch.version.cuda)')
[ "${cuda%%.*}" = 13 ] || skip "it replaces CUDA 13, and the torch in $environment is built for CUDA $cuda"
[ "${1:-}" != --install ] || exit 0

$here/build.sh "$python"
export PYTHONPATH=$PWD
echo "simulated GPU: the tests marked gpu, on an H100"
PRETENDED_GPU=H100 $here/run.sh "$python" -m pytest -m "${GPU_TESTS:-gpu}" ${PYTEST_ARGS:-} tests
for card in A100 T4; do
    echo "simulated GPU: what older cards do differently, on a $card"
    PRETENDED_GPU=$card $here/run.sh "$python" -m pytest -m "${GPU_TESTS:-gpu}" ${PYTEST_ARGS:-} $here
done
