"""lean_ft: fine-tuning recipes for language models in plain PyTorch."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lean_ft.generation import generate, open_model
    from lean_ft.models.hf_format import load_model, save_model
    from lean_ft.notebook import load_recipe, plot, read_metrics, run
    from lean_ft.tokenizers import load_tokenizer

__version__ = "0.2.0"
__all__ = [
    "__version__",
    "generate",
    "load_model",
    "load_recipe",
    "load_tokenizer",
    "open_model",
    "plot",
    "read_metrics",
    "run",
    "save_model",
]

_HOMES = {
    "generate": "generation",
    "load_model": "models.hf_format",
    "load_recipe": "notebook",
    "load_tokenizer": "tokenizers",
    "open_model": "generation",
    "plot": "notebook",
    "read_metrics": "notebook",
    "run": "notebook",
    "save_model": "models.hf_format",
}


def __getattr__(name: str) -> Any:
    """Import on first use, so that `import lean_ft` and `leanft --help` never wait for torch."""
    from importlib import import_module

    if name in _HOMES:
        return getattr(import_module(f"lean_ft.{_HOMES[name]}"), name)
    if name in _submodules():
        return import_module(f"lean_ft.{name}")
    raise AttributeError(f"module 'lean_ft' has no attribute {name!r}")


def __dir__() -> list[str]:
    packages = (name for name, is_package in _submodules().items() if is_package)
    return sorted({*__all__, *packages, *(name for name in globals() if name.startswith("__"))})


def _submodules() -> dict[str, bool]:
    """Names of the submodules, and whether each is a package."""
    from pkgutil import iter_modules

    return {module.name: module.ispkg for module in iter_modules(__path__) if not module.name.startswith("_")}
