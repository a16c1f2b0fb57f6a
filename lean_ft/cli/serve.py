"""`leanft serve`: serve a checkpoint through the OpenAI chat API."""

import os
from pathlib import Path
from typing import Annotated

import typer

from lean_ft.cli.arguments import Debug, OwnFamily
from lean_ft.system.installation import install_command


def serve(
    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="CHECKPOINT|RUN",
            help="A checkpoint, a run, an adapter, any model folder, or org/name.",
            show_default=False,
        ),
    ],
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            "--adapter", metavar="FOLDER", help="Adapter to apply. Several adapters are summed.", show_default=False
        ),
    ] = None,
    host: Annotated[
        str,
        typer.Option(
            help="Address to listen on. Addresses other than loopback require the environment variable LEANFT_TOKEN."
        ),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port. 0 selects a free port.")] = 8000,
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="Model name in the API. Default: the folder's name.")
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="Maximum completion tokens of a request that sets no limit.")
    ] = 1024,
    device: Annotated[str, typer.Option("--device", metavar="auto|cuda|cpu|mps", help="Device.")] = "auto",
    dtype: Annotated[
        str, typer.Option("--dtype", metavar="bfloat16|float32|float16", help="Dtype of weights and computation.")
    ] = "bfloat16",
    images: Annotated[
        bool, typer.Option("--images/--no-images", help="Load the vision tower of a model that has one.")
    ] = True,
    family: OwnFamily = None,
    debug: Debug = False,
) -> None:
    """Serve a model through the OpenAI chat API, for testing: chat completions, whole or streamed, with tools.

    A model with a vision tower also reads images, as data URLs in parts of the type `image_url`.

    A model for embeddings, or a reranker, is served at /v1/embeddings or /v1/rerank instead.

    If the variable LEANFT_TOKEN is set, requests must send it as their API key.
    """
    from lean_ft.generation import open_model

    try:
        from lean_ft.generation.embedding_server import open_server
        from lean_ft.generation.server import ChatServer
    except ModuleNotFoundError as error:
        raise ValueError(f"leanft serve needs the package {error.name}. Run {install_command('serve')}") from None
    from lean_ft.system.log import say

    name, token = name or Path(checkpoint).expanduser().resolve().name, os.environ.get("LEANFT_TOKEN")
    server = None if adapter else open_server(checkpoint, name, device, dtype, host, port, token)
    if server is None:
        tower = "auto" if images else "none"
        model, tokenizer = open_model(
            checkpoint, adapter or (), device, new_tokens=max_new_tokens, dtype=dtype, images=tower
        )
        of_chats = {"host": host, "port": port, "max_new_tokens": max_new_tokens, "token": token}
        server = ChatServer(model, tokenizer, name, **of_chats)
    say("serving", f"{server.name} at {server.url}, until Ctrl-C")
    with server:
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            say("stopped", "by Ctrl-C")
