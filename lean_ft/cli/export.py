"""`leanft export`: export a run's model for other software."""

from typing import Annotated

import typer

from lean_ft.cli.arguments import Debug, OwnFamily
from lean_ft.cli.output import print_lines

_CANNOT_COMBINE = {
    "--adapter": {"--dtype", "--max-shard-size", "--dcp", "--merge", "--keep-vision", "--ollama"},
    "--keep-vision": {"--gguf"},
    "--dcp": {"--gguf", "--max-shard-size", "--keep-vision"},
    "--gguf": {"--dtype", "--max-shard-size"},  # it sets how numbers are stored, and writes one file
}


def export(
    source: Annotated[
        str,
        typer.Argument(
            metavar="CHECKPOINT|RUN",
            help="A checkpoint, a run directory (its newest checkpoint), or any model folder.",
            show_default=False,
        ),
    ],
    destination: Annotated[
        str, typer.Argument(metavar="DEST", help="A new folder, or with --gguf a new file.", show_default=False)
    ],
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype", metavar="bfloat16|float16|float32", help="Dtype of the weights. Default: the stored dtype."
        ),
    ] = None,
    max_shard_size: Annotated[
        str | None,
        typer.Option("--max-shard-size", metavar="SIZE", help="Maximum size of a weight file. Default: 5GB."),
    ] = None,
    gguf: Annotated[
        str | None,
        typer.Option(
            "--gguf",
            metavar="KIND",
            help="Write one GGUF file for llama.cpp instead: f32, f16, bf16, q8_0, q6_k, q5_k_m, q4_k_m, q4_0, iq4_nl "
            "or mxfp4.",
        ),
    ] = None,
    dcp: Annotated[
        bool, typer.Option("--dcp", help="Write a torch.distributed.checkpoint (DCP) folder instead.")
    ] = False,
    merge: Annotated[
        bool, typer.Option("--merge", help="For an adapter: export the base model with merged weights.")
    ] = False,
    adapter: Annotated[
        bool,
        typer.Option("--adapter", help="For an adapter: export only the adapter, in PEFT's format or with --gguf."),
    ] = False,
    ollama: Annotated[
        bool, typer.Option("--ollama", help="With --gguf: also write a Modelfile next to DEST, for `ollama create`.")
    ] = False,
    base: Annotated[
        str | None,
        typer.Option(
            "--base",
            metavar="MODEL",
            help="Where the base model is, if it has moved. Used with --merge, --keep-vision or --adapter --gguf.",
        ),
    ] = None,
    keep_vision: Annotated[
        bool,
        typer.Option(
            "--keep-vision",
            help="For a model that also reads images: export all of it, with the untrained parts unchanged.",
        ),
    ] = False,
    family: OwnFamily = None,
    force: Annotated[bool, typer.Option("--force", "-f", help="Overwrite an earlier export at DEST.")] = False,
    debug: Debug = False,
) -> None:
    """Export a model as a Hugging Face folder, a GGUF file or a DCP folder.

    An adapter is exported merged into its model (--merge) or alone (--adapter, also with --gguf).
    A Hugging Face folder is read back, and its logits are compared with the source's, before DEST appears.
    """
    from lean_ft.export import export_adapter, export_dcp, export_folder, export_gguf, export_gguf_adapter
    from lean_ft.export.places import sentences_not_in_files

    options = {"--dtype": dtype, "--max-shard-size": max_shard_size, "--gguf": gguf, "--base": base}
    flags = {"--dcp": dcp, "--merge": merge, "--keep-vision": keep_vision, "--adapter": adapter, "--ollama": ollama}
    used = {name for name, value in options.items() if value is not None} | {name for name, on in flags.items() if on}
    for option, excluded in _CANNOT_COMBINE.items():
        if option in used and (conflicting := sorted(used & excluded)):
            raise ValueError(f"{option} cannot be combined with {', '.join(conflicting)}. Remove one of them.")
    if base is not None and not merge and not keep_vision and not (adapter and gguf):
        raise ValueError(
            "--base is only used with --merge, --keep-vision, or --adapter and --gguf. Add one of them, or remove "
            "--base."
        )
    if gguf is None and ollama:
        raise ValueError("--ollama is only used with --gguf. Add --gguf q4_k_m, or remove --ollama.")
    if adapter and gguf is not None:
        print_lines(str(export_gguf_adapter(source, destination, gguf, force, base)))
    elif adapter:
        folder = export_adapter(source, destination, force)
        print_lines(f"exported {folder} to {destination}, in PEFT's format.")
        for sentence in sentences_not_in_files(folder):
            print_lines(f"Not in the files: {sentence}.")
    elif gguf is not None:
        print_lines(str(export_gguf(source, destination, gguf, force, merge, base, ollama)))
    elif dcp:
        print_lines(str(export_dcp(source, destination, dtype, force, merge, base)))
    else:
        size = max_shard_size or "5GB"
        print_lines(str(export_folder(source, destination, dtype, size, force, merge, base, keep_vision)))
