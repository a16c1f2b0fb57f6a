"""Mixtures of experts: against each expert computed by itself, against transformers' loss of the router, and under
every technique that runs a layer twice or hands its gradients over early."""

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lean_ft.memory import apply_memory
from lean_ft.models import decoder_config, load_model, save_model, tensors_on_disk
from lean_ft.models.config import MixtureConfig
from lean_ft.models.decoder import Decoder
from lean_ft.models.families.gpt_oss import GptOssRouter
from lean_ft.models.grouped_matmul import grouped_matmul, grouped_outer
from lean_ft.models.mix import ExpertFormula
from lean_ft.models.moe import Experts, MixtureOfExperts
from lean_ft.models.routing import RoutingStatistics
from lean_ft.settings import MemoryConfig
from lean_ft.system.passes import evaluating, first_pass
from lean_ft.system.shards import ALONE
from lean_ft.system.whole_files import read_json
from tests.models.conftest import kept_bytes

FAMILIES = ["mixtral", "qwen3_moe_some_layers", "olmoe", "gpt_oss"]
SOFTMAX_OF_ALL = MixtureConfig(5, 2, 7, weights_sum_to_one=False, activation="gelu_tanh")
HIDDEN_SIZE = 11


def clamped_with_biases(size: int) -> MixtureOfExperts:
    config = MixtureConfig(4, 2, 6, weights_sum_to_one=True)
    facts = {"gates_interleaved": True, "gate_scale": 1.7, "up_offset": 1.0, "limit": 0.4, "input_first": True}
    experts = Experts(size, config, ExpertFormula.of(config, **facts), has_bias=True)
    return MixtureOfExperts(size, config, GptOssRouter(size, config), experts)


def sigmoids_that_weigh_inputs(size: int) -> MixtureOfExperts:
    config = MixtureConfig(5, 2, 6, weights_sum_to_one=False, score="sigmoid")
    formula = ExpertFormula.of(config, scales_input=True, input_first=True)
    return MixtureOfExperts(size, config, experts=Experts(size, config, formula))


# By name, a mixture of this hidden size.
MIXTURES: dict[str, Callable[[int], MixtureOfExperts]] = {
    "softmax_of_all": lambda size: MixtureOfExperts(size, SOFTMAX_OF_ALL),
    "softmax_of_chosen": lambda size: MixtureOfExperts(size, MixtureConfig(4, 3, 9, weights_sum_to_one=True)),
    "clamped_with_biases": clamped_with_biases,
    "sigmoids_that_weigh_inputs": sigmoids_that_weigh_inputs,
}


@pytest.fixture(params=MIXTURES.values(), ids=MIXTURES.keys())
def mixture(request: pytest.FixtureRequest) -> MixtureOfExperts:
    """A mixture in float64 whose last expert no token chooses."""
    torch.manual_seed(0)
    mixture = request.param(HIDDEN_SIZE).double()
    for parameter in mixture.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.5)
    # Every token has a 1 in its first feature, so its weight there is a bias of the router.
    mixture.gate.weight.data[-1] = 0.0
    mixture.gate.weight.data[-1, 0] = -100.0
    return mixture


def tokens(*shape: int) -> Tensor:
    x = torch.randn(*shape, HIDDEN_SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x[..., 0] = 1.0
    return x.requires_grad_()


def each_expert_by_itself(mixture: MixtureOfExperts, x: Tensor, chosen: Tensor | None = None) -> Tensor:
    """Every expert computes every token; experts that were not chosen have weight 0."""
    config, experts, rows = mixture.config, mixture.experts, x.flatten(0, -2)
    formula = experts.formula
    logits = F.linear(rows, mixture.gate.weight, mixture.gate.bias)
    chosen = logits.topk(config.experts_per_token).indices if chosen is None else chosen.flatten(0, -2)
    is_chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, chosen, True)
    if config.weights_sum_to_one:
        weights = logits.masked_fill(~is_chosen, float("-inf")).softmax(-1)
    else:
        weights = (logits.softmax(-1) if config.score == "softmax" else logits.sigmoid()) * is_chosen
    total = torch.zeros_like(rows)
    for e in range(config.num_experts):
        into, out_of = experts.gate_up_proj[e], experts.down_proj[e]
        weight = weights[:, e : e + 1]
        factors = (rows * weight if formula.scales_input else rows) @ (into if formula.input_first else into.T)
        if experts.gate_up_proj_bias is not None:
            factors = factors + experts.gate_up_proj_bias[e]
        gate, up = (factors[:, ::2], factors[:, 1::2]) if formula.gates_interleaved else factors.chunk(2, -1)
        if formula.limit is not None:
            gate, up = gate.clamp(max=formula.limit), up.clamp(-formula.limit, formula.limit)
        if config.activation == "gelu_tanh":
            gate = F.gelu(gate, approximate="tanh")
        else:
            gate = gate * torch.sigmoid(formula.gate_scale * gate)
        out = (gate * (up + formula.up_offset)) @ (out_of if formula.input_first else out_of.T)
        if experts.down_proj_bias is not None:
            out = out + experts.down_proj_bias[e]
        total = total + (out if formula.scales_input else weight * out)
    return total.view_as(x)


def with_gradients(function, mixture: MixtureOfExperts, x: Tensor) -> list[Tensor]:
    out = function(x)
    out = out[0] if isinstance(out, tuple) else out
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return [out, *torch.autograd.grad((out * weight).sum(), [x, *mixture.parameters()])]


@pytest.mark.parametrize("shape", [(1,), (3, 8)], ids=["one_token", "rows"])
def test_it_equals_each_expert_by_itself(mixture, shape):
    x = tokens(*shape)
    expected = with_gradients(lambda x: each_expert_by_itself(mixture, x), mixture, x)
    # A token's weights sum in float32.
    torch.testing.assert_close(with_gradients(mixture, mixture, x), expected, atol=1e-6, rtol=1e-5)


def test_recorded_experts_replace_the_routers_choice(mixture):
    """Weights and gradients are those of a router that chose the recorded experts. The first row has no records."""
    config, x = mixture.config, tokens(3, 8)
    others = torch.rand(3, 8, config.num_experts, generator=torch.Generator().manual_seed(2))
    chosen = others.topk(config.experts_per_token).indices
    recorded = torch.cat((torch.zeros_like(chosen[:1]), chosen[1:] + 1)).short()
    chosen[0] = F.linear(x[0], mixture.gate.weight, mixture.gate.bias).topk(config.experts_per_token).indices
    expected = with_gradients(lambda x: each_expert_by_itself(mixture, x, chosen), mixture, x)
    found = with_gradients(lambda x: mixture(x, x, recorded), mixture, x)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.long
def test_compiled_it_is_one_graph_with_the_same_numbers(mixture):
    torch._dynamo.reset()
    x = tokens(3, 8)
    expected = with_gradients(mixture, mixture, x)
    compiled = torch.compile(mixture, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(with_gradients(compiled, mixture, x), expected, atol=1e-6, rtol=1e-5)


def test_an_expert_without_tokens_gets_a_gradient_of_zero(mixture):
    mixture(tokens(3, 8))[0].square().sum().backward()
    for name, parameter in mixture.experts.named_parameters():
        assert torch.count_nonzero(parameter.grad[-1]) == 0, name
        assert all(torch.count_nonzero(grad) > 0 for grad in parameter.grad[:-1]), name


def test_a_frozen_parameter_gets_no_gradient(mixture):
    x = tokens(3, 8)
    _, grad, *_ = with_gradients(mixture, mixture, x)
    mixture.experts.requires_grad_(False)
    mixture(x)[0].backward(torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view_as(x))
    assert mixture.gate.weight.grad is not None
    assert all(parameter.grad is None for parameter in mixture.experts.parameters())
    torch.testing.assert_close(x.grad, grad)


@pytest.mark.parametrize(("num_tokens", "autocast"), [(40, False), (1, True)], ids=str)
def test_it_keeps_only_tokens_gate_and_up_for_backward(mixture, num_tokens, autocast):
    config, itemsize = mixture.config, 2 if autocast else 8
    x = tokens(num_tokens)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        kept = kept_bytes(lambda: mixture(x), mixture)
    num_rows = num_tokens * config.experts_per_token
    large = (x.numel() + num_rows * 2 * config.intermediate_size) * itemsize
    of_the_router = (4 * num_tokens * config.num_experts + 8 * num_rows) * 8
    assert kept <= large + of_the_router + autocast * (x.nbytes + mixture.gate.weight.numel() * itemsize)
    assert large > 0.5 * kept or autocast


def test_autocast_computes_the_experts_in_its_dtype(mixture):
    x = tokens(3, 8).detach().float()
    mixture.float()
    expected, *_ = mixture(x)
    with torch.autocast("cpu", torch.bfloat16):
        out, *_ = mixture(x.clone().requires_grad_())
    out.float().sum().backward()
    assert out.dtype == torch.bfloat16
    assert 0 < (out - expected).norm() / expected.norm() < 0.02
    assert {parameter.grad.dtype for parameter in mixture.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"))],
)
@pytest.mark.parametrize("sizes", [(16, 24), (5, 3)], ids=["aligned", "odd"])
def test_grouped_products_equal_one_product_per_group(device, sizes):
    torch.manual_seed(0)
    in_size, out_size = sizes
    rows = torch.randn(30, in_size, device=device, dtype=torch.bfloat16)
    grads = torch.randn(30, out_size, device=device, dtype=torch.bfloat16)
    matrices = torch.randn(5, out_size, in_size, device=device, dtype=torch.bfloat16).mT
    ends = torch.tensor([0, 7, 7, 22, 30], dtype=torch.int32, device=device)
    parts = [slice(0, 0), slice(0, 7), slice(7, 7), slice(7, 22), slice(22, 30)]
    products = torch.cat([rows[part].float() @ matrix.float() for part, matrix in zip(parts, matrices, strict=True)])
    outers = torch.stack([rows[part].float().T @ grads[part].float() for part in parts])
    torch.testing.assert_close(grouped_matmul(rows, matrices, ends).float(), products, atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(grouped_outer(rows, grads, ends).float(), outers, atol=1e-2, rtol=1e-2)


@pytest.fixture
def batch() -> tuple[Tensor, Tensor, Tensor]:
    """Token ids (3, 20) padded on the right, which of them are tokens, and next-token labels."""
    ids = torch.randint(0, 101, (3, 20), generator=torch.Generator().manual_seed(2))
    is_token = torch.arange(20) < torch.tensor([20, 13, 4])[:, None]
    return ids, is_token, ids.masked_fill(~is_token, -100)


def loss_of(model: Decoder, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    ids, is_token, labels = batch
    logits, balance = model(ids, return_router_loss=True, is_token=is_token)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()) + balance


@pytest.mark.first(2)
@pytest.mark.parametrize("case", FAMILIES)
def test_the_routers_loss_and_its_gradients_equal_transformers(make_checkpoint, case, batch):
    folder, reference = make_checkpoint(case, output_router_logits=True, router_aux_loss_coef=0.7)
    model = load_model(folder)
    assert model.router_aux_loss_coef == 0.7
    ids, is_token, labels = batch
    expected = reference(ids, attention_mask=is_token.long(), labels=labels, output_router_logits=True)
    _, balance = model(ids, return_router_loss=True, is_token=is_token)
    model(ids[:1])  # another forward pass in between changes nothing
    torch.testing.assert_close(balance, 0.7 * expected.aux_loss, rtol=1e-5, atol=0)
    loss = loss_of(model, batch)
    torch.testing.assert_close(loss, expected.loss, rtol=1e-5, atol=0)
    loss.backward()
    expected.loss.backward()
    theirs = {name: parameter.grad for name, parameter in reference.named_parameters()}
    for name, parameter in model.named_parameters():
        if not name.endswith("k_proj.bias"):  # whose gradient is only rounding
            assert (parameter.grad - theirs[name]).norm() <= 1e-3 * theirs[name].norm(), name


def test_the_routers_loss_is_off_by_default(make_checkpoint, batch):
    silent, _ = make_checkpoint("olmoe", router_aux_loss_coef=0.7)
    asking, _ = make_checkpoint("olmoe", router_aux_loss_coef=0.7, output_router_logits=True)
    coefficients = [load_model(silent), load_model(silent, router_aux_loss_coef=0.2)]
    coefficients += [load_model(asking), load_model(asking, router_aux_loss_coef=0.0)]
    assert [model.router_aux_loss_coef for model in coefficients] == [0.0, 0.2, 0.7, 0.0]
    values = [model(batch[0], return_router_loss=True)[1] for model in coefficients]
    assert [value is not None and value.requires_grad and float(value) > 0 for value in values] == [0, 1, 1, 0]
    with torch.no_grad():  # no loss in evaluation
        assert coefficients[1](batch[0], return_router_loss=True)[1] is None


def test_a_routers_loss_without_a_softmax_router_is_refused(make_checkpoint):
    folder, _ = make_checkpoint("llama")
    with pytest.raises(ValueError, match=r"router_aux_loss_coef is 0\.1: .* has no experts"):
        load_model(folder, router_aux_loss_coef=0.1)
    sigmoids, _ = make_checkpoint("glm4_moe")
    with pytest.raises(ValueError, match=r"a softmax over experts, and .* scores experts by sigmoid"):
        load_model(sigmoids, router_aux_loss_coef=0.1)
    assert load_model(folder, router_aux_loss_coef=0.0)(torch.tensor([[1, 2]]), return_router_loss=True)[1] is None


@pytest.mark.first(4)
@pytest.mark.parametrize("settings", [{}, {"activation_checkpointing": "full"}, {"tile_mlp": 2}], ids=str)
@pytest.mark.parametrize("case", ["qwen3_moe_some_layers", "gpt_oss", "glm4_moe", "gemma4_text_experts"])
def test_routing_metrics_count_each_token_of_two_micro_batches_once(make_checkpoint, batch, case, settings):
    """Against the routers' outputs in separate passes over each row without padding."""
    model = load_model(make_checkpoint(case)[0])
    routers = [getattr(layer, "mixture", None) or layer.mlp for layer in model.layers]
    routers = [getattr(one, one.config.router_name) for one in routers if isinstance(one, MixtureOfExperts)]
    seen = [[] for _ in routers]
    hooks = [
        router.register_forward_hook(lambda router, _, logits, i=i: seen[i].append((router, logits)))
        for i, router in enumerate(routers)
    ]
    ids, is_token, _ = batch
    with torch.no_grad():
        for row, mask in zip(ids, is_token, strict=True):
            model(row[mask][None])
    for hook in hooks:
        hook.remove()
    loads, unused, entropies = [], [], []
    for of_layer in seen:
        router, logits = of_layer[0][0], torch.cat([one for _, one in of_layer])
        counts = Counter(router.choose(logits, model.mixture)[1].flatten().tolist())
        num_experts, mean = logits.shape[1], logits.softmax(-1).mean(0)
        loads.append(max(counts.values()) / (sum(counts.values()) / num_experts))
        unused.append(1 - len(counts) / num_experts)
        entropies.append(float(-(mean * mean.log()).sum() / math.log(num_experts)))
    model.routing = RoutingStatistics()
    apply_memory(model, MemoryConfig(**settings), compile=False)
    for rows in (slice(0, 2), slice(2, 3)):
        with first_pass(compiled=False):
            model(ids[rows], is_token=is_token[rows])
        model(ids[rows], is_token=is_token[rows]).sum().backward()
        with evaluating(model):
            model(ids[rows])
    found = {name: value.item() for name, value in model.routing.take(ALONE).items()}
    expected = {"expert_load": loads, "unused_experts": unused, "router_entropy": entropies}
    assert found == pytest.approx({name: sum(of) / len(of) for name, of in expected.items()}, rel=1e-4)
    assert model.routing.take(ALONE) == {}


@pytest.mark.first(2)
@pytest.mark.parametrize(
    ("case", "checkpointing", "compile"),
    [
        ("qwen3_moe_some_layers", "none", False),
        ("qwen3_moe_some_layers", "full", False),
        ("qwen3_moe_some_layers", "selective", False),
        ("mixtral", "selective", True),
    ],
)
def test_memory_techniques_change_no_gradient_and_each_arrives_once(
    make_checkpoint, batch, case, checkpointing, compile
):
    torch._dynamo.reset()
    folder, _ = make_checkpoint(case)
    plain, model = (load_model(folder, router_aux_loss_coef=0.3) for _ in range(2))
    loss_of(plain, batch).backward()
    apply_memory(model, MemoryConfig(activation_checkpointing=checkpointing), compile=False)
    if compile:  # as `compile_layers`, without the time for code generation
        for layer in model.layers:
            layer.compile(fullgraph=True, backend="aot_eager")
    arrived: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: arrived.update([name]))
    loss_of(model, batch).backward()
    assert set(arrived.values()) == {1}
    expected = dict(plain.named_parameters())
    assert arrived.keys() == expected.keys()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad, atol=1e-5, rtol=1e-4, msg=name)


# As published, without token ids, library versions and fields of no interest.
PUBLISHED = {
    "mixtral": {
        "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768,
        "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "num_local_experts": 8, "output_router_logits": False, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02, "sliding_window": None, "vocab_size": 32000,
    },
    "olmoe": {
        "model_type": "olmoe", "attention_bias": False, "clip_qkv": None, "hidden_size": 2048,
        "intermediate_size": 1024, "max_position_embeddings": 4096, "norm_topk_prob": False,
        "num_attention_heads": 16, "num_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 16,
        "num_key_value_heads": 16, "output_router_logits": False, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
        "router_aux_loss_coef": 0.01, "vocab_size": 50304,
    },
}  # fmt: skip


@pytest.mark.parametrize(("family", "billions"), [("mixtral", 46.7), ("olmoe", 6.9)])  # presets: test_shapes.py
def test_published_models_have_the_published_size(family, billions):
    with torch.device("meta"):
        model = Decoder(decoder_config(PUBLISHED[family]))
    assert model.router_aux_loss_coef == 0.0  # none of them asks for it
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, abs=0.1)


def test_experts_stored_one_by_one_are_read_and_written_in_place(make_checkpoint, tmp_path):
    folder, _ = make_checkpoint("mixtral")
    model = load_model(folder)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    assert {tensor.untyped_storage().data_ptr() for tensor in tensors_on_disk(model).values()} == own
    save_model(model, tmp_path, max_shard_bytes=20_000)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 3
    for expected, parameter in zip(model.parameters(), load_model(tmp_path).parameters(), strict=True):
        assert torch.equal(parameter, expected)


MIXTRAL = {**PUBLISHED["mixtral"], "num_hidden_layers": 1}
PRESETS = Path(__file__).parents[2] / "configs"
QWEN3_MOE, GPT_OSS = (read_json(PRESETS / name / "config.json") for name in ("qwen3_30b_a3b", "gpt_oss_20b"))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**MIXTRAL, "num_experts_per_tok": 9}, "num_experts_per_tok is 9; expected at most 8"),
        ({**MIXTRAL, "num_local_experts": None}, "field num_local_experts is missing"),
        ({**MIXTRAL, "num_experts": 4}, "'num_local_experts': 8, 'num_experts': 4.; expected equal numbers"),
        ({**MIXTRAL, "router_jitter_noise": 0.1}, "router_jitter_noise is 0.1"),
        ({**MIXTRAL, "mlp_only_layers": [0]}, r"mlp_only_layers is \[0\], which is not supported"),
        (
            {**MIXTRAL, "output_router_logits": True, "router_aux_loss_coef": -1},
            "router_aux_loss_coef is -1; expected 0 or a positive number",
        ),
        ({**QWEN3_MOE, "mlp_only_layers": 3}, "mlp_only_layers is 3; expected a list"),
        ({**PUBLISHED["olmoe"], "clip_qkv": 8.0}, "clip_qkv is 8.0"),
        ({**GPT_OSS, "hidden_act": "gelu"}, "hidden_act is 'gelu'; expected 'silu'"),
        (
            {**GPT_OSS, "quantization_config": {"quant_method": "awq"}},
            r"quantized \(awq\); expected fp8 or mxfp4",
        ),
        ({**MIXTRAL, "model_type": "llama"}, "num_local_experts is 8"),
    ],
)
def test_unsupported_settings_of_experts_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        decoder_config(config)
