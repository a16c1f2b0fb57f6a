"""Export a trained model: a Hugging Face folder, one GGUF file for llama.cpp, or a folder of PyTorch's DCP."""

from lean_ft.export.dcp import ExportedDCP, export_dcp
from lean_ft.export.folder import ExportedFolder, export_adapter, export_folder
from lean_ft.export.gguf_file import GGUF_KINDS, ExportedGGUF, export_gguf

__all__ = ["GGUF_KINDS", "ExportedDCP", "ExportedFolder", "ExportedGGUF"]
__all__ += ["export_adapter", "export_dcp", "export_folder", "export_gguf"]
