"""The host waits for the device once per step, to check that the loss is finite, with any settings.

PyTorch's sync debug mode counts the waits of the third step. The first steps compile and fill caches.
"""

import json
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import CONFIG_MAPPING

from lean_ft.losses import linear_cross_entropy
from lean_ft.models import load_model
from lean_ft.settings.text import load_config
from lean_ft.system.catalog import find_preset, find_recipe, load_recipe
from lean_ft.training import Run
from tests.models.family_cases import CASES as FAMILIES
from tests.models.family_cases import COVER, IN_ORDER, SIZES
from tests.pretended_gpu.test_families import BATCH, CU_SEQLENS

FULL, LORA = ("full_finetune_single_device", "tiny/full"), ("lora_finetune_single_device", "tiny/lora")
PACKED = "data.packing=bfd data.max_length=256"
IN_BACKWARD = f"{PACKED} clip_grad_norm=null optimizer.in_backward=true"
AWAY = "memory.activation_offload=true memory.tied_gradient=host optimizer.state=streamed"

SETTINGS: dict[str, tuple[tuple[str, str], str]] = {
    "padded": (FULL, "clip_grad_norm=0.5"),
    "packed": (FULL, f"{PACKED} clip_grad_norm=0.5"),
    "padding_free": (FULL, "data.packing=padding_free"),
    "float32": (FULL, f"model.dtype=float32 {PACKED} clip_grad_norm=0.5"),
    "float16": (FULL, f"model.dtype=float16 {PACKED} clip_grad_norm=0.5"),
    "accumulated": (FULL, f"{PACKED} gradient_accumulation_steps=2"),
    "in_backward": (FULL, IN_BACKWARD),
    "in_backward_accumulated": (FULL, f"{IN_BACKWARD} gradient_accumulation_steps=2"),
    "away": (FULL, f"{IN_BACKWARD} optimizer.name=adamw_8bit memory.activation_checkpointing=full {AWAY}"),
    "compiled": (FULL, f"{IN_BACKWARD} compile=true memory.activation_checkpointing=selective"),
    "tiled": (FULL, f"{IN_BACKWARD} memory.tile_mlp=2 memory.activation_checkpointing=every_n"),
    "smoothed": (FULL, f"{PACKED} loss.label_smoothing=0.1 loss.z_loss=1e-4"),
    "lora": (LORA, f"{PACKED}"),
    "qlora": (LORA, f"lora.quantize=nf4 {PACKED}"),
    "host_embeddings": (LORA, f"memory.frozen_embeddings=host memory.activation_offload=true {PACKED}"),
    "dora": (LORA, f"lora.dora=true lora.dropout=0.1 {PACKED}"),
}
for rule in ("sgd", "adamw", "adamw_8bit", "adamw_8bit_torchao", "adamw_4bit", "adafactor", "muon", "apollo_mini"):
    SETTINGS[rule] = FULL, f"{IN_BACKWARD} optimizer.name={rule} optimizer.stochastic_rounding=true"
SETTINGS["update_clipping"] = FULL, f"{IN_BACKWARD} optimizer.name=adamw_8bit optimizer.update_clipping=true"
SETTINGS["paged"] = FULL, f"{IN_BACKWARD} optimizer.name=paged_adamw_8bit"


class Waits(Counter[str]):
    """Context manager that counts the places where the host waits."""

    def __enter__(self) -> "Waits":
        self._catcher = warnings.catch_warnings()
        self._catcher.__enter__()
        warnings.simplefilter("always")
        warnings.showwarning = self._note
        torch.cuda.set_sync_debug_mode("warn")
        return self

    def __exit__(self, *_: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")
        self._catcher.__exit__(None, None, None)

    def _note(self, message: Any, *_: Any, **__: Any) -> None:
        if "called a synchronizing" in str(message):
            own = [frame for frame in traceback.extract_stack() if "/lean_ft/" in frame.filename]
            self[" < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(own[-3:]))] += 1


@pytest.mark.cards("H100")
@pytest.mark.parametrize("name", SETTINGS)
def test_a_step_waits_once(name: str, tmp_path: Path) -> None:
    (recipe_name, preset), more = SETTINGS[name]
    recipe, waits = load_recipe(find_recipe(recipe_name)), Waits()
    own = ["device=cuda", f"output_dir={tmp_path}", "plan=false", "max_steps=3", "log_every=100", "eval_answers=0"]
    if "model.dtype" not in more:
        own.append("model.dtype=bfloat16")
    own += ["data.validation_source=null", "batch_size=2", *more.split()]
    steps = Run.steps

    def watched(run: Run) -> Iterator[int]:
        for step in steps(run):
            if step == 2:
                with waits:
                    yield step
            else:
                yield step

    with mock.patch.object(Run, "steps", watched):
        recipe.main(load_config(recipe.Config, find_preset(preset), own))
    assert sum(waits.values()) == 1, waits


@pytest.mark.cards("T4", "A100", "H100")
@pytest.mark.first(len(COVER))
@pytest.mark.parametrize("family", IN_ORDER)
@pytest.mark.parametrize(("dtype", "layout"), [("bfloat16", "packed"), ("float16", "packed"), ("float32", "padded")])
def test_no_family_waits_forward_or_backward(family: str, dtype: str, layout: str, tmp_path: Path) -> None:
    """Soft caps, sinks, windows and experts, also with dtypes and cards that PyTorch's kernels do not support."""
    model_type, settings = FAMILIES[family]
    (tmp_path / "config.json").write_text(json.dumps(CONFIG_MAPPING[model_type](**{**SIZES, **settings}).to_dict()))
    mixed = dtype == "float16"
    model = load_model(
        tmp_path, device="cpu", dtype=torch.float32 if mixed else getattr(torch, dtype), random_init=True
    )
    model.cuda()
    ids = torch.randint(3, 100, BATCH).cuda()
    bounds = torch.tensor(CU_SEQLENS, dtype=torch.int32).cuda() if layout == "packed" else None
    for waits in (Waits(), Waits()):  # the first pass fills caches such as rotary frequencies
        with waits:
            with torch.autocast("cuda", torch.float16, enabled=mixed):
                hidden = model(ids, None, bounds, return_hidden=True)
                cap = model.config.logits_softcap
                loss = linear_cross_entropy(
                    hidden, model.output_weight, ids, num_targets=96, chunk_tokens=32, softcap=cap
                )
            loss.backward()
    assert not waits, waits
