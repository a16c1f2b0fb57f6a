"""lean_ft: fine-tuning recipes for language models in plain PyTorch."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lean_ft.export import export_adapter, export_folder, export_gguf, merge
    from lean_ft.export.upload import push
    from lean_ft.generation import generate, open_model
    from lean_ft.merging import MergeSettings, merge_models
    from lean_ft.models.hf_format import load_model
    from lean_ft.models.saving import save_model
    from lean_ft.notebook import evaluate, load_recipe, plan_run, plot, read_metrics, run
    from lean_ft.tokenizers import load_tokenizer

__version__ = "0.3.0"
__all__ = [
    "MergeSettings",
    "__version__",
    "evaluate",
    "export_adapter",
    "export_folder",
    "export_gguf",
    "generate",
    "load_model",
    "load_recipe",
    "load_tokenizer",
    "merge",
    "merge_models",
    "open_model",
    "plan_run",
    "plot",
    "push",
    "read_metrics",
    "run",
    "save_model",
]

_HOMES = {
    name: home
    for home, names in {
        "export": "export_adapter export_folder export_gguf merge",
        "generation": "generate open_model",
        "export.upload": "push",
        "merging": "MergeSettings merge_models",
        "models.hf_format": "load_model",
        "models.saving": "save_model",
        "notebook": "evaluate load_recipe plan_run plot read_metrics run",
        "tokenizers": "load_tokenizer",
    }.items()
    for name in names.split()
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
