"""Quantize a model with torchao into a new folder, and report the held-out loss before and after.

leanft quantize runs/tiny kind=int8 output=tiny-int8 data.source=tiny/validation.jsonl
leanft quantize runs/tiny_qat kind=int8_dynamic_int4_weight output=tiny-8da4w data.source=tiny/validation.jsonl

An adapter, or a run that trained an adapter, is merged first. For quantization-aware training, set quantize.train in
`finetune`.
"""

import gc
from pathlib import Path

import torch
from pydantic import PositiveInt

from lean_ft.data import EvalBatches, prepare_batches
from lean_ft.export.places import check_destination, check_tower_is_unchanged, read_source
from lean_ft.peft import is_adapter
from lean_ft.peft.finished_models import find_finished
from lean_ft.quantize import GROUPED, mean_loss, quantize, save_quantized
from lean_ft.settings import FilePath, GroupSize, ModelConfig, QuantizedKind, Settings, SFTDataConfig
from lean_ft.system.log import say
from lean_ft.system.units import gibibytes, number
from lean_ft.system.whole_files import write_whole


class Config(Settings):
    model: ModelConfig
    kind: QuantizedKind
    """`int8`, `int4` and `float8` quantize weights only. `int8_dynamic_int8_weight` and `int8_dynamic_int4_weight` also
    quantize inputs, with one scale per token. torchao stores a 4-bit weight in one byte."""
    group_size: GroupSize = 32
    output: FilePath
    """The new folder."""
    data: SFTDataConfig | None = None
    """Rows for the loss before and after: the held-out rows if there are any, otherwise all."""
    batch_size: PositiveInt = 8
    """Sequences (packed rows, with packing) per forward pass."""


def main(cfg: Config) -> Path:
    if cfg.model.new_tokens or cfg.model.router_aux_loss_coef is not None or cfg.model.random_init:
        raise ValueError(
            "model.new_tokens, model.router_aux_loss_coef and model.random_init are for training. Remove them."
        )
    if cfg.group_size != Config.model_fields["group_size"].default and cfg.kind not in GROUPED:
        raise ValueError(f"group_size is for 4-bit weights. Set kind={' or '.join(GROUPED)}, or remove group_size.")
    if cfg.model.images != "none":
        raise ValueError("model.images is for training: the language model is quantized, without its tower. Remove it.")
    if given := {"mtp", "mtp_trunk", "mtp_weight"} & cfg.model.model_fields_set:
        raise ValueError(f"model.{min(given)} is for training: a quantized folder has no drafting layers. Remove it.")
    source = find_finished(cfg.model.path)
    check_destination(cfg.output, source, force=False)
    check_tower_is_unchanged(source, "the new folder")
    model, tokenizer, _ = read_source(source, is_adapter(source), dtype=getattr(torch, cfg.model.dtype))
    batches = None
    if cfg.data is not None:
        if tokenizer is None:
            raise ValueError(f"{source} has no tokenizer for data.source. Remove data, or add tokenizer files.")
        rows, held_out = prepare_batches(cfg.data, tokenizer, cfg.batch_size, seed=0)
        batches = EvalBatches(rows.layout, rows.report) if held_out is None else held_out
    before = None if batches is None else mean_loss(model, batches)
    bytes_before = sum(parameter.nbytes for parameter in model.parameters())
    count = quantize(model, cfg.kind, cfg.group_size)
    gc.collect()
    cfg.output.parent.mkdir(parents=True, exist_ok=True)
    with write_whole(cfg.output) as folder:
        folder.mkdir()
        save_quantized(model, tokenizer, folder, cfg.kind, cfg.group_size)
        size = (folder / "model.safetensors").stat().st_size
    say("quantized", f"{count} projections to {cfg.kind}; weights {gibibytes(bytes_before)}, now {gibibytes(size)}")
    if batches is not None and before is not None:
        after = mean_loss(model, batches)
        say("loss", f"{number(before)} before, {number(after)} after, over {batches.report.kept:,} rows")
    say("output", f"{cfg.output}; open it with leanft generate, chat, serve or evaluate on a CPU, or with transformers")
    return cfg.output
