"""The tracer's counts compared with bytes computed by hand."""

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from lean_ft.memory.host_memory import MMAP_THRESHOLD_BYTES, TRIM_THRESHOLD_BYTES
from lean_ft.models.attention.document_attention import document_attention
from lean_ft.models.float8_product import float8_forward
from lean_ft.models.frozen_weight import as_frozen
from lean_ft.models.grouped_matmul import grouped_matmul
from lean_ft.plan.devices import CPU, DEVICES, Kernel, find_device
from lean_ft.plan.fusion import fusing_backend
from lean_ft.plan.memory import FREED
from lean_ft.plan.time import short_name
from lean_ft.plan.trace import Trace

KIB = 1024


CARD = DEVICES["A100 80GB"]


def traced(function, device=CARD) -> Trace:
    trace = Trace(device)
    with FakeTensorMode(), trace:
        function(trace)
    return trace


def kibibytes(count: int) -> torch.Tensor:
    return torch.empty(count * KIB, dtype=torch.uint8)


def test_the_peak_is_what_lived_at_once():
    def work(trace):
        first = kibibytes(100)
        second = kibibytes(50)
        del first
        third = kibibytes(70)  # 120: below the first two together
        del second, third

    trace = traced(work)
    assert trace.memory.peak.total_bytes == 150 * KIB
    assert trace.memory.live_bytes == 0


def test_views_and_in_place_writes_take_nothing():
    def work(trace):
        whole = kibibytes(10)
        parts = [whole[:KIB], whole.view(-1, 2), whole.detach()]
        whole.add_(1)
        assert trace.memory.live_bytes == 10 * KIB
        del whole
        assert trace.memory.live_bytes == 10 * KIB, "a view keeps the storage"
        del parts
        assert trace.memory.live_bytes == 0
        resized = kibibytes(0)
        resized.resize_(30 * KIB)
        assert trace.memory.live_bytes == 30 * KIB

    traced(work)


def test_a_cpus_tensor_counts_as_it_is_filled():
    size = 16 * 2**20

    def work(trace):
        tensor = torch.empty(4, size // 4, dtype=torch.uint8)
        assert trace.memory.live_bytes == 0
        tensor[0].fill_(1)
        assert trace.memory.live_bytes == size // 4
        torch.mul(torch.ones(1, dtype=torch.uint8), 2, out=tensor[1][:1])
        assert trace.memory.live_bytes == size // 4 + 1
        tensor.zero_()
        assert trace.memory.live_bytes == size, "no more than there is"
        del tensor
        assert trace.memory.live_bytes == 0

    traced(work, CPU)


def test_a_cpus_heap_keeps_what_was_freed_up_to_its_trim_threshold():
    small, large = MMAP_THRESHOLD_BYTES // 2, 16 * MMAP_THRESHOLD_BYTES

    def work(blocks):
        def run(trace):
            kept = [torch.ones(small, dtype=torch.uint8) for _ in range(blocks)]
            kept.clear()
            kept.append(torch.ones(large, dtype=torch.uint8))

        return run

    for blocks in 2, 20:
        freed = min(blocks * small, TRIM_THRESHOLD_BYTES)
        assert traced(work(blocks), CPU).memory.peak.bytes_by_label == {"other": large, FREED: freed}
    assert traced(work(2)).memory.peak.bytes_by_label == {"other": large}, "a GPU's allocator uses it again"


def test_labels_sum_up_to_the_peak_and_say_what_it_is_of():
    def work(trace):
        with trace.memory.labelled("weights"):
            kept = kibibytes(8)
        with trace.memory.labelled("workspace", "the middle of it"):
            first, second = kibibytes(2), kibibytes(3)
            trace.memory.relabel(second, "gradients")
            third = kibibytes(1)
        del kept, first, second, third

    peak = traced(work).memory.peak
    assert peak.bytes_by_label == {"weights": 8 * KIB, "workspace": 3 * KIB, "gradients": 3 * KIB}
    assert peak.where == "the middle of it"


@pytest.mark.parametrize("recompute", [False, True])
def test_what_autograd_saves_counts_until_backward_frees_it(recompute: bool):
    """sigmoid keeps its result; checkpointed, only the input is kept."""
    size = 64 * KIB

    def work(trace):
        x = torch.empty(size // 4, requires_grad=True)

        def layer(y):
            return y.sigmoid().sigmoid().sigmoid()

        y = checkpoint(layer, x, use_reentrant=False) if recompute else layer(x)
        assert trace.memory.live_bytes == (2 if recompute else 4) * size
        y.sum().backward()
        del y
        assert trace.memory.live_bytes == 2 * size  # x and its gradient

    traced(work)


def test_arithmetic_takes_its_time():
    """A square matrix product is limited by arithmetic and a copy by memory bandwidth, at the shares of the device's
    rates."""
    n = 8192

    def product(trace):
        a = torch.empty(n, n, dtype=torch.bfloat16)
        before = trace.time.spent.seconds
        a @ a
        own = 2 * n**3 / (CARD.flops_16bit * CARD.product_share)
        assert own < trace.time.spent.seconds - before < 1.1 * own + CARD.fixed_seconds
        before = trace.time.spent.seconds
        a.clone()
        traffic = 4 * n**2 / (CARD.bytes_per_second * CARD.memory_share)
        assert trace.time.spent.seconds - before == pytest.approx(traffic + CARD.fixed_seconds)
        assert trace.time.spent.launch_seconds == pytest.approx(2 * CARD.launch_seconds)

    traced(product)


def clock_after(trace: Trace, count: int) -> float:
    """The device's clock after so many short operations."""
    for _ in range(count):
        torch.empty(8).add_(1)
    return trace.time.spent.clock


def test_the_device_waits_where_the_host_is_late():
    """Short kernels take the host's time. After a long kernel the host is ahead, until it waits for a value."""

    def work(trace):
        short = CARD.kernel_seconds(Kernel(0.0, 68.0))
        assert short < CARD.launch_seconds / 2
        assert clock_after(trace, 10) == pytest.approx(10 * CARD.launch_seconds + short)
        x = torch.empty(2**30, dtype=torch.uint8)
        before = trace.time.spent.clock
        x.add_(1)
        added, long = trace.time.spent.clock - before, CARD.kernel_seconds(Kernel(0.0, 2.0 * 2**30))
        assert added == pytest.approx(CARD.launch_seconds - short + long)
        assert clock_after(trace, 10) == pytest.approx(before + added + 10 * short)
        x[0].item()
        before = trace.time.spent.clock
        assert clock_after(trace, 10) == pytest.approx(before + 10 * CARD.launch_seconds + short)

    traced(work)


def test_the_device_waits_for_copies_from_the_host():
    """A copy starts after the computation so far. Computation that does not wait for the copy runs beside it."""

    def work(trace):
        start = clock_after(trace, 10)
        end = trace.time.travel(2**30)
        assert end == pytest.approx(start + 2**30 / CARD.host_bytes_per_second)
        assert clock_after(trace, 10) < end
        trace.time.wait_until(end)
        assert clock_after(trace, 10) > end

    traced(work)


def test_experts_with_few_rows_each_take_longer():
    """The last tile of each group's rows is half empty on average."""

    def time_of(num_groups: int) -> float:
        def work(trace):
            rows, ends = torch.empty(32768, 4096, dtype=torch.bfloat16), torch.empty(num_groups, dtype=torch.int32)
            grouped_matmul(rows, torch.empty(num_groups, 4096, 4096, dtype=torch.bfloat16), ends)

        ledger = traced(work, DEVICES["H100"]).time.spent.ledger
        return sum(own.seconds for (_, name), own in ledger.items() if name == "lean_ft.grouped_matmul")

    assert time_of(128) / time_of(8) == pytest.approx((256 + 64) / (4096 + 64) * 16, rel=0.05)


def test_attention_of_short_documents_and_windows_is_less_efficient():
    """Per product of a query with a key that it sees. Sliding windows take the time of what they see."""

    def time_of(length: int, window: int | None = None) -> float:
        def work(trace):
            query = torch.empty(8192, 16, 128, dtype=torch.bfloat16)
            bounds = torch.empty(8192 // length + 1, dtype=torch.int32)
            trace.time.longest_document = length
            document_attention(query, query, query, bounds, None, None, window, None, 8192)

        ledger = traced(work, DEVICES["H100"]).time.spent.ledger
        return sum(own.seconds for (_, name), own in ledger.items() if name == "lean_ft.document_attention")

    times = {length: time_of(length) for length in (8192, 4096, 2048, 1024)}
    pairs = [times[length] / times[length // 2] for length in (8192, 4096, 2048)]
    assert 2 > pairs[0] > pairs[1] > pairs[2] > 1
    assert times[1024] < time_of(8192, 1024) < times[2048]


@pytest.mark.parametrize(("card", "times"), [("H100", 2), ("L4", 2), ("A100 80GB", 1)])
def test_a_frozen_weight_multiplies_in_float8_at_twice_the_rate(card, times):
    """Only on cards with float8, and only the product: rounding is memory traffic."""

    def work(trace):
        x, weight = torch.empty(8192, 4096, dtype=torch.bfloat16), torch.empty(8192, 4096, dtype=torch.bfloat16)
        float8_forward(x, as_frozen(weight, in_float8=True), None)
        x @ weight.T

    ledger = {name: launches for (_, name), launches in traced(work, DEVICES[card]).time.spent.ledger.items()}
    in_float8, plain = ledger["lean_ft.sum_of_float8_products"], ledger["mm"]
    assert in_float8.flops == plain.flops and in_float8.number == plain.number == 1
    assert plain.seconds / in_float8.seconds == pytest.approx(times, rel=0.01)


@pytest.mark.parametrize("card", DEVICES.values(), ids=DEVICES)
def test_larger_kernels_take_longer_and_come_closer_to_the_published_rate(card):
    """Of square products, of copies, and of attention. No kernel is faster than the published rate."""
    products = [Kernel(2.0 * n**3, 6.0 * n**2, shape=(n, n, n)) for n in (128, 512, 2048, 8192)]
    copies = [Kernel(0.0, float(n)) for n in (10**4, 10**6, 10**8)]
    attention = [Kernel(float(n), 1.0, is_attention=True) for n in (10**9, 10**11, 10**13)]
    for kernels in (products, copies, attention):
        seconds = [card.kernel_seconds(kernel) for kernel in kernels]
        shares = [card.limit_seconds(kernel) / own for kernel, own in zip(kernels, seconds, strict=True)]
        assert seconds == sorted(seconds) and shares == sorted(shares)
        assert shares[0] > 0 and 0.25 < shares[-1] < 1
    wide = replace(card, bytes_per_second=2 * card.bytes_per_second)
    assert wide.kernel_seconds(copies[-1]) < card.kernel_seconds(copies[-1])


@pytest.fixture
def new_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_a_compiled_chain_stores_only_what_leaves_it(new_compiler):
    """Eager, each step of the chain makes a tensor; fused, the intermediates stay in registers."""
    size = 256 * KIB

    def chain(x):
        return (x * 2 + 1).exp() - x

    def work(compiled):
        def run(trace):
            function = torch.compile(chain, backend=fusing_backend(trace)) if compiled else chain
            x = torch.empty(size // 4)
            with torch.no_grad():
                result = function(x)
            del result

        return run

    eager, fused = traced(work(False)), traced(work(True))
    assert fused.memory.peak.total_bytes == 2 * size
    assert eager.memory.peak.total_bytes == 3 * size


def test_a_compiled_product_stores_what_it_reads(new_compiler):
    size = 4 * 64 * 64

    def work(trace):
        function = torch.compile(lambda x: (x + 1) @ (x * 2), backend=fusing_backend(trace))
        x = torch.empty(64, 64)
        with torch.no_grad():
            function(x)

    assert traced(work).memory.peak.total_bytes == 4 * size  # x, both factors and the product


@pytest.mark.first(1)
@pytest.mark.parametrize(("device", "squares"), [(CARD, 3), (CPU, 2)], ids=["card", "cpu"])
def test_a_card_makes_values_of_one_size_from_the_same_memory_at_once(new_compiler, device, squares):
    """Each value is read by its own product and could be freed before the next, but one kernel writes both."""
    size = 4 * 256 * 256

    def work(trace):
        function = torch.compile(lambda x, v: ((x * 2) @ v, (x + 1) @ v), backend=fusing_backend(trace))
        x, v = torch.ones(256, 256), torch.ones(256, 1)
        with torch.no_grad():
            function(x, v)

    peak = traced(work, device).memory.peak
    total = peak.total_bytes - peak.bytes_by_label.get(FREED, 0)
    assert squares * size <= total < (squares + 0.5) * size


def test_what_a_card_reserves_is_its_allocators():
    def work(trace):
        kept = [torch.empty(30 * 2**20, dtype=torch.uint8), kibibytes(1)]
        del kept

    trace = traced(work)
    assert trace.memory.peak.total_bytes == 30 * 2**20 + KIB
    assert trace.memory.reserved_bytes == 42 * 2**20
    assert traced(work, CPU).memory.reserved_bytes == traced(work, CPU).memory.peak.total_bytes


def test_blocks_of_another_stream_lie_apart():
    def work(trace):
        with trace.memory.on_stream("copying"):
            kibibytes(30 * KIB)  # freed again
        kibibytes(30 * KIB)
        assert trace.memory.reserved_bytes == 2 * 40 * 2**20, "pages of 20 MiB for each of the two"

    traced(work)


def test_what_the_compiler_tunes_with_is_reserved_and_no_part_of_the_peak():
    def work(trace):
        trace.memory.tune()
        assert trace.memory.reserved_bytes == 40 * 2**20 and trace.memory.peak.total_bytes == 0

    traced(work)


@pytest.mark.parametrize(("copied", "pages"), [([10], 3), ([35], 4), ([20, 20], 4), ([41], 2)])
def test_tensors_that_a_tuned_kernel_overwrites_are_copied_within_the_peak_so_far(copied, pages):
    """Of the kernel's two versions, the first has room for copies of 30 MiB, the peak so far; the second for 40 MiB
    more than the first copied, since 40 MiB cleared the cache."""

    def work(trace):
        kibibytes(30 * KIB)  # freed again
        trace.memory.tune([mebibytes * 2**20 for mebibytes in copied])
        assert trace.memory.reserved_bytes == pages * 20 * 2**20

    traced(work)


@pytest.mark.parametrize(("heads", "softcap", "expanded"), [(2, None, 0), (6, None, 2), (6, 30.0, None)])
def test_flash_attentions_backward_makes_float32_sums_and_a_key_for_each_query_head(heads, softcap, expanded):
    """Two documents, each padded by up to 128 tokens, and heads of 40 features padded to 64. With a soft cap there is
    no flash kernel, and the other kernel makes a number for each query and head."""

    def work(trace):
        query, grad, out = (torch.empty(256, heads, 40, dtype=torch.bfloat16) for _ in range(3))
        key, value = (torch.empty(256, 2, 40, dtype=torch.bfloat16) for _ in range(2))
        bounds = torch.empty(3, dtype=torch.int32)
        backward = torch.ops.lean_ft.document_attention_backward
        rules = None, None, None, softcap, 128, None, None, 0, None
        grads = backward(grad, out, query, key, value, bounds, *rules, torch.empty(0))
        inside = trace.memory.peak.total_bytes - trace.memory.live_bytes
        if expanded is None:
            assert inside == 4 * 256 * heads
        else:
            assert inside == 4 * (256 + 2 * 128) * heads * 64 + expanded * query.nbytes
        del grads

    traced(work)


def test_devices_are_found_in_any_spelling():
    for wanted, name in {
        "nvidia GeForce rtx4090": "RTX 4090",
        "a6000": "RTX A6000",  # only one card's name ends like this
        "M3 Max": "Apple M3 Max",
        **{name: name for name in ("V100", "B200", "MI300X", "Apple M4 Max")},
        # As torch.cuda.get_device_name, nvidia-smi -L, rocm-smi and clouds print them.
        "NVIDIA H100 80GB HBM3": "H100",
        "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-7c1d)": "H100",
        "NVIDIA H100 PCIe": "H100 PCIe",
        "NVIDIA A100-SXM4-80GB": "A100 80GB",
        "NVIDIA A100-PCIE-40GB": "A100 40GB",
        "NVIDIA A100 80GB PCIe": "A100 80GB",
        "Tesla V100-SXM2-32GB": "V100",
        "Tesla V100-SXM2-16GB": "V100 16GB",
        "nvidia-tesla-t4": "T4",
        "nvidia-h200-141gb": "H200",
        "NVIDIA GeForce RTX 4060 Ti": "RTX 4060 Ti",
        "AMD Instinct MI300X VF": "MI300X",
        "rtx 4090 24GB": "RTX 4090",
    }.items():
        assert find_device(wanted) is DEVICES[name]
    with pytest.raises(ValueError, match=r"unknown device 'RTX 409'.*RTX 4090"):
        find_device("RTX 409")
    others = ("NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA A100-SXM4-40GB MIG 3g.20gb", "NVIDIA GeForce RTX 3060 8GB")
    for no_single_one in ("80", "", "A100", *others):
        with pytest.raises(ValueError, match="unknown device"):
            find_device(no_single_one)


def test_launches_are_listed_under_the_module_that_makes_them(new_compiler):
    """Forward and backward of two layers, eager and compiled: three products each. The kernels' sums are those of the
    step."""

    def work(compiled):
        def run(trace):
            model = torch.nn.Sequential(
                *(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()) for _ in range(2))
            )
            trace.time.module_names = {id(module): f"layers.{name}" for name, module in model.named_modules()}
            if compiled:
                model = torch.compile(model, backend=fusing_backend(trace))
            before = trace.time.spent.copy()
            model(torch.empty(64, 64, requires_grad=True)).sum().backward()
            trace.time.spent.again(before, 2)

        return run

    for compiled in (False, True):
        spent = traced(work(compiled)).time.spent
        products = {place: own for place, own in spent.ledger.items() if place[1].endswith(("mm",))}
        assert sum(own.number for own in products.values()) == 3 * 2 * 3
        assert sum(own.flops for own in products.values()) == 3 * 2 * 3 * 2 * 64**3
        if not compiled:
            assert {module for module, _ in products} == {short_name("layers.0.0")}
        assert sum(own.seconds for own in spent.ledger.values()) == pytest.approx(spent.seconds)


def test_a_modules_name_does_not_tell_the_layer():
    names = {
        "model.layers.3.mlp.up_proj": "mlp.up_proj",
        "L['self'].mlp.up_proj": "mlp.up_proj",
        "L['layer'].mlp.up_proj": "mlp.up_proj",
        "model.embed_tokens": "model.embed_tokens",
    }
    assert {name: short_name(name) for name in names} == names


def test_looking_for_the_module_keeps_no_tensor_alive():
    class Deletes(torch.nn.Module):
        def forward(self) -> None:
            first = kibibytes(100)
            first.add_(1)
            del first
            kibibytes(100).add_(1)

    assert traced(lambda trace: Deletes()()).memory.peak.total_bytes == 100 * KIB
