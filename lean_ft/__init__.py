"""lean_ft: fine-tuning recipes for language models in plain PyTorch."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lean_ft.generation import generate, open_model
    from lean_ft.models.hf_format import load_model, save_model
    from lean_ft.notebook import load_recipe, run
    from lean_ft.tokenizers import load_tokenizer

__version__ = "0.2.0"
__all__ = [
    "__version__",
    "generate",
    "load_model",
    "load_recipe",
    "load_tokenizer",
    "open_model",
    "run",
    "save_model",
]

_HOMES = {
    "generate": "lean_ft.generation",
    "load_model": "lean_ft.models.hf_format",
    "load_recipe": "lean_ft.notebook",
    "load_tokenizer": "lean_ft.tokenizers",
    "open_model": "lean_ft.generation",
    "run": "lean_ft.notebook",
    "save_model": "lean_ft.models.hf_format",
}


def __getattr__(name: str) -> Any:
    """Imports on first use, so that `import lean_ft` and `leanft --help` never wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'lean_ft' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
