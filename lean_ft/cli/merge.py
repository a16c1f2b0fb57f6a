"""`leanft merge`: merge models, or adapters of one model, into a new one."""

from pathlib import Path
from typing import Annotated

import typer

from lean_ft.cli.arguments import Debug, OwnFamily
from lean_ft.cli.output import print_lines


def merge(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...",
            help="Two or more models: checkpoints, runs (their newest checkpoint), folders or Hub repositories. All "
            "whole models, or all adapters of one model.",
            show_default=False,
        ),
    ],
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="FOLDER", help="The new folder.", show_default=False)
    ],
    method: Annotated[
        str, typer.Option("--method", "-m", metavar="linear|ties|dare|dare_ties|slerp", help="How to merge.")
    ] = "linear",
    weights: Annotated[
        list[str] | None,
        typer.Option("--weights", "-w", metavar="NUMBERS", help="A number per model: 0.7,0.3. Default: 1 for each."),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(
            "--base",
            metavar="MODEL",
            help="The model that the others were trained from, for ties and dare. For adapters: the base of all.",
        ),
    ] = None,
    density: Annotated[
        float | None,
        typer.Option(
            "--density", metavar="SHARE", help="For ties and dare: share of each model's changes to keep, such as 0.5."
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="For dare: seed of the random masks. Default: 0.")] = None,
    rescale: Annotated[
        str | None,
        typer.Option(
            "--rescale",
            metavar="l1|density|none",
            help="For dare: enlarge what is kept to the same sum of magnitudes (l1, the default) or by 1 / density.",
        ),
    ] = None,
    t: Annotated[
        float | None, typer.Option("--t", help="For slerp: from the first model (0) to the second (1). Default: 0.5.")
    ] = None,
    normalize: Annotated[
        bool | None,
        typer.Option(
            "--normalize/--no-normalize",
            help="Divide by the sum of the weights, or not. Default: yes for linear and ties, no for dare.",
        ),
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option("--rank", help="For adapters: rank of the result, by an SVD whose error is printed."),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            metavar="bfloat16|float16|float32",
            help="Dtype of the result. Default: the first model's; for adapters float32.",
        ),
    ] = None,
    max_shard_size: Annotated[
        str | None,
        typer.Option("--max-shard-size", metavar="SIZE", help="Maximum size of a weight file. Default: 5GB."),
    ] = None,
    chat_template: Annotated[
        str | None,
        typer.Option(
            "--chat-template", metavar="MODEL|FILE", help="Whose chat template to use, if the models' differ."
        ),
    ] = None,
    family: OwnFamily = None,
    force: Annotated[bool, typer.Option("--force", "-f", help="Overwrite an earlier merge or export.")] = False,
    debug: Debug = False,
) -> None:
    """Merge models into a new Hugging Face folder, or LoRA adapters of one model into a new adapter.

    linear averages weights, ties and dare combine changes from a base model, and slerp interpolates two models.
    Models that differ in vocabulary, shapes, configuration or chat template are refused by name.
    """
    from lean_ft.merging import MergeSettings, merge_models

    models, numbers = _apart(models, weights)
    settings = MergeSettings(
        method=method,
        weights=numbers,
        normalize=normalize,
        density=density,
        rescale=rescale,
        seed=seed,
        t=t,
        base=base,
        dtype=dtype,
        max_shard_size=max_shard_size,
        chat_template=chat_template,
        rank=rank,
    )
    print_lines(str(merge_models(models, output, settings, force=force)))


def _apart(words: list[str], weights: list[str] | None) -> tuple[list[str], list[float] | None]:
    """Divide the arguments into models and weights: a shell passes the second number of `--weights 0.7 0.3` as an
    argument."""
    given = [number for word in weights or [] for number in word.replace(",", " ").split()]
    loose = [word for word in words if weights and _is_number(word) and not Path(word).exists()]
    if wrong := [word for word in given if not _is_number(word)]:
        raise ValueError(f"--weights: {wrong[0]!r} is not a number. Give a number per model, such as 0.7,0.3.")
    models = [word for word in words if word not in loose]
    return models, [float(word) for word in [*given, *loose]] or None


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
