"""lean_ft: fine-tuning recipes for language models in plain PyTorch."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lean_ft.models.hf_format import load_model, save_model
    from lean_ft.tokenizers import load_tokenizer

__version__ = "0.1.0"
__all__ = ["__version__", "load_model", "load_tokenizer", "save_model"]

_HOMES = {
    "load_model": "lean_ft.models.hf_format",
    "save_model": "lean_ft.models.hf_format",
    "load_tokenizer": "lean_ft.tokenizers",
}


def __getattr__(name: str) -> Any:
    """Imports on first use, so that `import lean_ft` and `leanft --help` never wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'lean_ft' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
