"""Random checkpoints with drafting layers under their published names, and transformers' modules of both parts."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.modeling_layers import MtpModel

from tests.models.conftest import Reference, reference_model
from tests.models.family_cases import CASES

# Cases of families, and the names of a drafting layer's parts in the folder; N is its place after the last layer.
AFTER_THE_LAST = {"block": "model.layers.N.", "enorm": "model.layers.N.enorm", "hnorm": "model.layers.N.hnorm"}
AFTER_THE_LAST |= {"eh_proj": "model.layers.N.eh_proj", "post_norm": "model.layers.N.shared_head.norm"}
APART = {"block": "mtp.layers.0.", "enorm": "mtp.pre_fc_norm_embedding", "hnorm": "mtp.pre_fc_norm_hidden"}
APART |= {"eh_proj": "mtp.fc", "post_norm": "mtp.norm"}
NAMES = {
    "glm4_moe": AFTER_THE_LAST,
    "deepseek_v3": AFTER_THE_LAST,
    "hy_v3": AFTER_THE_LAST | {"post_norm": "model.layers.N.final_layernorm"},
    "qwen3_next": APART,
    "qwen3_5_text": APART,
    "qwen3_5_moe_text": APART,
}
COUNTS = {"qwen3_next": None, "qwen3_5_text": "mtp_num_hidden_layers", "qwen3_5_moe_text": "mtp_num_hidden_layers"}


class Checkpoint(NamedTuple):
    folder: Path
    model: Reference
    drafting: MtpModel

    def drafted(self, ids: Tensor) -> list[Tensor]:
        """The normed hidden states (1, T - k, D) of each drafting layer k for a text (1, T), computed by hand."""
        inner, hiddens = self.model.get_decoder(), list[Tensor]()
        hidden = inner(ids).last_hidden_state
        for depth, layer in enumerate(self.drafting.layers, 1):
            embedded = inner.embed_tokens(ids[:, depth:])
            length = embedded.shape[1]
            if not length:
                hiddens.append(embedded)
                continue
            positions = torch.arange(length)[None] + depth
            mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
            hidden = layer(
                embedded,
                hidden[:, :length],
                position_embeddings=inner.rotary_emb(embedded, positions),
                attention_mask=mask,
                position_ids=positions,
                past_key_values=None,
            )
            hiddens.append(hidden)
        return hiddens


def checkpoint_with_drafting(folder: Path, case: str, number: int = 1, **settings: Any) -> Checkpoint:
    """Save a case of `family_cases` with drafting layers, whose weights are as random as the model's."""
    family, of_case = CASES[case]
    names, count = NAMES[family], COUNTS.get(family, "num_nextn_predict_layers")
    model = reference_model(family, {**of_case, **settings})
    config: Any = model.config
    config.num_mtp_layers = number
    if getattr(config, "layer_types", None) is not None:
        config.mtp_layer_types = ["full_attention"] * number
    if getattr(config, "mlp_layer_types", None) is not None:
        config.mtp_mlp_layer_types = [config.mlp_layer_types[-1]] * number
    drafting = MtpModel(model, number).eval()
    norm: Any = model.get_decoder().norm  # MtpModel takes the first norm's class, which may be a gated one
    for layer in drafting.layers:
        for name in ("enorm", "hnorm", "post_norm"):
            setattr(layer, name, type(norm)(config.hidden_size, eps=config.rms_norm_eps))
    generator = torch.Generator().manual_seed(1)
    for name, tensor in drafting.layers.state_dict().items():
        noise = torch.randn(tensor.shape, generator=generator)
        tensor.copy_(tensor + 0.3 * noise if "norm" in name else 0.2 * noise)
    model.save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    place = config.num_hidden_layers
    for name, tensor in drafting.layers.state_dict().items():
        layer, part, rest = name.split(".", 2)
        here = {key: value.replace("N", str(place + int(layer))) for key, value in names.items()}
        if part != "mtp_block":
            stored[f"{here[part]}.{rest}"] = tensor.clone()
            continue
        stored |= {here["block"] + own: piece for own, piece in _published(family, rest, tensor).items()}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    written = json.loads((folder / "config.json").read_text())
    for name in ("num_mtp_layers", "mtp_layer_types", "mtp_mlp_layer_types"):
        written.pop(name, None)
    (folder / "config.json").write_text(json.dumps({**written, **({count: number} if count else {})}))
    return Checkpoint(folder, model, drafting)


def _published(family: str, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """A tensor of a block as folders have it: experts one by one."""
    if family == "hy_v3":
        name = name.replace("mlp.e_score_correction_bias", "mlp.expert_bias").replace("mlp.gate.", "mlp.router.gate.")
        name = name.replace("mlp.shared_experts.", "mlp.shared_mlp.")
    if name == "mlp.experts.gate_up_proj":
        halves = {"gate_proj": tensor.chunk(2, 1)[0], "up_proj": tensor.chunk(2, 1)[1]}
        return {
            f"mlp.experts.{i}.{own}.weight": piece[i].clone()
            for own, piece in halves.items()
            for i in range(len(piece))
        }
    if name == "mlp.experts.down_proj":
        return {f"mlp.experts.{i}.down_proj.weight": tensor[i].clone() for i in range(len(tensor))}
    return {name: tensor.clone()}
