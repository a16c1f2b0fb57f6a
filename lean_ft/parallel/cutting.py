"""Split the computation of layers over ranks: by tokens of a row, by heads and features, and by experts.

The three can be combined. Neighboring ranks share a micro-batch, whose tokens are split over `parallel.context` x
`parallel.tensor` ranks. Each rank computes gradients from its own tokens, and FSDP sums them as for ranks with
different data. Unsupported combinations raise an error: from the settings before anything is loaded, from the model's
shapes before it takes memory.
"""

from lean_ft.data.batch import PADDED_TO_MULTIPLE_OF
from lean_ft.models import Decoder
from lean_ft.models.frozen_weight import quantized_weights
from lean_ft.parallel import context, experts, tensor
from lean_ft.parallel.ranks import CONTEXT, TENSOR, ManyRanks
from lean_ft.settings import (
    DataConfig,
    DistillConfig,
    LoRAConfig,
    OptimizerConfig,
    ParallelConfig,
    RecipeConfig,
    ReferenceConfig,
)
from lean_ft.settings.base import Settings
from lean_ft.system.shards import Ranks


def cut(model: Decoder, cfg: ParallelConfig, ranks: Ranks) -> None:
    """Split the model's layers as the settings say; a no-op for a single process.

    Call it after adding adapters and before `apply_memory`. Raises ValueError, before changing anything, if the model
    cannot be split.
    """
    if not isinstance(ranks, ManyRanks):
        return
    if (cfg.tensor > 1 or cfg.experts > 1) and (quantized := quantized_weights(model)):
        form = next(iter(quantized.values())).form.kind
        raise ValueError(
            "parallel.tensor and parallel.experts divide matrices and stacks of experts, and quantized weights are "
            f"not divided; this model has weights in {form}. Set lora.quantize=none, or parallel.tensor=1 and "
            "parallel.experts=1."
        )
    ranks.layers_are_cut.add(model)
    if cfg.tensor > 1:
        tensor.check_divides(model, cfg.tensor)
    if cfg.context > 1:
        context.check_heads(model, cfg.context, cfg.tensor)
    if cfg.experts > 1:
        experts.check_experts(model, cfg.experts)
    if ranks.num_sharing > 1:
        place = ranks.rank % ranks.num_sharing // cfg.tensor
        group = ranks.groups["tokens"].group_name
        model.sharding.row_tokens = context.RowTokens(group, cfg.context, place, ranks.num_sharing)
    if cfg.tensor > 1:
        tensor.cut_layers(model, ranks)
    if cfg.context > 1:
        context.exchange_heads(model, ranks)
    if cfg.experts > 1:
        experts.cut_experts(model, ranks)


def refuse_cuts(cfg: RecipeConfig) -> None:
    """Raise ValueError for settings that cannot be combined with `parallel`."""
    parallel = cfg.group(ParallelConfig)
    if parallel is None:
        return
    _refuse_rows(cfg, parallel)

    def has(group: type[Settings], name: str, value: object) -> bool:
        return getattr(cfg.group(group), name, None) == value

    whole = "it needs whole layers on each process"
    with_whole_layers = {
        "reference.kind=nf4": (has(ReferenceConfig, "kind", "nf4"), whole),
        "reference.kind=streamed": (has(ReferenceConfig, "kind", "streamed"), whole),
        "distill.teacher_dtype=nf4": (has(DistillConfig, "teacher_dtype", "nf4"), whole),
        "distill.teacher_streamed=true": (has(DistillConfig, "teacher_streamed", True), whole),
    }
    if parallel.tensor > 1:
        lora, on_several = cfg.group(LoRAConfig), "would be on several processes"
        has_dropout = lora is not None and lora.dropout > 0
        with_whole_matrices = {
            "lora.quantize=nf4": (has(LoRAConfig, "quantize", "nf4"), "blocks of whole matrices share scales"),
            "lora.dora=true": (has(LoRAConfig, "dora", True), f"a row, whose norm DoRA needs, {on_several}"),
            "lora.dropout": (has_dropout, "each process would drop different features of a token"),
            "optimizer.name=adafactor": (
                has(OptimizerConfig, "name", "adafactor"),
                f"a row, whose mean it needs, {on_several}",
            ),
        }
        _refuse(f"parallel.tensor={parallel.tensor}", with_whole_layers | with_whole_matrices)
    if parallel.experts > 1:
        compiled = {"compile=true": (cfg.compile, "the number of tokens per expert is known only after routing")}
        _refuse(f"parallel.experts={parallel.experts}", with_whole_layers | compiled)


def _refuse_rows(cfg: RecipeConfig, parallel: ParallelConfig) -> None:
    """Refuse rows of tokens that the ranks sharing a row do not divide, and settings that need whole rows."""
    num_sharing, data, distill = parallel.context * parallel.tensor, cfg.group(DataConfig), cfg.group(DistillConfig)
    if num_sharing == 1:
        return
    setting = "parallel." + " x ".join(
        f"{name}={n}" for name in (CONTEXT, TENSOR) if (n := getattr(parallel, name)) > 1
    )
    has_cache = distill is not None and distill.cached is not None
    whole_rows = {
        f"neftune_alpha={cfg.neftune_alpha:g}": (cfg.neftune_alpha > 0, "the noise is drawn for whole rows"),
        "distill.cached": (has_cache, "the cache has whole documents"),
    }
    _refuse(setting, whole_rows)
    is_fixed = data is not None and data.packing in ("bfd", "bfd_split", "wrapped")
    padded = f"a multiple of {PADDED_TO_MULTIPLE_OF}"
    if data is None:  # rows are sampled completions
        widths = padded if PADDED_TO_MULTIPLE_OF % num_sharing else ""
        fix = f"values whose product divides {PADDED_TO_MULTIPLE_OF}"
    else:
        divides = data.max_length % num_sharing == 0 and (is_fixed or PADDED_TO_MULTIPLE_OF % num_sharing == 0)
        widths = (
            "" if divides else f"data.max_length={data.max_length} tokens" + ("" if is_fixed else f", or {padded},")
        )
        fix = f"a data.max_length that {num_sharing} divides" + ("" if is_fixed else ", with data.packing=bfd")
    if widths:
        raise ValueError(
            f"{setting} splits each row evenly over {num_sharing} processes, but rows of {widths} do not divide "
            f"evenly. Set {fix}."
        )


def _refuse(setting: str, reasons: dict[str, tuple[bool, str]]) -> None:
    for other, (is_set, reason) in reasons.items():
        if is_set:
            raise ValueError(f"{setting} cannot be combined with {other}: {reason}. Remove one of them.")
