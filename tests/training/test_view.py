"""What turns rows and images into tokens is in the folders of a run: transformers shows the model what the run showed
it."""

import json
import shutil
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from transformers import AutoTokenizer
from typer.testing import CliRunner

from lean_ft.cli.main import app
from lean_ft.data.documents import renderer_of
from lean_ft.data.rows import Row
from lean_ft.export import export_adapter, export_folder
from lean_ft.export.upload import prepare
from lean_ft.settings import ModelConfig
from lean_ft.settings import data as data_settings
from lean_ft.settings.data import RowsConfig
from lean_ft.tokenizers import load_tokenizer
from lean_ft.training.view import IN_FILES, SENTENCES
from tests.recipes.conftest import config_of, run_recipe

# Settings that decide which rows there are, where they are cut, what is trained, or how weights are stored.
NOT_THE_VIEW = """
source format columns subset split streaming on_bad_row max_bad_rows validation_source validation_fraction
near_duplicates share_of context_template max_teacher_length mtp mtp_trunk mtp_weight
shuffle max_length overflow truncation_side packing batch_tokens num_processes cache_dir cache_gib train_on
max_prompt_length max_completion_length shared_prompt tools labels labels_per multi_label path family dtype random_init images router_aux_loss_coef
"""  # noqa: E501
TEMPLATE = """{%- if style is defined %}[{{ style }}]{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{% if p.type == 'image' %}\
<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
PICTURE = (96, 80)


def test_each_setting_of_rows_is_in_files_or_told_or_not_the_view() -> None:
    kinds = [one for one in vars(data_settings).values() if isinstance(one, type) and issubclass(one, RowsConfig)]
    names = {f"data.{name}" for kind in kinds for name in kind.model_fields}
    names |= {f"model.{name}" for name in ModelConfig.model_fields}
    unknown = {name for name in names if name.partition(".")[2] not in NOT_THE_VIEW.split()} - {*IN_FILES, *SENTENCES}
    assert not unknown, "decide whether other programs must know it: lean_ft/training/view.py"
    assert {name for name in (*IN_FILES, *SENTENCES) if name.startswith(("data.", "model."))} <= names


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    top = tmp_path_factory.mktemp("rows")
    Image.effect_noise(PICTURE, 90).convert("RGB").save(top / "a.png")
    chat = [{"role": "user", "content": "<image>What?"}, {"role": "assistant", "content": "A dot."}]
    (top / "rows.jsonl").write_text((json.dumps({"messages": chat, "images": ["a.png"]}) + "\n") * 2)
    (top / "template.jinja").write_text(TEMPLATE)
    return top


def settings(rows: Path, *more: str) -> list[str]:
    own = [
        "model.path=tiny-images",
        "model.images=frozen",
        "data.image_tokens=9",
        "device=cpu",
        "plan=false",
        "max_steps=1",
    ]
    own += [
        f"data.source={rows}/rows.jsonl",
        f"data.chat_template={rows}/template.jinja",
        'data.chat_template_kwargs.style="a\\"ä"',
    ]
    return [*own, "batch_size=1", "log_every=1", "data.system=Be brief.", *more]  # fmt: skip


def ids_of_run(rows: Path, *more: str) -> list[int]:
    cfg: Any = config_of("finetune", *settings(rows, *more))
    renderer = renderer_of(cfg.data, load_tokenizer(cfg.model, cfg.data.chat_template), cfg.data.source)
    row = json.loads((rows / "rows.jsonl").read_text().splitlines()[0])
    return renderer([Row(row, "row 1", folder=rows)])[0][0].ids.tolist()


def ids_of_folder(folder: Path, rows: Path) -> list[int]:
    """The ids of the run's row by the tokenizer, the template and the image processor in a folder alone."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    module = import_module("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    processor = module.Qwen2VLImageProcessorPil.from_pretrained(folder)
    grid = processor(Image.open(rows / "a.png"), return_tensors="np")["image_grid_thw"][0]
    content = [{"type": "image"}, {"type": "text", "text": "What?"}]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": content}]
    text = tokenizer.apply_chat_template([*messages, {"role": "assistant", "content": "A dot."}], tokenize=False)
    text = text.replace("<|image_pad|>", "<|image_pad|>" * (grid.prod() // 4))
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.first(1)
@pytest.mark.parametrize("adapter", [(), ("lora.rank=2",)], ids=["whole", "adapter"])
def test_folders_of_a_run_show_what_the_run_showed(rows: Path, tmp_path: Path, adapter: tuple[str, ...]) -> None:
    expected, usual = ids_of_run(rows), ids_of_run(rows, "data.image_tokens=null")
    assert len(expected) < len(usual)
    run_recipe("finetune", tmp_path / "run", *settings(rows, *adapter))
    (checkpoint,) = (tmp_path / "run").glob("step_*")
    folders = [checkpoint, tmp_path / "exported"]
    told = str(export_folder(checkpoint, tmp_path / "exported", merge=bool(adapter)))
    if adapter:
        export_adapter(checkpoint, tmp_path / "adapter")
        folders.append(tmp_path / "adapter")
    for folder in folders:
        assert ids_of_folder(folder, rows) == expected, folder
        assert "style" in load_tokenizer(folder).chat_templates["default"]
    sentence = "egin each chat with the run's system message (data.system): 'Be brief.'"
    assert sentence in told
    assert sentence in prepare(checkpoint, "me/mine")[1]["README.md"].decode()
    if adapter:
        command = ["export", str(checkpoint), str(tmp_path / "again"), "--adapter"]
        assert sentence in CliRunner().invoke(app, command).output.replace("\n", " ")


def test_no_older_template_is_left_beside_a_new_one(rows: Path, tmp_path: Path) -> None:
    """transformers' processors read chat_template.json first, and llama.cpp's converter the field of
    tokenizer_config.json."""
    base, saved = tmp_path / "base", tmp_path / "saved"
    shutil.copytree(load_tokenizer("tiny-images").folder, base)
    config = json.loads((base / "tokenizer_config.json").read_text())
    (base / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": "old"}))
    (base / "chat_template.json").write_text(json.dumps({"chat_template": "old"}))
    (base / "additional_chat_templates").mkdir()
    (base / "additional_chat_templates" / "tool_use.jinja").write_text("old")
    for folder in (base, saved):
        load_tokenizer(base, rows / "template.jinja").save(folder)
        assert load_tokenizer(folder).chat_templates == {"default": TEMPLATE}
        assert not (folder / "chat_template.json").exists()
        assert json.loads((folder / "tokenizer_config.json").read_text()) == config
        assert AutoTokenizer.from_pretrained(folder).chat_template == TEMPLATE
