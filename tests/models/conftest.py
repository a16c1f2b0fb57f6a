"""Random tiny checkpoints made by transformers, with transformers' model of each as the reference."""

import copy
import shutil
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from lean_ft.models.families import ENCODERS, FAMILIES, MULTIMODAL
from tests.models.family_cases import CASES, ENCODER_CASES, FIRST_CASES, IN_ORDER, SIZES
from tests.models.tiny_wholes import tiny_whole

# transformers has this language model without an entry in its table, because it is published inside a multimodal model.
transformers.AutoModelForCausalLM.register(transformers.Mistral4Config, transformers.Mistral4ForCausalLM, exist_ok=True)

Reference = transformers.PreTrainedModel
MakeCheckpoint = Callable[..., tuple[Path, Reference]]


def kept_bytes(forward: Callable[[], Any], module: torch.nn.Module, *inputs: torch.Tensor) -> int:
    """Bytes that autograd keeps for backward in addition to a module's weights and these inputs."""
    own = {t.untyped_storage().data_ptr() for t in (*inputs, *module.parameters(), *module.buffers())}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return sum(kept.values())


def reference_model(model_type: str, settings: dict[str, Any], seed: int = 0) -> Reference:
    """transformers' model with random weights, norms and biases, large enough that a wrong formula shows."""
    config = transformers.AutoConfig.for_model(model_type, **{**SIZES, **settings})
    config._experts_implementation = "eager"  # others need sizes in multiples of 16 bytes
    gives_text = settings.get("use_bidirectional_attention") is not True and model_type not in ENCODERS
    kind = transformers.AutoModelForCausalLM if gives_text else transformers.AutoModel
    model = kind.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            # Norms vary around their initial value: 1, or 0 if the family adds 1.
            is_scale = "norm" in name or ".ln_" in name or name.endswith("scale")
            parameter.copy_(parameter + 0.3 * noise if is_scale else 0.2 * noise)
        for name, buffer in [*model.named_buffers(), *model.named_parameters()]:
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
            elif name.endswith("layer_scalar"):
                buffer.copy_(0.5 + torch.rand(buffer.shape, generator=generator))
    return model.eval()


@pytest.fixture
def own_families() -> Iterator[None]:
    """Tests that replace rows of families leave them as they were, in their order."""
    before = dict(FAMILIES)
    yield
    FAMILIES.clear()
    FAMILIES.update(before)


_MADE: dict[tuple[str, ...], tuple[Path, Reference]] = {}


def _made_once(
    folders: pytest.TempPathFactory, case: str, seed: int, dtype: torch.dtype, overrides: dict[str, Any]
) -> tuple[Path, Reference]:
    key = (case, str(seed), str(dtype), repr(sorted(overrides.items())))
    if key not in _MADE:
        model_type, settings = {**CASES, **ENCODER_CASES}[case]
        folder, model = folders.mktemp(case), reference_model(model_type, {**settings, **overrides}, seed)
        model.to(dtype)
        for name, tensor in [*model.named_buffers(), *model.named_parameters()]:  # as from_pretrained does
            if any(kept in name for kept in (*(model._keep_in_fp32_modules_strict or ()), "gate.wg.")):
                tensor.data = tensor.float()
        model.save_pretrained(folder)
        if dtype != torch.float32:  # read it back, because `to` also rounded the rotary frequencies
            model = type(model).from_pretrained(folder, dtype=dtype).eval()
        _MADE[key] = folder, model
    return _MADE[key]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> MakeCheckpoint:
    """A function that returns a case's folder and transformers' model, made once for all tests, which must change
    neither."""
    return lambda case, dtype=torch.float32: _made_once(tmp_path_factory, case, 0, dtype, {})


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> MakeCheckpoint:
    """A function that returns a case's folder and transformers' model, as copies that a test may change."""

    def make(case: str = "llama", seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any):
        folder, model = _made_once(tmp_path_factory, case, seed, dtype, overrides)
        return Path(shutil.copytree(folder, tmp_path_factory.mktemp(case) / "model")), copy.deepcopy(model)

    return make


@pytest.fixture(
    params=[pytest.param(name, marks=[pytest.mark.long] * (name not in FIRST_CASES.values())) for name in IN_ORDER]
)
def case(request: pytest.FixtureRequest) -> str:
    """One case of each family, and further cases as long tests."""
    return request.param


VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
# By transformers' name of the multimodal model: the case of its language model, its vision config, and other settings.
WHOLES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "Gemma3": ("gemma3_text", {**VISION, "image_size": 28, "patch_size": 14}, {"mm_tokens_per_image": 4}),
    "Lfm2Vl": ("lfm2", {**VISION, "num_patches": 16, "patch_size": 4, "vision_use_head": False}, {}),
    "SmolVLM": ("llama", {**VISION, "image_size": 28, "patch_size": 14}, {}),
    "Mistral3": ("ministral3", {**VISION, "head_dim": 8, "image_size": 28, "patch_size": 14}, {}),
    "Mistral4": ("mistral4", {**VISION, "head_dim": 8, "image_size": 28, "patch_size": 14}, {}),
    "Qwen2_5_VL": ("qwen2", {}, {}),
    "Qwen3VL": ("qwen3", {}, {"vision_start_token_id": 96}),
    "Qwen3VLMoe": ("qwen3_moe", {}, {"vision_start_token_id": 96}),
    "Qwen3_5": ("qwen3_5_text", {}, {"vision_start_token_id": 96}),
    "Qwen3_5Moe": ("qwen3_5_moe_text", {}, {"vision_start_token_id": 96}),
    "Gemma4": (
        "gemma4_text",
        {**VISION, "num_key_value_heads": 2, "head_dim": 8, "patch_size": 4, "position_embedding_size": 16},
        {"audio_token_id": 96},
    ),
    "Llama4": (
        "llama4_text",
        {**VISION, "vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16, "image_size": 28},
        {},
    ),
}
_QWEN_VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 48}
_QWEN_VISION |= {"patch_size": 4, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}


# The other multimodal types. Those with names or fields of their own run in the default tests, the rest in the long
# ones.
_TYPES = {getattr(transformers, f"{name}Config").model_type for name in WHOLES}
OTHER_WHOLES = [
    pytest.param(name, marks=[pytest.mark.long] * (name not in ("aya_vision", "glm4v", "got_ocr2", "idefics3")))
    for name in MULTIMODAL
    if name not in _TYPES and not (name == "gemma3n" and find_spec("timm") is None)  # its tower is a model of timm
]
_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}  # of heads of 8 features


def whole_model(name: str) -> Reference:
    """A random tiny multimodal model; ids up to 95 are text."""
    if name in MULTIMODAL:
        return tiny_whole(name)
    case, vision, others = WHOLES[name]
    model_type, text = CASES[case]
    if name in ("Qwen2_5_VL", "Qwen3VL", "Qwen3VLMoe"):
        text = {**text, "rope_parameters": _MROPE}
    if name == "Llama4":
        text = {**text, "no_rope_layers": []}  # as published: an empty list means the default
    if name == "Qwen3VLMoe":
        model_type = "qwen3_vl_moe_text"
    name = "Mistral3" if name == "Mistral4" else name  # one class for several language models
    ids = {"image_token_id": 98, "video_token_id": 97, "image_token_index": 98}
    config = getattr(transformers, f"{name}Config")(
        text_config={**SIZES, **text, "model_type": model_type}, vision_config=vision or _QWEN_VISION, **ids, **others
    )
    config.tie_word_embeddings = getattr(config.text_config, "tie_word_embeddings", False)
    config.text_config._experts_implementation = "eager"
    whole = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        for name, parameter in whole.named_parameters():
            if "language_model." in name or "lm_head" in name:
                parameter.normal_(0.0, 0.3, generator=torch.Generator().manual_seed(parameter.numel()))
    return whole
