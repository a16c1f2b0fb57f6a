"""The teacher of a distillation: a frozen model, the cached outputs of one for the same rows, or the student itself.

`teacher(batch)` returns the input of `linear_distillation`. It reads `batch.for_teacher`, whose prompts may have a
context that the student does not read (`lean_ft.data.contexts`). A teacher with another tokenizer is refused, since
token ids must mean the same for both models.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import zip_longest
from typing import Any

import torch

from lean_ft.data import Batch, Batches, EvalBatches
from lean_ft.frozen.frozen_model import load_frozen
from lean_ft.frozen.teacher_cache import TeacherCache, read_about, tokens_of
from lean_ft.losses import Teacher, TeacherStates, TopLogProbs
from lean_ft.losses.linear_cross_entropy import select_targets
from lean_ft.models import Decoder
from lean_ft.optim import Optimizer, averaged_weights
from lean_ft.peft import adapter_off, quantize_as_loaded
from lean_ft.settings import SELF, DataConfig, DistillConfig, LoRAConfig, ModelConfig, RecipeConfig
from lean_ft.system.host_link import open_link
from lean_ft.system.log import say
from lean_ft.system.passes import evaluating
from lean_ft.system.shards import ALONE, Ranks
from lean_ft.system.units import gibibytes
from lean_ft.system.world import world
from lean_ft.tokenizers import Tokenizer, load_tokenizer


def load_teacher(
    cfg: RecipeConfig,
    tokenizer: Tokenizer,
    device: torch.device,
    batches: Batches,
    held_out: EvalBatches | None,
    ranks: Ranks = ALONE,
) -> Teacher:
    """Return the teacher of the recipe's `DistillConfig`, on the student's device and sharded as the student is.

    Raises ValueError for another tokenizer, or a cache of other rows.
    """
    distill = cfg.needed(DistillConfig)

    def open_cache() -> TeacherCache | None:
        check_tokenizer(distill, tokenizer)
        if distill.cached is None:
            return None
        columns = [one.layout.columns for one in (batches, held_out) if one is not None]
        return TeacherCache(distill.cached, columns, cfg.needed(DataConfig))

    cache = world().read(open_cache, lambda: None)
    if distill.cached is not None:
        return _cached(distill, cache, device)
    assert distill.teacher is not None
    own = cfg.needed(ModelConfig)
    kept_as = distill.teacher_dtype or own.dtype
    setting = "distill.teacher_streamed"
    link = open_link(device, f"{setting}=true", f"{setting}=false") if distill.teacher_streamed else None
    dtype, quantized_as = ("bfloat16", "nf4") if kept_as == "nf4" else (kept_as, "none")
    settings = own if distill.teacher == SELF else own.of_same_rows(distill.teacher)
    frozen = load_frozen(settings, device, cfg, ranks, link, dtype=dtype, quantize=quantize_as_loaded(quantized_as))
    num_bytes = sum(tensor.nbytes for tensor in (*frozen.parameters(), *frozen.buffers()))
    layers = "" if link is None else ", and its layers in the host's memory"
    say("teacher", f"{settings.path} in {kept_as}, {gibibytes(num_bytes)} in addition to the student{layers}")

    @torch.no_grad()
    def ask(batch: Batch) -> TeacherStates:
        return states_of(frozen, batch)

    return ask


def self_teacher(cfg: RecipeConfig, model: Decoder, optimizer: Optimizer) -> Teacher | None:
    """Return the student `model` as its own teacher, with the weights that `distill.teacher_kind` names; None if the
    teacher is another model in memory, or its cached predictions.

    The pass of the teacher computes each token of its batch once and keeps no activations. `optimizer` has the averages
    for `ema`.
    """
    kind = cfg.needed(DistillConfig).kind_of_self(has_adapter=cfg.group(LoRAConfig) is not None)
    if kind is None or kind == "model":
        return None
    changed: dict[str, Callable[[], AbstractContextManager[None]]] = {
        "adapter_off": lambda: adapter_off(model),
        "ema": lambda: averaged_weights(optimizer, model),
        "current": nullcontext,
    }
    say("teacher", f"the student itself, {_WEIGHTS_OF_SELF[kind]}")
    arithmetic = torch.autocast(model.device.type, torch.float16, enabled=cfg.needed(ModelConfig).dtype == "float16")

    def ask(batch: Batch) -> TeacherStates:
        with evaluating(model), changed[kind](), arithmetic:
            states = states_of(model, batch)
            if kind == "ema" and model.output_weight.requires_grad:
                # The loss reads it when the model has its own weights again.
                return states._replace(weight=states.weight.clone())
            return states

    return ask


_WEIGHTS_OF_SELF = {
    "adapter_off": "without its adapter: no memory",
    "ema": "with the averages of its weights (optimizer.ema): a copy of the output layer during a step",
    "current": "with the weights that train: no memory",
}


def states_of(model: Decoder, batch: Batch) -> TeacherStates:
    """Return a teacher's hidden states for a batch: at all positions, or if it reads other prompts than the student, at
    the targets alone. Call it without gradients."""
    read = batch.for_teacher
    hidden = model(**read.inputs, return_hidden=True)
    if read is not batch:
        _, hidden = select_targets(read.labels, read.num_targets, hidden)
    return TeacherStates(hidden, model.output_weight.detach(), model.config.logits_softcap)


def check_tokenizer(distill: DistillConfig, tokenizer: Tokenizer) -> None:
    """Raise ValueError if an id of the student's tokenizer is another token for the teacher, in memory or cached."""
    if distill.teacher == SELF:
        return
    if distill.cached is not None:
        setting, tokens = f"distill.cached={distill.cached}", read_about(distill.cached).get("tokens")
    else:
        setting, tokens = f"distill.teacher={distill.teacher}", tokens_of(load_tokenizer(str(distill.teacher)))
    if tokens is None:
        say("teacher", f"{setting} does not state its tokenizer (an earlier version): not compared")
        return
    for token_id, (token, to_teacher) in enumerate(zip_longest(tokens_of(tokenizer), tokens, fillvalue="")):
        if token and token != to_teacher:
            means = f"{to_teacher!r} for the teacher" if to_teacher else "no token for the teacher"
            raise ValueError(
                f"{setting} has a different tokenizer: id {token_id} is {token!r} for the student and {means}. "
                "Its predictions would be for other tokens. Choose a teacher with the student's tokenizer."
            )


def check_cached(distill: DistillConfig) -> dict[str, Any]:
    """Return the metadata of `distill.cached`. Raise ValueError if it does not fit these settings."""
    assert distill.cached is not None
    about = read_about(distill.cached)
    if about["temperature"] != distill.temperature:
        raise ValueError(
            f"distill.cached={distill.cached} has probabilities at temperature {about['temperature']:g}, but "
            f"distill.temperature is {distill.temperature:g}. The cache cannot be converted, because it has only the "
            f"most likely tokens. Set distill.temperature={about['temperature']:g}, or run leanft score again."
        )
    return about


def _cached(distill: DistillConfig, cache: TeacherCache | None, device: torch.device) -> Teacher:
    about = check_cached(distill)
    top_k, num_columns, vocab_size = about["top_k"], about["num_columns"], about["vocab_size"]
    if cache is None:  # in a plan

        def shapes(batch: Batch) -> TopLogProbs:
            num_targets = batch.num_targets
            ids = torch.zeros(num_targets, top_k, dtype=torch.int64, device=device)
            return TopLogProbs(torch.zeros(num_targets, num_columns, device=device), ids, vocab_size)

        return shapes
    say(
        "teacher",
        f"cached predictions of {about['model']} for {cache.num_documents:,} documents, top {top_k} tokens each",
    )

    def recall(batch: Batch) -> TopLogProbs:
        log_probs, ids = (torch.from_numpy(values).to(device, non_blocking=True) for values in cache.rows_of(batch))
        return TopLogProbs(log_probs, ids.long(), vocab_size)

    return recall
