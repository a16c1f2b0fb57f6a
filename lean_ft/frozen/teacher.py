"""The teacher of a distillation: a frozen model, or the cached outputs of one for the same rows.

`teacher(batch)` returns the input of `linear_distillation`. A teacher with another tokenizer is refused, since token
ids must mean the same for both models.
"""

from itertools import zip_longest
from typing import Any

import torch

from lean_ft.data import Batch, Batches, EvalBatches
from lean_ft.frozen.frozen_model import load_frozen
from lean_ft.frozen.teacher_cache import TeacherCache, read_about, tokens_of
from lean_ft.losses import Teacher, TeacherStates, TopLogProbs
from lean_ft.peft import quantize_as_loaded
from lean_ft.settings import DataConfig, DistillConfig, ModelConfig, RecipeConfig
from lean_ft.system.host_link import open_link
from lean_ft.system.log import say
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
    kept_as = distill.teacher_dtype or cfg.needed(ModelConfig).dtype
    setting = "distill.teacher_streamed"
    link = open_link(device, f"{setting}=true", f"{setting}=false") if distill.teacher_streamed else None
    dtype, quantized_as = ("bfloat16", "nf4") if kept_as == "nf4" else (kept_as, "none")
    settings = cfg.needed(ModelConfig).of_same_rows(distill.teacher)
    frozen = load_frozen(settings, device, cfg, ranks, link, dtype=dtype, quantize=quantize_as_loaded(quantized_as))
    num_bytes = sum(tensor.nbytes for tensor in (*frozen.parameters(), *frozen.buffers()))
    layers = "" if link is None else ", and its layers in the host's memory"
    say("teacher", f"{distill.teacher} in {kept_as}, {gibibytes(num_bytes)} in addition to the student{layers}")

    @torch.no_grad()
    def ask(batch: Batch) -> TeacherStates:
        hidden = frozen(**batch.inputs, return_hidden=True)
        return TeacherStates(hidden, frozen.output_weight, frozen.config.logits_softcap)

    return ask


def check_tokenizer(distill: DistillConfig, tokenizer: Tokenizer) -> None:
    """Raise ValueError if an id of the student's tokenizer is another token for the teacher, in memory or cached."""
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
