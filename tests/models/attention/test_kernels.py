"""The choice of attention's kernel: what runs for which layer, card and setting."""

from dataclasses import replace

import pytest
import torch

from lean_ft import load_model
from lean_ft.models.attention import kernels
from lean_ft.models.attention.kernels import any_in_blocks, describe_kernels, use_attention
from lean_ft.models.families import FAMILIES
from lean_ft.models.families.gemma import Gemma2
from lean_ft.models.new_model import empty_decoder

AMPERE, TURING = (8, 0), (7, 5)
BF16, FLOAT32 = torch.bfloat16, torch.float32
BOTH_SIDES = {"head_dim": 64, "bidirectional": True}
SINKS, CAP = {"attention_sinks": True}, {"parts": FAMILIES["gemma2"].parts, "own": Gemma2(attention_softcap=50.0)}


@pytest.mark.parametrize(
    ("facts", "dtype", "capability", "compiles", "choice", "expected"),
    [
        ({"head_dim": 64}, BF16, AMPERE, True, "auto", "flash kernel (FlashAttention 2)"),
        ({"head_dim": 64}, BF16, AMPERE, False, "auto", "flash kernel (FlashAttention 2)"),
        ({"head_dim": 64, **SINKS}, BF16, AMPERE, True, "auto",
            "flash kernel (FlashAttention 2), sinks joined afterwards"),
        ({"head_dim": 64, **SINKS}, BF16, AMPERE, False, "auto", "slow): sinks, and Triton or a C compiler is missing"),
        (BOTH_SIDES, BF16, AMPERE, False, "auto", "flash kernel (FlashAttention 2), to both sides"),
        (BOTH_SIDES | SINKS, BF16, AMPERE, True, "auto", "or queries that see later tokens"),
        (BOTH_SIDES, FLOAT32, AMPERE, True, "auto", "blocks of eager operations (slow): float32"),
        ({"head_dim": 512}, BF16, AMPERE, True, "flash2", "own Triton kernel: heads of 512 features"),
        ({"head_dim": 20}, torch.float16, (12, 0), True, "auto", "own Triton kernel: heads of 20 features"),
        ({"head_dim": 256, **CAP}, BF16, (8, 9), True, "auto", "own Triton kernel: soft cap"),
        ({"head_dim": 1024}, BF16, AMPERE, True, "auto", "blocks of eager operations (slow): heads of 1024 features"),
        ({"head_dim": 64}, FLOAT32, AMPERE, True, "auto", "blocks of eager operations (slow): float32"),
        ({"head_dim": 64}, torch.float16, TURING, True, "auto", "(slow): compute capability 7.5 is below 8.0"),
        ({"head_dim": 64}, BF16, AMPERE, True, "own", "own Triton kernel: memory.attention=own"),
        ({"head_dim": 64}, BF16, AMPERE, True, "eager", "blocks of eager operations (slow): memory.attention=eager"),
    ],
)  # fmt: skip
def test_a_layer_has_the_fastest_kernel_that_computes_it(
    facts, dtype, capability, compiles, choice, expected, monkeypatch
):
    monkeypatch.setattr(kernels, "HAS_TRITON", compiles)
    monkeypatch.setattr(kernels, "_choice", choice)
    model = empty_decoder(replace(load_model("tiny").config, **facts), dtype)
    assert describe_kernels(model, dtype, capability).endswith(expected)
    assert any_in_blocks(model, dtype, capability) == ("slow)" in expected)


def test_flash_attention_4_leaves_wide_heads_to_the_own_kernels(monkeypatch):
    monkeypatch.setattr(kernels, "_active", lambda: "FA4")
    monkeypatch.setattr(kernels, "HAS_TRITON", True)
    config = load_model("tiny").config
    for head_dim, expected in (
        (128, "flash kernel (FlashAttention 4)"),
        (256, "own Triton kernel: heads of 256 features"),
    ):
        model = empty_decoder(replace(config, head_dim=head_dim), BF16)
        assert describe_kernels(model, BF16, (10, 0)) == expected


def test_layers_of_different_kernels_are_counted(monkeypatch):
    monkeypatch.setattr(kernels, "HAS_TRITON", True)
    config = replace(load_model("tiny").config, head_dim=256)
    layers = tuple(replace(layer, kv_shape=(1, 512) if i == 1 else None) for i, layer in enumerate(config.layers))
    flash, own = "flash kernel (FlashAttention 2)", "own Triton kernel: heads of 512 features"
    counts = f"{flash} in {len(layers) - 1} layer{'s' * (len(layers) > 2)}; {own} in 1 layer"
    assert describe_kernels(empty_decoder(replace(config, layers=layers), BF16), BF16, AMPERE) == counts


@pytest.fixture
def card(monkeypatch):
    """A GPU as the choice sees it: its capability and the kernels that PyTorch offers and activates."""
    activated = []

    def set_card(capability, offered=(), installed=(), breaks=False):
        def activate(name):
            if name not in offered:
                raise ValueError(f"Unknown flash attention impl '{name}'. Available implementations: {list(offered)}")
            if name not in installed:
                raise ModuleNotFoundError(f"No module named '{MODULES[name]}'")
            if breaks:
                raise ImportError("libcudart.so.12 is missing")
            activated.append(name)

        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "the card")
        monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", activate)
        return activated

    monkeypatch.setattr(kernels, "_choice", "auto")
    return set_card


MODULES = {"FA3": "flash_attn_interface", "FA4": "flash_attn.cute.interface"}
BOTH = tuple(MODULES)
HOPPER, BLACKWELL, GPU = (9, 0), (10, 0), torch.device("cuda")


@pytest.mark.parametrize(
    ("choice", "card_facts", "activated"),
    [
        ("auto", (HOPPER, BOTH, BOTH), ["FA3"]),
        ("auto", (BLACKWELL, BOTH, BOTH), ["FA4"]),
        ("auto", (HOPPER, BOTH, ()), []),
        ("auto", (HOPPER, (), BOTH), []),
        ("auto", (AMPERE, BOTH, BOTH), []),
        ("auto", (HOPPER, BOTH, BOTH, True), []),
        ("flash2", (HOPPER, BOTH, BOTH), []),
    ],
)
def test_newer_flash_kernels_are_activated_where_pytorch_offers_them(card, choice, card_facts, activated):
    found = card(*card_facts)
    use_attention(choice, BF16, GPU)
    assert found == activated


@pytest.mark.parametrize(
    ("choice", "dtype", "card_facts", "reason"),
    [
        ("own", FLOAT32, (HOPPER,), "the kernel computes in 16 bits, and model.dtype=float32"),
        ("flash2", torch.float16, (TURING,), r"the kernel needs 8.0 \(Ampere\) or newer"),
    ],
)
def test_a_kernel_that_cannot_run_is_refused_with_the_reason(card, choice, dtype, card_facts, reason):
    card(*card_facts)
    with pytest.raises(
        ValueError, match=rf"memory.attention={choice} is not possible: .*{reason}.* Set memory.attention=auto"
    ):
        use_attention(choice, dtype, GPU)


def test_a_cpu_has_no_choice():
    use_attention("auto", BF16, torch.device("cpu"))
    with pytest.raises(ValueError, match="it needs a GPU, and device=cpu"):
        use_attention("eager", BF16, torch.device("cpu"))
