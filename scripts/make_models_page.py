"""Write docs/models.md: which model types of the installed transformers lean_ft reads, and why not the others.

    python scripts/make_models_page.py

Reads transformers' default config of each type by lean_ft's tables of families. It takes seconds, and builds no model:
that the numbers equal transformers' is what `tests/models` checks for every family.
"""

import inspect
import re
import sys
from pathlib import Path

from transformers import CONFIG_MAPPING, __version__
from transformers.models.auto import modeling_auto
from transformers.utils.quantization_config import QuantizationMethod

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from lean_ft.models import decoder_config  # noqa: E402
from lean_ft.models.config_json import as_its_family, language_model_config  # noqa: E402
from lean_ft.models.dequantized import READABLE  # noqa: E402
from lean_ft.models.families import ENCODERS, FAMILIES, MULTIMODAL, REFUSED  # noqa: E402
from lean_ft.models.vision.config import VISION_FAMILIES  # noqa: E402

METHODS = {method.value for method in QuantizationMethod}
PAGE = ROOT / "docs" / "models.md"
CAUSAL = sorted(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
WITH_IMAGES = sorted(modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
NO_ROW = "no: no family computes it"
INTRODUCTION = """# Models

The model types (`model_type` of `config.json`) that transformers {version} has, and whether lean_ft reads them. `scripts/make_models_page.py`
writes this page. It reads transformers' default configuration of each type. [Model families](families.md) describes the
families and how each is compared with transformers.

- **{causal}** causal language models are read.
- **{images}** models of images and text are read: {towers} with their images ([Images](images.md)), the others as their language model.
- Of the {methods} formats of quantized weights, {formats} are read ([Quantized folders](#quantized-folders)).

For each type, the page shows the published model that transformers' documentation names. Other models of the type are read too, unless a
field of their `config.json` asks for a computation that lean_ft lacks. The error then names the field.
[Add a model family](new_family.md) shows how to read another type.
"""  # noqa: E501


def published(model_type: str) -> str:
    """The model that transformers' documentation of a type names."""
    kind = CONFIG_MAPPING[model_type]
    mark = rf'checkpoint="([^"]+)"[^)]*\)\s+(?:@\w+\s+)*class {kind.__name__}\b'
    found = re.search(mark, Path(inspect.getfile(kind)).read_text())
    return f"`{found[1]}`" if found else ""


def reading(model_type: str) -> str:
    """How lean_ft reads a type, or why it does not."""
    if model_type in REFUSED:
        return f"no: {REFUSED[model_type]}"
    alias = as_its_family({"model_type": model_type, "hidden_size": 48, "num_attention_heads": 6})["model_type"]
    if model_type not in MULTIMODAL and alias not in FAMILIES:
        return NO_ROW
    config = language_model_config(as_its_family(CONFIG_MAPPING[model_type]().to_dict()))
    try:
        decoder_config(config | {"architectures": None}, where=model_type)
    except ValueError as error:  # of a field's default; published files have other values
        print("transformers' defaults are refused:", error)
    if model_type in VISION_FAMILIES:
        return "with images"
    if model_type in MULTIMODAL:
        return "language model, " + " or ".join(f"`{family}`" for family in MULTIMODAL[model_type].families)
    return "yes" if alias == model_type else f"yes, as `{alias}`"


def table(types: list[str]) -> tuple[int, str]:
    """The number of types that are read, and a table of all."""
    readings = {name: reading(name) for name in types}
    rows = [f"| `{name}` | {published(name)} | {how} |" for name, how in readings.items()]
    text = "\n".join(["| type | published model | read |", "|---|---|---|", *rows])
    return sum(not how.startswith("no: ") for how in readings.values()), text


ENDS = {
    "awq": "-AWQ",
    "bitsandbytes": "-bnb-4bit",
    "compressed-tensors": "-FP8-dynamic, -W4A16",
    "fp8": "-FP8",
    "gptq": "-GPTQ-Int4",
    "mxfp4": "openai/gpt-oss",
}
# Formats whose unquantized model does not help.
REASONS = {"bitnet": "no: the layers round weights and inputs in each pass, also if the stored weights are bfloat16"}
QUANTIZED = """A folder with quantized weights has a `quantization_config` in its `config.json`. Its
`quant_method` decides whether lean_ft reads it. For another format, set `model.path` to the unquantized model that the
folder was made from. `lora.quantize=nf4` quantizes frozen weights to 4 bits while they load
([Quantization](quantization.md))."""


ABOUT_ENCODERS = """Text encoders give vectors and no text. EmbeddingGemma is a `gemma3_text` whose `config.json` has
`use_bidirectional_attention`. For vectors, the language models above are read too, with or without their output
layer."""


def methods() -> str:
    """A table of transformers' formats of quantized weights, and what lean_ft says to each."""
    rows = ["| `quant_method` | names on the Hub | read |", "|---|---|---|"]
    config = CONFIG_MAPPING["llama"]().to_dict() | {"architectures": None}
    for method in sorted(METHODS):
        try:
            decoder_config(config | {"quantization_config": {"quant_method": method}})
        except ValueError:
            how = REASONS.get(method, "no: use the unquantized model")
        else:
            how = f"yes, {READABLE[method]}"
        ends = " ".join(f"`{end}`" for end in ENDS.get(method, "").split(", ") if end)
        rows.append(f"| `{method}` | {ends} | {how} |")
    return "\n".join(rows)


def main() -> None:
    (num_causal, causal), (num_images, images) = table(CAUSAL), table(WITH_IMAGES)
    introduction = INTRODUCTION.format(
        version=__version__, causal=f"{num_causal} of {len(CAUSAL)}", images=f"{num_images} of {len(WITH_IMAGES)}",
        towers=len(VISION_FAMILIES.keys() & set(WITH_IMAGES)), methods=len(METHODS),
        formats=" and ".join(f"`{method}`" for method in READABLE),
    )  # fmt: skip
    quantized = f"## Quantized folders\n\n{QUANTIZED}\n\n{methods()}"
    _, encoders = table(sorted(ENCODERS))
    encoders = f"## Text encoders\n\n{ABOUT_ENCODERS}\n\n{encoders}"
    parts = introduction, quantized, f"## Language models\n\n{causal}", encoders
    parts += (f"## Models of images and text\n\n{images}\n",)
    PAGE.write_text("\n\n".join(part.rstrip("\n") for part in parts) + "\n")
    print(re.search(r"(?s)- \*\*.*?\n\n", introduction)[0].strip())  # pyright: ignore[reportOptionalSubscript]


if __name__ == "__main__":
    main()
