"""What a plan's memory is for, found by the library function that allocates it."""

import inspect
import sys
from types import CodeType, FrameType

from lean_ft.losses.linear_cross_entropy import linear_cross_entropy
from lean_ft.losses.linear_distillation import linear_distillation, top_log_probs
from lean_ft.losses.linear_log_probs import linear_log_probs, recomputed_log_probs
from lean_ft.memory.frozen_embeddings import whole_weight
from lean_ft.memory.streamed_experts import StreamedStacks
from lean_ft.models.hf_format import load_model, read_weights
from lean_ft.optim.build import build_optimizer
from lean_ft.peft.lora import apply_lora
from lean_ft.plan.online import rehearse_generation

WEIGHTS, STATES, GRADIENTS = "weights", "optimizer state", "gradients"
BATCH, ACTIVATIONS, LOSS, WORKSPACE = "batch", "activations", "loss", "workspace"
GENERATION = "generation"
LABELS = (WEIGHTS, STATES, GRADIENTS, ACTIVATIONS, LOSS, WORKSPACE, BATCH)

_FUNCTIONS = {
    WEIGHTS: (load_model, read_weights, apply_lora, whole_weight, StreamedStacks.bring),
    STATES: (build_optimizer,),
    LOSS: (linear_cross_entropy, linear_log_probs, recomputed_log_probs, linear_distillation, top_log_probs),
    GENERATION: (rehearse_generation,),
}
_LABEL_OF_CODE: dict[CodeType, str] = {
    inspect.unwrap(function).__code__: label for label, functions in _FUNCTIONS.items() for function in functions
}


def label_of_caller() -> str | None:
    """Return the label of the innermost function on the stack that has one."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if (label := _LABEL_OF_CODE.get(frame.f_code)) is not None:
            return label
        frame = frame.f_back
    return None
