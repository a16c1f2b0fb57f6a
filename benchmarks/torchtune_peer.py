"""The peer of compare_torchtune.py: one of torchtune's own recipes, in its own process and its own environment.

The recipe and its loop are torchtune's, with the values of its configuration `qwen2_5/0.5B_full_single_device` (or
`_lora_`; for DPO `llama3_1/8B_lora_dpo_single_device`) and the settings that its comments name to save memory: bf16, a
fused AdamW step in backward, activation checkpointing, a loss in 8 chunks. `--compile` compiles the layers
and the loss. The components below replace the checkpoint (random weights), the data (rows of token ids) and the logger.

Writes metrics.jsonl as lean_ft does: one line per step, timed from the end of the previous step. On a simulated GPU
(--device cuda), a line has the peaks of PyTorch's allocator, the launches and the host waits of the step instead, and
--values change the configuration.
"""

import importlib.util
import json
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import torchtune
import typer
from omegaconf import OmegaConf
from torchtune import config, training
from torchtune.models.llama3_2 import llama3_2, lora_llama3_2
from torchtune.models.qwen2 import lora_qwen2, qwen2

LORA = {
    "lora_attn_modules": ["q_proj", "k_proj", "v_proj", "output_proj"],
    "apply_lora_to_mlp": True,
    "lora_dropout": 0.0,
}


# The builders of a family, without and with adapters.
BUILDERS = {"qwen2": (qwen2, lora_qwen2), "llama": (llama3_2, lora_llama3_2)}


class RandomWeights:
    """A checkpointer that has random bfloat16 weights and saves nothing."""

    def __init__(self, model: Any, model_type: str, should_load_recipe_state: bool) -> None:
        self._model = model

    def load_checkpoint(self) -> dict[str, Any]:
        torch.manual_seed(0)
        with training.set_default_dtype(torch.bfloat16):
            return {training.MODEL_KEY: config.instantiate(OmegaConf.create(self._model)).state_dict()}

    def save_checkpoint(self, *arguments: Any, **more: Any) -> None: ...


class NoWeights(RandomWeights):
    """For a simulated GPU, where no value counts: every tensor is one number, repeated."""

    def load_checkpoint(self) -> dict[str, Any]:
        with torch.device("meta"):
            shapes = config.instantiate(OmegaConf.create(self._model)).state_dict()
        number = torch.zeros((), dtype=torch.bfloat16)
        return {training.MODEL_KEY: {name: number.expand(tensor.shape) for name, tensor in shapes.items()}}


class TokenRows(torch.utils.data.Dataset):
    """Rows of token ids, all of which are trained, or pairs with labels, as they are in the file."""

    def __init__(self, tokenizer: Any, path: str) -> None:
        self._rows = [json.loads(line) for line in Path(path).read_text().splitlines()]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        row = self._rows[index]
        return {"tokens": row["input_ids"], "labels": row["input_ids"]} if "input_ids" in row else row


class Padding:
    """A tokenizer that has a padding id; the rows are token ids already."""

    pad_id = 0


class StepMetrics:
    """A logger that writes one line per step with the peak resident memory of this process."""

    def __init__(self, path: str, tokens: int, targets: int) -> None:
        self._path, self._counts = Path(path), {"tokens": tokens, "target_tokens": targets}
        self._last = time.perf_counter()

    def log_config(self, cfg: Any) -> None: ...

    def log_dict(self, payload: dict[str, Any], step: int) -> None:
        status = Path("/proc/self/status").read_text().splitlines()
        peak = int(next(line for line in status if line.startswith("VmHWM:")).split()[1]) * 1024
        now = time.perf_counter()
        row = {
            "step": step,
            "step_seconds": now - self._last,
            "peak_memory_bytes": peak,
            "loss": float(payload["loss"]),
        }
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row | self._counts) + "\n")
        self._last = now

    def close(self) -> None: ...


class PretendedCounts(StepMetrics):
    """A logger of the allocator's peaks and the driver's counts in each step."""

    def __init__(self, path: str) -> None:
        from tests.pretended_gpu.counters import counters

        self._path, self._counters, self._before = Path(path), counters, counters()

    def log_dict(self, payload: dict[str, Any], step: int) -> None:
        counts = {name: now - self._before[name] for name, now in self._counters().items()}
        row = {
            "allocated_bytes": torch.cuda.max_memory_allocated(),
            "reserved_bytes": torch.cuda.max_memory_reserved(),
            "launches": counts["kernels"],
            "host_waits": counts["host_waits"],
        }
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        torch.cuda.reset_peak_memory_stats()
        self._before = self._counters()


def component(name: str | type, **values: Any) -> dict[str, Any]:
    """The configuration of a component of torchtune, or of this file."""
    return {"_component_": name if isinstance(name, str) else f"{Path(__file__).stem}.{name.__name__}"} | values


def configure(
    model_folder: Path, data: Path, run: Path, batch_size: int, length: int, prompt_tokens: int, lora_rank: int,
    quantize: bool, compile: bool,
    device: str,
) -> Any:  # fmt: skip
    """torchtune's configuration of a run. With prompt tokens, rows are pairs, and their completions are trained by
    DPO."""
    num_rows = 2 * batch_size if prompt_tokens else batch_size
    num_targets = num_rows * (length - (prompt_tokens or 1))
    chunked = component("torchtune.modules.loss.CEWithChunkedOutputLoss")
    facts = json.loads((model_folder / "config.json").read_text())
    shape = {
        "vocab_size": facts["vocab_size"],
        "num_layers": facts["num_hidden_layers"],
        "num_heads": facts["num_attention_heads"],
        "num_kv_heads": facts["num_key_value_heads"],
        "embed_dim": facts["hidden_size"],
        "intermediate_dim": facts["intermediate_size"],
        "max_seq_len": facts["max_position_embeddings"],
        "tie_word_embeddings": facts["tie_word_embeddings"],
    }
    plain, adapted = (f"{builder.__module__}.{builder.__name__}" for builder in BUILDERS[facts["model_type"]])
    base = component(plain, **shape)
    lora = LORA | {"lora_rank": lora_rank, "lora_alpha": 2 * lora_rank, "quantize_base": quantize}
    model = component(adapted, **shape, **lora) if lora_rank else base
    settings = {
        "output_dir": str(run),
        "model": model,
        "tokenizer": component(Padding),
        "checkpointer": component(RandomWeights if device == "cpu" else NoWeights, model=base, model_type="QWEN2"),
        "resume_from_checkpoint": False,
        "dataset": component(TokenRows, path=str(data)),
        "seed": 0,
        "shuffle": False,
        "epochs": 1,
        "max_steps_per_epoch": None,
        "batch_size": batch_size,
        "gradient_accumulation_steps": 1,
        "optimizer": component("torch.optim.AdamW", fused=True, lr=2e-5),
        "loss": component("torchtune.rlhf.loss.DPOLoss", beta=0.1) if prompt_tokens else chunked,
        "device": device,
        "enable_activation_checkpointing": True,
        "enable_activation_offloading": False,
        "dtype": "bf16",
        "compile": compile,
        "metric_logger": component(
            StepMetrics, path=str(run / "metrics.jsonl"), tokens=num_rows * length, targets=num_targets
        )
        if device == "cpu"
        else component(PretendedCounts, path=str(run / "metrics.jsonl")),
        "log_every_n_steps": 1,
    }
    schedule = component("torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup", num_warmup_steps=100)
    settings |= {"lr_scheduler": schedule} if lora_rank else {"optimizer_in_bwd": True}
    return OmegaConf.create(settings)


def main(
    model_folder: Annotated[Path, typer.Option()],
    data: Annotated[Path, typer.Option(help="JSONL rows of `input_ids`.")],
    run_directory: Annotated[Path, typer.Option()],
    batch_size: Annotated[int, typer.Option()],
    length: Annotated[int, typer.Option()],
    prompt_tokens: Annotated[int, typer.Option(help="Prompt tokens of a pair, for DPO with LoRA; 0: no pairs.")] = 0,
    lora_rank: Annotated[int, typer.Option(help="0: full fine-tuning.")] = 0,
    quantize: Annotated[bool, typer.Option(help="Frozen weights in NF4.")] = False,
    compile: Annotated[bool, typer.Option("--compile")] = False,
    device: Annotated[str, typer.Option(help="cpu, or cuda on a simulated GPU.")] = "cpu",
    values: Annotated[str, typer.Option(help="Changes to torchtune's configuration, comma-separated key=value.")] = "",
) -> None:
    run_directory.mkdir(parents=True)
    name, file = {
        (False, False): ("FullFinetuneRecipeSingleDevice", "full_finetune_single_device.py"),
        (True, False): ("LoRAFinetuneRecipeSingleDevice", "lora_finetune_single_device.py"),
        (True, True): ("LoRADPORecipeSingleDevice", "lora_dpo_single_device.py"),
    }[bool(lora_rank), bool(prompt_tokens)]
    # By its path: this repository has a folder `recipes` too.
    spec = importlib.util.spec_from_file_location(
        "torchtune_recipe", Path(torchtune.__file__).parents[1] / "recipes" / file
    )
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    cfg = configure(
        model_folder, data, run_directory, batch_size, length, prompt_tokens, lora_rank, quantize, compile, device
    )
    cfg = OmegaConf.merge(cfg, OmegaConf.from_dotlist(values.split(",") if values else []))
    if not cfg.optimizer._component_.startswith("torch."):
        del cfg.optimizer.fused
    recipe = getattr(module, name)(cfg=cfg)
    recipe.setup(cfg=cfg)
    recipe.train()


if __name__ == "__main__":
    typer.run(main)
