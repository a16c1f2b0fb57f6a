"""What a layer computes, cut over ranks: by tokens of a row, by heads and features, by experts.

The three go together. Neighbouring ranks share a micro-batch, whose tokens are cut over `parallel.context` x `parallel.tensor`
of them; what every parameter gets from a rank's own tokens, FSDP sums over them as over ranks with other data. What cannot be
cut is refused by name: from the settings alone before anything is read, from the model's shapes before it takes memory.
"""

from lean_ft.data.batch import PADDED_TO_MULTIPLE_OF
from lean_ft.models import Decoder
from lean_ft.parallel import context, experts, tensor
from lean_ft.parallel.ranks import CONTEXT, EXPERTS, TENSOR, ManyRanks
from lean_ft.settings import (
    DataConfig,
    DistillConfig,
    LoRAConfig,
    OptimizerConfig,
    ParallelConfig,
    RecipeConfig,
    ReferenceConfig,
)
from lean_ft.system.shards import Ranks


def cut(model: Decoder, cfg: ParallelConfig, ranks: Ranks) -> None:
    """Cuts the layers of the model as the settings say; where these are all 1, as on one device, does nothing.

    Call it after adapters are there and before `apply_memory`. Raises ValueError, before it changes anything, where the
    model cannot be cut so.
    """
    if not isinstance(ranks, ManyRanks):
        return
    ranks.layers_are_cut.add(model)
    if cfg.tensor > 1:
        tensor.check_divides(model, cfg.tensor)
    if cfg.context > 1:
        tensor.refuse_states(model, f"parallel.context={cfg.context}")
        context.check_heads(model, cfg.context, cfg.tensor)
    if cfg.experts > 1:
        experts.check_experts(model, cfg.experts)
    if ranks.num_sharing > 1:
        model.sharding.row_tokens = context.RowTokens(
            ranks.groups["tokens"].group_name,
            cfg.context,
            ranks.rank % ranks.num_sharing // cfg.tensor,
            ranks.num_sharing,
        )
    if cfg.tensor > 1:
        tensor.cut_layers(model, ranks)
    if cfg.context > 1:
        context.exchange_heads(model, ranks)
    if cfg.experts > 1:
        experts.cut_experts(model, ranks)


def refuse_cuts(cfg: RecipeConfig) -> None:
    """Raises ValueError where settings of a run do not go with how `parallel` cuts layers."""
    parallel = cfg.group(ParallelConfig)
    if parallel is None:
        return
    _refuse_rows(cfg, parallel)
    lora, optimizer = cfg.group(LoRAConfig), cfg.group(OptimizerConfig)
    whole_layers = {
        "lora.quantize=nf4": (
            lora is not None and lora.quantize != "none",
            "scales are shared by blocks of whole matrices",
        ),
        "lora.dora=true": (lora is not None and lora.dora, "the norm of a row would lie on several processes"),
        "lora.dropout": (lora is not None and lora.dropout > 0, "each process would drop other features of a token"),
        "optimizer.name=adafactor": (
            optimizer is not None and optimizer.name == "adafactor",
            "means of rows would lie on several processes",
        ),
    }
    reference, distill = cfg.group(ReferenceConfig), cfg.group(DistillConfig)
    whole = "each process has its layers whole"
    in_no_parts = {
        "reference.kind=nf4": (reference is not None and reference.kind == "nf4", whole),
        "reference.kind=streamed": (reference is not None and reference.kind == "streamed", whole),
        "distill.teacher_dtype=nf4": (distill is not None and distill.teacher_dtype == "nf4", whole),
        "distill.teacher_streamed=true": (distill is not None and distill.teacher_streamed, whole),
    }
    for name in (TENSOR, EXPERTS):
        if (number := getattr(parallel, name)) > 1:
            _refuse(f"parallel.{name}={number}", in_no_parts)
    if parallel.tensor > 1:
        _refuse(f"parallel.tensor={parallel.tensor}", whole_layers)
    if parallel.experts > 1:
        _refuse(
            f"parallel.experts={parallel.experts}",
            {"compile=true": (cfg.compile, "how many tokens come to an expert is known when the router has spoken")},
        )


def _refuse_rows(cfg: RecipeConfig, parallel: ParallelConfig) -> None:
    """Refuses rows of tokens that the ranks which share one do not divide, and what wants whole rows."""
    num_sharing, data, distill = parallel.context * parallel.tensor, cfg.group(DataConfig), cfg.group(DistillConfig)
    if num_sharing == 1:
        return
    setting = " x ".join(f"{name}={n}" for name in (CONTEXT, TENSOR) if (n := getattr(parallel, name)) > 1)
    _refuse(
        f"parallel.{setting}",
        {
            f"neftune_alpha={cfg.neftune_alpha:g}": (cfg.neftune_alpha > 0, "the noise is of whole rows"),
            "distill.cached": (
                distill is not None and distill.cached is not None,
                "what was kept of a document is of all its tokens",
            ),
        },
    )
    if data is None:  # answers of the model's own
        if PADDED_TO_MULTIPLE_OF % num_sharing:
            raise ValueError(
                f"parallel.{setting} gives {num_sharing} processes as many tokens of each row, and rows of answers are padded to a "
                f"multiple of {PADDED_TO_MULTIPLE_OF}. Set them so that they multiply to a divisor of that."
            )
        return
    is_fixed = data.packing in ("bfd", "bfd_split", "wrapped")
    if data.max_length % num_sharing or (not is_fixed and PADDED_TO_MULTIPLE_OF % num_sharing):
        widths = f"data.max_length={data.max_length}" + (
            "" if is_fixed else f" tokens, or a multiple of {PADDED_TO_MULTIPLE_OF},"
        )
        raise ValueError(
            f"parallel.{setting} gives {num_sharing} processes as many tokens of each row, and rows of {widths} do not go "
            f"round. Set a data.max_length that {num_sharing} divides"
            + ("." if is_fixed else ", with data.packing=bfd.")
        )


def _refuse(setting: str, reasons: dict[str, tuple[bool, str]]) -> None:
    for other, (is_set, reason) in reasons.items():
        if is_set:
            raise ValueError(f"{setting} does not go with {other}: {reason}. Leave one of them out.")
