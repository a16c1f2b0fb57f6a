"""What every test gets: one thread, an empty current directory, a skip without a GPU, and the real data if it is there."""

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

# Before torch is imported, here and in the processes that tests start: tests run side by side.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Those processes import this checkout from any folder.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
)

import pytest

from tests.hub.hub_server import HubServer


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests marked `gpu` where torch sees none; torch is imported only if there are any."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU, and torch sees none"))


def pytest_collection_finish() -> None:
    """Exempts what the imports made, millions of objects, from all later garbage collections."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def empty_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The current directory of every test: a new one, so that nothing depends on where pytest starts or on earlier runs."""
    before, folder = Path.cwd(), tmp_path_factory.mktemp("empty")
    os.chdir(folder)
    yield folder
    os.chdir(before)


@pytest.fixture(autouse=True)
def _current_directory_stays_empty(empty_folder: Path) -> Iterator[None]:
    """A test that writes to the current directory does so in a folder of its own, by `monkeypatch.chdir(tmp_path)`."""
    yield
    left = os.listdir(empty_folder)
    assert not left, f"written to the current directory, where later tests would find it: {left}"


@pytest.fixture(scope="session", autouse=True)
def _ctrl_c_reaches_tests() -> None:
    """A shell starts what it runs in the background with SIGINT ignored, and children inherit that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _products_in_their_own_type() -> Iterator[None]:
    """Loading a 16-bit model switches products to float32 for the whole process on some CPUs: not for the next test."""
    yield
    if module := sys.modules.get("lean_ft.models.float32_products"):
        module.use_float32_products(())


@pytest.fixture(scope="session", autouse=True)
def data_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where prepared data goes, in the processes that tests start as well: never into the user's cache, nor what is built."""
    folder = tmp_path_factory.mktemp("data_cache")
    os.environ["TORCH_EXTENSIONS_DIR"] = str(tmp_path_factory.mktemp("torch_extensions"))
    os.environ["LEAN_FT_CACHE"] = str(folder)
    return folder


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real inputs (GSM8K, tokenizers), which lies beside the checkout and is not part of it."""
    for parent in Path(__file__).resolve().parents:
        folder = parent / "shared" / "data"
        if folder.is_dir():
            return folder
    pytest.skip("no folder shared/data beside this checkout or above it")


@pytest.fixture
def hub_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """An empty hub on loopback, which this process and those it starts take for the real one; no cache and no token."""
    from huggingface_hub import constants

    home = tmp_path / "hf_home"
    with HubServer() as server:
        template = "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        for variable in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE", "HF_TOKEN_PATH"):
            monkeypatch.delenv(variable, raising=False)
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_HOME", str(home))
        yield server
