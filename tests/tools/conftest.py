from tests.tokenizers.conftest import make_folder

__all__ = ["make_folder"]
