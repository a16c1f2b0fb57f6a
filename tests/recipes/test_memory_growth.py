"""Resident memory does not grow during a long run."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from lean_ft.training import rss_bytes

pytestmark = pytest.mark.skipif(rss_bytes() is None, reason="resident size is read from /proc")

FIRST_STEP = 5
FULL = {
    "model.dtype": "bfloat16",
    "optimizer.name": "adamw_8bit",
    "optimizer.in_backward": "true",
    "clip_grad_norm": "null",
    "memory.activation_checkpointing": "selective",
    "memory.loss_accumulation_dtype": "weight",
}
LORA = {"model.dtype": "bfloat16", "lora.rank": 8}
PACKED = {"data.packing": "bfd", "batch_size": 4}
PADDED = {"data.packing": "none", "batch_size": 8}


def growth(folder: Path, recipe: str, steps: int, settings: dict[str, object]) -> float:
    """Return the relative growth of resident memory from step 5 to the last step. All documents differ."""
    drawn = random.Random(0)
    rows = [" ".join(str(drawn.randrange(1000)) for _ in range(drawn.randint(5, 80))) for _ in range(2000)]
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    given = {
        "data.source": folder / "rows.jsonl",
        "data.validation_source": "null",
        "data.max_length": 256,
        "eval_answers": 0,
        "max_steps": steps,
        "epochs": 100,
        "output_dir": folder / "run",
        "device": "cpu",
        **settings,
    }
    command = [sys.executable, "-m", "lean_ft", "run", recipe, "--config", "tiny/full"]
    # Other tests in this process may have set them for other runs.
    environment = {name: value for name, value in os.environ.items() if not name.endswith("CACHE_CAPACITY")}
    command += [f"{name}={value}" for name, value in given.items()]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    resident = {line["step"]: line["rss_bytes"] for line in lines if "rss_bytes" in line}
    return resident[steps] / resident[FIRST_STEP] - 1


@pytest.mark.long
@pytest.mark.parametrize(
    ("recipe", "settings"),
    [
        ("full_finetune_single_device", FULL | PACKED | {"compile": "true"}),
        ("full_finetune_single_device", FULL | PADDED | {"compile": "true"}),
        ("full_finetune_single_device", FULL | PADDED | {"data.packing": "padding_free"}),
        ("full_finetune_single_device", FULL | {"data.batch_tokens": 1024}),
        ("lora_finetune_single_device", LORA | PACKED),
        ("full_finetune_single_device", FULL | PACKED | {"eval_every": 20, "save_every": 30, "keep_last": 1}),
    ],
    ids=lambda value: (
        value if isinstance(value, str) else " ".join(f"{k}={v}" for k, v in value.items() if k not in FULL)
    ),
)
def test_200_steps_do_not_grow_memory(recipe, settings, tmp_path):
    if "eval_every" in settings:
        (tmp_path / "held_out.jsonl").write_text(
            "".join(json.dumps({"text": "1 2 3 " * n}) + "\n" for n in range(1, 60))
        )
        settings = settings | {"data.validation_source": tmp_path / "held_out.jsonl"}
    assert growth(tmp_path, recipe, 200, settings) < 0.05
