"""A finished model on its way out: a plain Hugging Face folder, or one GGUF file for llama.cpp."""

from lean_ft.export.folder import ExportedFolder, export_adapter, export_folder
from lean_ft.export.gguf_file import GGUF_KINDS, ExportedGGUF, export_gguf

__all__ = ["GGUF_KINDS", "ExportedFolder", "ExportedGGUF", "export_adapter", "export_folder", "export_gguf"]
