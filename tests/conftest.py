"""For every test: one thread, an empty current directory, a skip without a GPU, and the shared data if present."""

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

# Before torch is imported, here and in child processes, because tests run in parallel.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Child processes import this checkout from any folder.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
)

# Tests start hundreds of processes. Without bytecode, each would compile lean_ft again, and pytest would rewrite every
# test file. It stays beside the sources: with
# PYTHONPYCACHEPREFIX, Python would ignore the bytecode of installed packages too, and compile torch again.
if sys.dont_write_bytecode:
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import pytest

from tests import selection
from tests.hub.hub_server import HubServer


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--covering", action="store_true", help="one case of each test that has no case in the default set"
    )
    parser.addoption("--lane", metavar="I/N", help="the I-th of N parts of the selected tests, of equal CPU time")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Mark what is long, let pytest select by marks, then take the covering set or a lane."""
    selection.mark_long(items)
    if config.getoption("covering"):
        items[:] = selection.covering(items)
    yield
    if lane := config.getoption("lane"):
        number, _, lanes = lane.partition("/")
        items[:] = selection.lane(items, int(number), int(lanes))
    _skip_without_gpu(items)


def _skip_without_gpu(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` without a GPU. Imports torch only if there are such tests."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU, and torch sees none"))


def pytest_collection_finish() -> None:
    """Exempt the millions of objects that imports created from garbage collection."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _imports_are_exempt() -> Iterator[None]:
    """So are those of the tests of a file: with transformers' models loaded, a collection takes seconds."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def empty_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A new current directory for every test, so that tests depend neither on pytest's directory nor on earlier
    runs."""
    before, folder = Path.cwd(), tmp_path_factory.mktemp("empty")
    os.chdir(folder)
    yield folder
    os.chdir(before)


@pytest.fixture(autouse=True)
def _current_directory_stays_empty(empty_folder: Path) -> Iterator[None]:
    """Tests that write to the current directory must call `monkeypatch.chdir(tmp_path)`."""
    yield
    left = os.listdir(empty_folder)
    assert not left, f"written to the current directory, where later tests would find it: {left}"


@pytest.fixture(scope="session", autouse=True)
def _ctrl_c_reaches_tests() -> None:
    """Restore SIGINT, which shells ignore in background processes and children inherit."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _products_in_their_own_type() -> Iterator[None]:
    """Undo the switch to float32 products, which loading a 16-bit model makes for the whole process on some CPUs."""
    yield
    if module := sys.modules.get("lean_ft.models.float32_products"):
        module.use_float32_products(())


@pytest.fixture(scope="session", autouse=True)
def data_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Caches for tests and their processes, so that they never use the user's cache."""
    folder = tmp_path_factory.mktemp("data_cache")
    os.environ["TORCH_EXTENSIONS_DIR"] = str(tmp_path_factory.mktemp("torch_extensions"))
    os.environ["LEAN_FT_CACHE"] = str(folder)
    return folder


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real inputs (GSM8K, tokenizers) next to the checkout."""
    for parent in Path(__file__).resolve().parents:
        folder = parent / "shared" / "data"
        if folder.is_dir():
            return folder
    pytest.skip("no folder shared/data beside this checkout or above it")


@pytest.fixture
def hub_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """An empty Hub server on loopback for this process and its children; no cache and no token."""
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
