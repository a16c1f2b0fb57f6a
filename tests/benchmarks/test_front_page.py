"""The figures in the sentences of README.md are those of the results."""

import json
import re
from typing import Any

import compare_torchtune
import compare_trl
import draw_memory
import published_speed
import pytest
from make_tables import find_result
from results import GIB, RESULTS, ROOT


def result(name: str) -> dict[str, Any]:
    file = find_result(name, RESULTS)
    assert file
    return json.loads(file.read_text())


@pytest.fixture(scope="module")
def readme() -> str:
    return " ".join((ROOT / "README.md").read_text().split())


def test_the_measured_cpu(readme):
    [*_, speed, memory] = compare_torchtune.table_cells(result("compare_torchtune_qwen2_5_0_5b_8x512"))[0]
    assert f"takes {memory} of torchtune's memory at {speed} its speed" in readme
    [careful] = compare_trl.sentence(result("compare_trl_qwen2_5_0_5b_8x512_amd-epyc-2-cores")).split("; ")[1:]
    speed, *_, memory = [word for word in careful.split() if word[0].isdigit()]
    assert f"and {memory} of TRL's at {speed} (" in readme


def test_the_simulated_gpu(readme):
    rows = {(row["label"], row["side"]): row["allocated_bytes"] / GIB for row in result("pretended_torchtune")["rows"]}
    published = {label: rows[label, "torchtune"] / gib - 1 for label, gib in draw_memory.PUBLISHED.items()}
    in_8_bits = abs(published.pop("+ 8-bit AdamW"))
    largest = max(map(abs, published.values()))
    assert f"published figures to {largest:.0%} (8-bit AdamW: {in_8_bits:.0%})" in readme
    [held_back] = [part for part in published_speed.describe(result("published_speed")).split(", ") if "held" in part]
    assert f"next to published speeds is {held_back.split()[-1]} (" in readme


def test_the_real_gpu(readme):
    rows = {row["label"]: row for row in result("gpu_presets")["rows"]}
    allocated = max(abs(row["allocated_bytes"] / row["predicted_bytes"] - 1) for row in rows.values())
    assert f"allocated the planned memory to {allocated:.2%}" in readme
    reserved = max(abs(row["predicted_reserved_bytes"] / row["reserved_bytes"] - 1) for row in rows.values())
    gpt, qwen = (rows[label]["reserved_bytes"] / GIB for label in ("gpt_oss_20b/qlora", "qwen3_30b_a3b/qlora"))
    card = f"which is {gpt:.2f} GiB for gpt-oss 20B and {qwen:.2f} GiB for Qwen3 30B-A3B"
    assert f"within {reserved:.1%} of the card's, {card}" in readme
    times = [row["step_seconds"] / row["predicted_seconds"] for row in rows.values()]
    assert f"{min(times):.1f} to {max(times):.1f} times the planned time" in readme
    row = rows["gpt_oss_20b/qlora"]
    assert f"gpt-oss 20B trains {round(row['tokens'] / row['step_seconds'], -2):,.0f} tokens per second" in readme


def test_a_real_gpu_reserved_what_the_simulated_one_did():
    index = " ".join((ROOT / "docs" / "index.md").read_text().split())
    [gib] = re.findall(r"a real H200 reserved the same to ([\d.]+) GiB", index)
    rows = [{row["label"]: row for row in result(name)["rows"]} for name in ("pretended_ladder_presets", "gpu_presets")]
    for label in re.findall(r"--config (\w+/qlora)`, reserves", index):
        simulated, real = (table[label]["reserved_bytes"] / GIB for table in rows)
        assert abs(real - simulated) <= float(gib)
