"""Two ranks that sample with a server learn what one process does: rank 0 alone speaks with it."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from lean_ft.settings.text import load_config
from lean_ft.system.catalog import find_recipe, load_recipe
from tests.online.vllm_standin import Server
from tests.parallel.processes import on_ranks, supported
from tests.parallel.test_grpo import SETTINGS, numbers, samples
from tests.training.toy_runs import digests

pytestmark = pytest.mark.long
GIVEN = (*SETTINGS, "generation.engine=vllm", "loss.correction=token_truncate", "eval_every=0", "optimizer.lr=1e-3")
SAME_BITS = {
    "full": (),
    "an adapter": ("lora.rank=4",),
    "a merged adapter": ("lora.rank=4", "generation.engine_weights=merged"),
    "4 bits": ("lora.rank=4", "lora.quantize=nf4", "generation.engine_weights=merged"),
    "ahead": ("generation.ahead=1",),
}
CUTS = supported({"tensor": ("parallel.tensor=2", "optimizer.name=sgd")})


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        server.facts["lora_config"] = {"max_lora_rank": 4}
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def run(folder: Path, *settings: str) -> None:
    recipe = load_recipe(find_recipe("grpo"))
    recipe.main(load_config(recipe.Config, None, [*GIVEN, f"output_dir={folder}", *settings]))


def run_both(server: Server, folder: Path, *settings: str) -> None:
    """Run with two ranks and with one, each with a server of the first weights."""
    url = f"generation.engine_url=http://127.0.0.1:{server.server_port}"
    prompts = list[list[list[int]]]()
    for name, ranks in (("two", 2), ("one", 1)):
        server.restart()
        server.prompts.clear()
        given = [one for one in settings if ranks > 1 or "parallel" not in one]
        if ranks > 1:
            on_ranks(ranks, run, folder / name, url, *given, timeout=600)
        else:
            run(folder / name, url, *given)
        prompts.append(sorted(server.prompts))
    assert prompts[0] == prompts[1]
    assert samples(folder / "two") == samples(folder / "one")


@pytest.mark.parametrize("name", SAME_BITS)
def test_two_ranks_write_the_files_of_one(server: Server, tmp_path: Path, name: str) -> None:
    run_both(server, tmp_path, *SAME_BITS[name])
    assert digests(tmp_path / "two" / "step_00000003") == digests(tmp_path / "one" / "step_00000003")
    for row, expected in zip(numbers(tmp_path / "two"), numbers(tmp_path / "one"), strict=True):
        assert row == pytest.approx(expected, rel=1e-6), row["step"]


@pytest.mark.parametrize("name", CUTS)
def test_ranks_that_cut_layers_learn_what_one_does(server: Server, tmp_path: Path, name: str) -> None:
    run_both(server, tmp_path, *CUTS[name])
    for row, expected in zip(numbers(tmp_path / "two"), numbers(tmp_path / "one"), strict=True):
        assert row == pytest.approx(expected, rel=1e-5, abs=1e-5), row["step"]
