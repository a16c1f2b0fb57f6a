"""Models: one decoder for every dense family, and Hugging Face folders in and out."""

from lean_ft.models.cache import KVCache
from lean_ft.models.config import DecoderConfig
from lean_ft.models.config_json import REWARD_LABELS, VECTORS, decoder_config, label_fields
from lean_ft.models.decoder import Decoder
from lean_ft.models.few_rows import FewRows, pack_in_place
from lean_ft.models.hf_format import empty_model, load_model, read_weights
from lean_ft.models.layers import MLP, RMSNorm
from lean_ft.models.load_options import LoadOptions
from lean_ft.models.new_model import build_decoder
from lean_ft.models.rope import RopeConfig
from lean_ft.models.saving import check_parameters, save_model
from lean_ft.models.source import parts_on_disk, tensors_on_disk
from lean_ft.models.stored_weights import stored_labels

__all__ = [
    "MLP",
    "REWARD_LABELS",
    "VECTORS",
    "Decoder",
    "DecoderConfig",
    "FewRows",
    "KVCache",
    "LoadOptions",
    "RMSNorm",
    "RopeConfig",
    "build_decoder",
    "check_parameters",
    "decoder_config",
    "empty_model",
    "label_fields",
    "load_model",
    "pack_in_place",
    "parts_on_disk",
    "read_weights",
    "save_model",
    "stored_labels",
    "tensors_on_disk",
]
