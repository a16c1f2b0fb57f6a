"""The model folders of tests/export, and folders of the cases with their files."""

import copy
import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from lean_ft.export import export_gguf
from tests.export.conftest import make_model_folder, qwen_folder, qwen_tokenizer, run_directory, texts
from tests.gguf.cases import FAMILIES

__all__ = ["make_model_folder", "qwen_folder", "run_directory", "texts"]


@pytest.fixture(scope="session")
def exported(make_model_folder, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """A function that returns a case's folder and its file in float32, made once for all tests, which must change
    neither."""

    @functools.cache
    def export(case: str) -> tuple[Path, Path]:
        name, settings = FAMILIES[case]
        folder = make_model_folder(name, tokenizer=qwen_tokenizer(), **copy.deepcopy(settings))
        return folder, export_gguf(folder, tmp_path_factory.mktemp("exported") / "model.gguf", "f32").destination

    return export
