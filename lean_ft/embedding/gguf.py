"""What a GGUF file says about the vectors of a model, for llama.cpp's embeddings.

The file has the kind of pooling and the tokens around a text. It has no place for prompts and layers after pooling.

Source: llama.cpp, include/llama.h (llama_pooling_type) and src/llama-vocab.cpp.
"""

from pathlib import Path
from typing import Any

from lean_ft.embedding.folder import VectorsOf
from lean_ft.embedding.vectors import Pooling
from lean_ft.tokenizers import Tokenizer

_TYPES: dict[Pooling, int] = {"mean": 1, "cls": 2, "last": 3}


def metadata_of_vectors(folder: Path, architecture: str, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return metadata by key; empty for a model whose folder does not say that it makes vectors.

    Raises ValueError if llama.cpp would compute other vectors.
    """
    how = VectorsOf.read(folder)
    if how is None:
        return {}
    if how.dense:
        raise ValueError(f"{folder} has layers after pooling, which a GGUF file does not hold. Export it as a folder.")
    before, after = (part.tolist() for part in tokenizer.around)
    if len(before) > 1 or len(after) > 1:
        raise ValueError(
            f"{folder}: the tokenizer writes {len(before)} tokens before and {len(after)} after a text, and llama.cpp "
            "at most one. Export it as a folder."
        )
    named: dict[str, Any] = {"add_bos_token": bool(before), "add_eos_token": bool(after)}
    # llama.cpp ends a text with eos, so another token that ends texts is eos in the file, as in Qwen3-Embedding's.
    named |= {"bos_token_id": before[0]} if before else {}
    named |= {"eos_token_id": after[0]} if after else {}
    return {
        f"{architecture}.pooling_type": _TYPES[how.pooling],
        **{f"tokenizer.ggml.{key}": value for key, value in named.items()},
    }


def remark_about_vectors(folder: Path) -> str:
    """Return lines on what the user of a GGUF file must add; empty if there is nothing."""
    how = VectorsOf.read(folder)
    if how is None:
        return ""
    lines = [f"\nllama.cpp's embeddings have {how.pooling} pooling (llama-server --embeddings)."]
    for name, prompt in (("query", how.query_prompt), ("passage", how.passage_prompt)):
        lines += [f"\nPut {prompt!r} before each {name}: the file does not hold prompts."] if prompt else []
    if not how.normalize:
        lines.append("\nThe model's vectors are not scaled to length 1, and llama.cpp scales them by default.")
    return "".join(lines)
