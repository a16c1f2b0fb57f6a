"""Failures that only happen on a GPU are recognized, or refused beforehand."""

from contextlib import suppress

import bitsandbytes.cextension
import pytest
import torch
from bitsandbytes.cextension import ErrorHandlerMockBNBNativeLibrary

from lean_ft import load_model
from lean_ft.cli.errors import is_out_of_memory
from lean_ft.memory import float8_products
from lean_ft.models.device import check_dtype
from lean_ft.peft import quantize_as_loaded
from lean_ft.system.host_link import HostLink
from lean_ft.training.process import _device_of_rank
from tests.optim.tiny_training import TinyModel, build, make_batches, same_weights, train
from tests.pretended_gpu.counters import limit_pinned_bytes

pytestmark = pytest.mark.simulated


def test_out_of_memory_is_recognized_for_device_and_pinned_memory() -> None:
    with pytest.raises(torch.OutOfMemoryError) as device:
        torch.empty(2**40, dtype=torch.uint8, device="cuda")
    limit_pinned_bytes(2**20)
    try:
        with pytest.raises(torch.AcceleratorError) as pinned:
            torch.empty(2**24, dtype=torch.uint8, pin_memory=True)
    finally:
        limit_pinned_bytes(None)
    assert is_out_of_memory(device.value) and is_out_of_memory(pinned.value)
    with pytest.raises(torch.AcceleratorError, match="CUDA error") as other:
        torch.cuda.set_device(5)
    assert not is_out_of_memory(other.value)


def test_bitsandbytes_without_its_library_is_refused_before_its_first_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = ErrorHandlerMockBNBNativeLibrary("CUDA binary not found at libbitsandbytes_cuda130.so")
    monkeypatch.setattr(bitsandbytes.cextension, "lib", missing)
    model = TinyModel().cuda()
    with pytest.raises(ValueError, match=r"optimizer.name=adamw_8bit on a GPU needs bitsandbytes.*cuda130.so"):
        build(model, {"name": "adamw_8bit"})
    build(model, {"name": "adamw_8bit", "update_clipping": True})  # does not use that kernel
    with pytest.raises(ValueError, match=r"lora.quantize=nf4 needs bitsandbytes.*cuda130.so"):
        load_model("tiny", "cuda", quantize=quantize_as_loaded("nf4"))


def test_compiling_with_dynamo_turned_off_is_not_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    models = [TinyModel().cuda(), TinyModel().cuda()]
    settings = {"name": "adamw_8bit", "update_clipping": True, "stochastic_rounding": True}
    for model, compile in zip(models, (True, False), strict=True):
        torch.manual_seed(5)
        batches = [[ids.cuda() for ids in step] for step in make_batches(3)]
        train(model, build(model, settings, compile=compile), batches, [1e-2] * 3)
    assert same_weights(*models)


def test_memory_that_cannot_be_pinned_is_reported_with_the_settings_that_need_it() -> None:
    link = HostLink(torch.device("cuda", 0))
    limit_pinned_bytes(2**20)
    try:
        with pytest.raises(RuntimeError, match=r"cannot pin 4,194,304 bytes .*optimizer.state=streamed.*ulimit -l"):
            link.send(torch.ones(2**20, device="cuda"))
    finally:
        limit_pinned_bytes(None)
        with suppress(torch.AcceleratorError):  # the next launch reports the runtime's last error
            torch.ones(1, device="cuda")


def test_each_process_has_its_own_gpu_or_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    here = torch.device("cuda", 0)
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert _device_of_rank(here) == here and torch.cuda.current_device() == 0
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(ValueError, match=r"process 1 of this machine.*there are 1.*--nproc-per-node 1"):
        _device_of_rank(here)


@pytest.mark.cards("T4", "A100")
def test_dtypes_that_an_older_card_lacks_are_refused() -> None:
    device = torch.device("cuda", 0)
    with pytest.raises(ValueError, match=r"float8.*has none \(compute capability (7\.5|8\.0); 8.9 or newer has\)"):
        float8_products(load_model("tiny", "cuda", dtype=torch.bfloat16))
    if torch.cuda.get_device_capability() < (8, 0):
        with pytest.raises(ValueError, match=r"bfloat16 needs a CUDA card of compute capability 8.0.*T4 has 7.5"):
            check_dtype("bfloat16", device)
    else:
        assert check_dtype("bfloat16", device) == []
