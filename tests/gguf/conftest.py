"""The model folders of tests/export."""

from tests.export.conftest import make_model_folder, qwen_folder, run_directory, texts  # noqa: F401
