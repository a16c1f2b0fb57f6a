"""Export a trained model: a Hugging Face folder, one GGUF file for llama.cpp, or a folder of PyTorch's DCP."""

from lean_ft.export.dcp import export_dcp
from lean_ft.export.folder import export_adapter, export_folder, merge
from lean_ft.export.gguf import export_gguf, export_gguf_adapter
from lean_ft.export.places import Exported
from lean_ft.gguf.write import GGUF_KINDS

__all__ = [
    "GGUF_KINDS",
    "Exported",
    "export_adapter",
    "export_dcp",
    "export_folder",
    "export_gguf",
    "export_gguf_adapter",
    "merge",
]
