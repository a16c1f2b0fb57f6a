"""One side of data_preparation.py in its own process: from a JSONL file to packed rows, with the time it took.

Both sides start from the file and end with packed rows on disk (best-fit decreasing). `ours` uses `prepare_batches`.
`trl` uses `load_dataset` and SFTTrainer's own preparation, with a trainer around a very small model. The time excludes
imports and that model.
"""

import json
import os
import time
from pathlib import Path
from typing import Annotated, Any

import typer


def ours(data: Path, tokenizer_folder: Path, cache: Path, length: int, num_processes: int) -> dict[str, Any]:
    from lean_ft.data import prepare_batches
    from lean_ft.settings import SFTDataConfig
    from lean_ft.tokenizers import load_tokenizer

    started = time.perf_counter()
    config = SFTDataConfig(
        source=str(data), max_length=length, packing="bfd", cache_dir=cache, num_processes=num_processes
    )
    batches, _ = prepare_batches(config, load_tokenizer(tokenizer_folder), batch_size=8, seed=0)
    seconds = time.perf_counter() - started
    report = batches.report
    return {
        "seconds": seconds,
        "tokens": report.tokens,
        "target_tokens": report.target_tokens,
        "packed_rows": report.packed_rows,
    }


def trl(data: Path, tokenizer_folder: Path, cache: Path, length: int, num_processes: int) -> dict[str, Any]:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import pyarrow.compute
    from datasets import load_dataset
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes))
    args = SFTConfig(
        output_dir=str(cache / "run"),
        max_length=length,
        packing=True,
        packing_strategy="bfd",
        dataset_num_proc=num_processes,
        report_to="none",
        use_cpu=True,
    )
    started = time.perf_counter()
    dataset = load_dataset("json", data_files=str(data), split="train", cache_dir=str(cache))
    trainer = SFTTrainer(model=model, args=args, train_dataset=dataset, processing_class=tokenizer)
    seconds = time.perf_counter() - started
    packed: Any = trainer.train_dataset
    lengths = pyarrow.compute.list_value_length(packed.data.column("input_ids"))
    return {
        "seconds": seconds,
        "tokens": pyarrow.compute.sum(lengths).as_py(),
        "packed_rows": len(packed),
        "columns": packed.column_names,
    }


def main(
    side: Annotated[str, typer.Option(help="ours or trl.")],
    data: Annotated[Path, typer.Option()],
    tokenizer_folder: Annotated[Path, typer.Option()],
    cache: Annotated[Path, typer.Option(help="Folder for prepared data.")],
    facts_file: Annotated[Path, typer.Option(help="File for the metrics.")],
    length: Annotated[int, typer.Option()],
    num_processes: Annotated[int, typer.Option()],
) -> None:
    facts = {"ours": ours, "trl": trl}[side](data, tokenizer_folder, cache, length, num_processes)
    facts_file.write_text(json.dumps(facts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
