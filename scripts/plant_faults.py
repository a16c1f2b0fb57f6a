"""Plant known faults one at a time, and say which tests catch them.

    python scripts/plant_faults.py                          # all faults
    python scripts/plant_faults.py rope-dynamic kl-sign     # some of them
    python scripts/plant_faults.py --jobs 2                 # two at once

Each fault is a defect that lean_ft once had, or one of the same kind. It is planted in a temporary copy of the
checkout, with changes that are not committed. Its tests run with the default set first, and with the long tests if the
default ones pass. The exit status is 1 if a fault is not caught, or if more than 4 faults are caught by long tests
only.
"""

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

CHECKOUT = Path(__file__).resolve().parents[1]
MOST_BY_LONG_TESTS = 4
DEFAULT, LONG, MISSED, BROKEN = "default tests", "long tests", "NOT CAUGHT", "BROKEN ENTRY"
PASSED, FAILED, NO_TESTS = 0, 1, 5  # exit codes of pytest


class Fault(NamedTuple):
    name: str
    file: str
    old: str
    """Text that the file has once."""
    new: str
    tests: tuple[str, ...]
    """Files or test functions that are expected to fail."""


class Outcome(NamedTuple):
    caught_by: str
    detail: str
    """The first test that failed, or why the entry is broken."""


FAULTS = (
    Fault(
        "attention-crosses-documents",
        "lean_ft/models/attention/document_attention.py",
        "yield slice(start, end), slice(*prefix)",
        "yield slice(start, end), slice(*prefix) if prefixes is not None else slice(max(0, start - 1), start)",
        ("tests/models/attention/test_document_attention.py",),
    ),
    Fault(
        "label-of-next-document",
        "lean_ft/data/collate.py",
        'columns.values["trained"][self._next] & (is_cut | ~self._is_last)',
        'columns.values["trained"][self._next]',
        ("tests/data/test_batches.py",),
    ),
    Fault(
        "text-without-end-token",
        "lean_ft/data/sft.py",
        "add_bos=True, add_eos=True)",
        "add_bos=True)",
        ("tests/data/test_documents.py",),
    ),
    Fault(
        "cache-key-without-length",
        "lean_ft/data/prepare.py",
        "PACKING_VERSION, config.max_length, *sharing",
        "PACKING_VERSION, *sharing",
        ("tests/data/test_prepare.py",),
    ),
    Fault(
        "dpo-smoothing-sign",
        "lean_ft/losses/preference.py",
        "return -(1 - label_smoothing) * logsigmoid(h) - label_smoothing",
        "return -(1 - label_smoothing) * logsigmoid(h) + label_smoothing",
        ("tests/losses/test_preference.py",),
    ),
    Fault(
        "kto-baseline-sign",
        "lean_ft/losses/unpaired.py",
        "above = beta * (gained - baseline)\n    return torch.sigmoid",
        "above = beta * (gained + baseline)\n    return torch.sigmoid",
        ("tests/losses/test_unpaired.py",),
    ),
    Fault(
        "reward-margin-sign",
        "lean_ft/losses/reward.py",
        "logsigmoid(chosen - rejected - margins)",
        "logsigmoid(chosen - rejected + margins)",
        ("tests/losses/test_reward.py",),
    ),
    Fault(
        "kl-sign",
        "lean_ft/losses/policy.py",
        "k3 = (-s).exp() - 1 + s",
        "k3 = s.exp() - 1 - s",
        ("tests/losses/test_policy.py",),
    ),
    Fault(
        "jsd-shares-swapped",
        "lean_ft/losses/linear_distillation.py",
        "mixture.beta * other + (1 - mixture.beta) * kl, kl",
        "mixture.beta * kl + (1 - mixture.beta) * other, kl",
        ("tests/losses/test_linear_distillation.py",),
    ),
    Fault(
        "gemma-without-root",
        "lean_ft/models/families/gemma.py",
        'lambda fields: fields.count("hidden_size") ** 0.5',
        'lambda fields: float(fields.count("hidden_size"))',
        ("tests/models/test_parity.py::test_logits_equal_transformers",),
    ),
    Fault(
        "rope-dynamic",
        "lean_ft/models/rope.py",
        "/ rope.original_max_positions - (rope.factor - 1)",
        "/ rope.original_max_positions",
        ("tests/models/test_rope.py",),
    ),
    Fault(
        "decay-of-head-norms",
        "lean_ft/optim/rule.py",
        " and not state.name.endswith(VECTORS)",
        "",
        ("tests/optim/test_rule.py",),
    ),
    Fault(
        "offload-returns-older-values",
        "lean_ft/memory/offload.py",
        "if sent.version == version_of(tensor) and _same_memory(",
        "if _same_memory(",
        ("tests/memory/test_offload.py",),
    ),
    Fault(
        "merge-without-scaling",
        "lean_ft/peft/layers.py",
        "torch.addmm(self.linear_weight().float(), b, a, alpha=self.shape.scaling)",
        "torch.addmm(self.linear_weight().float(), b, a)",
        ("tests/peft/test_merging.py",),
    ),
    Fault(
        "control-tokens-in-messages",
        "lean_ft/tokenizers/tokenizer.py",
        "[match.span(1) for match in _LITERALS.finditer(chat.full)]",
        "list[tuple[int, int]]()",
        ("tests/tokenizers/test_chats.py",),
    ),
    Fault(
        "end-of-turn-ignored",
        "lean_ft/generation/stopping.py",
        " | tokenizer.turn_ends",
        "",
        ("tests/generation/test_stopping.py",),
    ),
    Fault(
        "tool-results-trained",
        "lean_ft/online/completions.py",
        "prompt.continued(self.ids, self.trained)",
        "prompt.continued(self.ids, [True] * len(self.ids))",
        (
            "tests/online/test_episodes.py::test_losses_and_gradients_equal_those_by_hand_over_sampled_tokens",
            "tests/online/test_episodes.py::test_pairs_sum_the_log_probabilities_of_sampled_tokens",
        ),
    ),
    Fault(
        "missing-all-reduce",
        "lean_ft/parallel/ranks.py",
        "            dist.all_reduce(value, group=self._shards)\n",
        "            pass\n",
        ("tests/parallel/test_finetune.py::test_two_ranks_write_the_files_of_one", "tests/parallel/test_training.py"),
    ),
    Fault(
        "plan-without-optimizer-state",
        "lean_ft/plan/memory.py",
        "if address in self._pinned:",
        'if address in self._pinned or self.current[0] == "optimizer state":',
        ("tests/plan/test_rehearsal.py::test_weights_and_optimizer_state_are_their_real_bytes",),
    ),
    Fault(
        "gguf-key-heads",
        "lean_ft/gguf/names.py",
        '".k_proj.": config.num_kv_heads',
        '".k_proj.": config.num_heads',
        ("tests/gguf/test_write.py",),
    ),
    Fault(
        "ollama-one-stop",
        "lean_ft/export/ollama.py",
        "stops += map(tokenizer.token_text, ends)",
        "stops += map(tokenizer.token_text, ends[:1])",
        ("tests/export/test_ollama.py",),
    ),
    Fault(
        "quantized-layer-drops-bias",
        "lean_ft/quantize/cpu_linear.py",
        "return (out if bias is None else out.add_(bias)).view",
        "return out.view",
        ("tests/quantize/test_cpu_linear.py::test_products_of_few_rows_are_torchaos",),
    ),
    Fault(
        "packing-cuts-images",
        "lean_ft/settings/conflicts.py",
        'model.images != "none" and data.packing in ("bfd_split", "wrapped")',
        'model.images != "none" and data.packing == "bfd_split"',
        ("tests/settings/test_conflicts.py",),
    ),
    Fault(
        "image-mean-and-std-swapped",
        "lean_ft/images/rules.py",
        'mean=_colors(settings, "image_mean", 0) if is_normalized else (0.0, 0.0, 0.0),\n'
        '        std=_colors(settings, "image_std", 1e-3)',
        'mean=_colors(settings, "image_std", 0) if is_normalized else (0.0, 0.0, 0.0),\n'
        '        std=_colors(settings, "image_mean", 1e-3)',
        ("tests/images/test_rules.py",),
    ),
    Fault(
        "tool-texts-become-numbers",
        "lean_ft/tools/calls.py",
        'is_text = schema.get("type") == "string"',
        "is_text = False",
        ("tests/tools/test_calls.py",),
    ),
    Fault(
        "resume-without-random-state",
        "lean_ft/system/random_state.py",
        'torch.set_rng_state(_from_hex(state["torch"]))',
        'torch.random.manual_seed(len(state["torch"]))',
        ("tests/training/test_resume.py",),
    ),
    Fault(
        "keeps-worst-checkpoint",
        "lean_ft/training/checkpoints.py",
        "key=lambda step: (losses[step], step)",
        "key=lambda step: (-losses[step], step)",
        ("tests/training/test_checkpoints.py",),
    ),
    Fault(
        "validate-accepts-no-rows",
        "lean_ft/cli/validate.py",
        "if len(rows) < NUM_ROWS_TO_DETECT and is_alone:",
        "if not rows:",
        ("tests/cli/test_validate_verb.py::test_data_of_which_no_row_is_left_is_refused",),
    ),
    Fault(
        "path-traversal",
        "lean_ft/hub/download.py",
        ' and ".." not in parts',
        "",
        ("tests/hub/test_download.py",),
    ),
    Fault(
        "mean-of-means",
        "recipes/full_finetune_single_device.py",
        "cross_entropy(model, batch.to(device), statistics) / num_targets",
        "cross_entropy(model, batch.to(device), statistics) / (batch.num_targets * len(micro_batches))",
        ("tests/recipes/test_runs.py::test_settings_change_no_number",),
    ),
)


def copy_checkout(target: Path) -> None:
    """Copy the files that git tracks, and new ones that it does not ignore, as they are now."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=CHECKOUT, stdout=subprocess.PIPE, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (CHECKOUT / name).is_file():  # a deleted file is listed too
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(CHECKOUT / name, target / name)


def write(file: Path, text: str) -> None:
    """Write a module, and remove its compiled copy: a change of the same size in the same second would not count."""
    file.write_text(text, encoding="utf-8")
    Path(importlib.util.cache_from_source(str(file))).unlink(missing_ok=True)


def run_tests(copy: Path, tests: tuple[str, ...], marks: str) -> tuple[int, str]:
    """Run these tests of a copy. Return pytest's exit code, and the first test that failed or the last line."""
    environment = os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", marks, *tests]
    ran = subprocess.run(
        command, cwd=copy, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", ran.stdout, re.MULTILINE)
    return ran.returncode, failed[1] if failed else (ran.stdout.strip().splitlines() or [""])[-1]


def try_fault(fault: Fault, copy: Path) -> Outcome:
    """Plant a fault in a copy of the checkout, run its tests, and undo it."""
    file = copy / fault.file
    before = file.read_text(encoding="utf-8") if file.is_file() else ""
    if (count := before.count(fault.old)) != 1:
        return Outcome(BROKEN, f"{fault.file} has the old text {count} times; expected once")
    write(file, before.replace(fault.old, fault.new))
    try:
        for caught_by, marks in ((DEFAULT, "not long"), (LONG, "long")):
            code, detail = run_tests(copy, fault.tests, marks)
            if code == FAILED:
                return Outcome(caught_by, detail)
            if code not in (PASSED, NO_TESTS):
                return Outcome(BROKEN, f"pytest exits with {code}: {detail}")
        return Outcome(MISSED, " ".join(fault.tests))
    finally:
        write(file, before)


def main() -> int:
    parser = argparse.ArgumentParser(description="Plant known faults and say which tests catch them.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="faults to plant; default all")
    parser.add_argument("--jobs", type=int, default=1, help="faults that are tried at once")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - {fault.name for fault in FAULTS}:
        parser.error(f"unknown faults: {', '.join(sorted(unknown))}. Known: {', '.join(f.name for f in FAULTS)}")
    faults = [fault for fault in FAULTS if not arguments.names or fault.name in arguments.names]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.jobs) as pool:
        copies = SimpleQueue[Path]()
        for number in range(arguments.jobs):
            copy_checkout(copy := Path(folder) / str(number))
            copies.put(copy)

        def tried(fault: Fault) -> str:
            copy, started = copies.get(), time.monotonic()
            try:
                caught_by, detail = try_fault(fault, copy)
            finally:
                copies.put(copy)
            print(f"{fault.name:32} {caught_by:14} {time.monotonic() - started:4.0f} s  {detail}", flush=True)
            return caught_by

        counts = Counter(pool.map(tried, faults))
    print(f"{len(faults)} faults: " + ", ".join(f"{counts[kind]} {kind}" for kind in (DEFAULT, LONG, MISSED, BROKEN)))
    return int(counts[MISSED] + counts[BROKEN] > 0 or counts[LONG] > MOST_BY_LONG_TESTS)


if __name__ == "__main__":
    sys.exit(main())
