"""Training with images, next to plain loops on transformers and PEFT."""

import json
from collections.abc import Callable
from pathlib import Path

import peft
import pytest
import torch
import torch.nn.functional as F
import transformers
from PIL import Image
from safetensors.torch import load_file

from lean_ft.data import sft_batches
from lean_ft.data.collate import batch_of
from lean_ft.data.columns import Columns
from lean_ft.models import Decoder, load_model
from lean_ft.peft import load_adapter
from lean_ft.tokenizers import load_tokenizer
from lean_ft.training.regularization import add_embedding_noise
from tests.models.vision.documents import CASES
from tests.recipes.conftest import config_of, run_recipe
from tests.training.image_runs import image_inputs, model_folder, write_rows
from tests.training.toy_runs import digests, metrics

SETTINGS = ("model.dtype=float32", "device=cpu", "plan=false", "schedule.name=constant", "clip_grad_norm=null")
SETTINGS += ("batch_size=4", "epochs=3", "optimizer.lr=0.01", "save_every=0")
PACKED = ("data.packing=bfd", "data.max_length=128")
FAMILIES = [family for family in ("qwen3_vl", "gemma3") if family in CASES]
ADAPTED = ("lora.rank=4", "lora.targets=[q_proj,down_proj]")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with a model folder and a folder of rows for each family."""
    top = tmp_path_factory.mktemp("images")
    for family in FAMILIES:
        model_folder(family, top / family)
        write_rows(family, top / f"{family}_rows")
    return top


@pytest.fixture
def train(folder: Path, tmp_path: Path) -> Callable[..., Path]:
    def run(family: str, *settings: str, name: str = "run", recipe: str = "finetune") -> Path:
        """Run a recipe and return its last checkpoint."""
        given = [
            f"model.path={folder / family}",
            f"data.source={folder / f'{family}_rows' / 'photos.jsonl'}",
            *SETTINGS,
        ]
        run_recipe(recipe, tmp_path / name, *given, f"data.cache_dir={tmp_path / 'cache'}", *settings)
        return max((tmp_path / name).glob("step_*"))

    return run


def theirs(path: Path) -> transformers.PreTrainedModel:
    return transformers.AutoModelForImageTextToText.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )


def columns_of(folder: Path, family: str) -> Columns:
    source = f"data.source={folder / f'{family}_rows' / 'photos.jsonl'}"
    cfg = config_of("finetune", f"model.path={folder / family}", "model.images=frozen", source)
    return sft_batches(cfg.data, load_tokenizer(cfg.model), batch_size=4, seed=0)[0].layout.columns


def documents(folder: Path, family: str) -> list[tuple[torch.Tensor, torch.Tensor, list[Image.Image]]]:
    """Ids (1, T), which of them are trained, and the images of each row."""
    rows, columns = folder / f"{family}_rows", columns_of(folder, family)
    images = [
        [Image.open(rows / name) for name in json.loads(line)["images"]] for line in (rows / "photos.jsonl").open()
    ]
    return [
        (torch.tensor(one.ids).long()[None], torch.tensor(one.trained), some)
        for one, some in zip(columns, images, strict=True)
    ]


def their_logits(model: torch.nn.Module, folder: Path, family: str) -> list[torch.Tensor]:
    return [
        model(input_ids=ids, use_cache=False, **image_inputs(family, folder / family, images, ids)).logits[0]
        for ids, _, images in documents(folder, family)
    ]


def our_logits(model: Decoder, folder: Path, family: str) -> list[torch.Tensor]:
    columns = columns_of(folder, family)
    batches = (
        batch_of([one], kind="padded", row_tokens=256, pad_id=0, image_rules=columns.image_rules) for one in columns
    )
    lengths = columns.lengths
    return [model(**batch.inputs)[0, :length] for batch, length in zip(batches, lengths, strict=True)]


@pytest.mark.parametrize("images", ["frozen", "train"])
@pytest.mark.parametrize(
    "settings",
    [("optimizer.name=sgd", "optimizer.lr=0.1"), ("optimizer.eps=0.001", *PACKED)],
    ids=["sgd", "adamw, packed"],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_three_steps_equal_a_plain_loop_on_transformers(folder, train, family, settings, images):
    checkpoint = train(family, *settings, f"model.images={images}")
    model = theirs(folder / family)
    is_tower = {name: "language_model" not in name and "lm_head" not in name for name, _ in model.named_parameters()}
    trained = [p for name, p in model.named_parameters() if images == "train" or not is_tower[name]]
    optimizer = (
        torch.optim.SGD(trained, lr=0.1)
        if "sgd" in settings[0]
        else torch.optim.AdamW(trained, lr=0.01, eps=1e-3, weight_decay=0)
    )
    masks = [mask for _, mask, _ in documents(folder, family)]
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for _ in range(3):
        optimizer.zero_grad()
        losses = [
            F.cross_entropy(logits[:-1][mask[1:]], ids[0, 1:][mask[1:]], reduction="sum")
            for logits, (ids, mask, _) in zip(
                their_logits(model, folder, family), documents(folder, family), strict=True
            )
        ]
        (torch.stack(losses).sum() / sum(int(mask[1:].sum()) for mask in masks)).backward()
        optimizer.step()
    ours = dict(theirs(checkpoint).named_parameters())
    for name, parameter in model.named_parameters():
        assert (ours[name] - parameter).norm() <= 1e-5 * parameter.norm(), name
    moved = {is_tower[name] for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert moved == ({False, True} if images == "train" else {False})


@pytest.mark.parametrize(
    "settings",
    [
        ("model.images=train", *PACKED),
        ("model.images=frozen", *ADAPTED),
        ("model.images=frozen", *ADAPTED, "lora.quantize=nf4"),
    ],
    ids=str,
)
def test_a_resumed_run_equals_the_uninterrupted_run(train, settings):
    more = ("batch_size=1", "data.validation_fraction=0.25", "eval_every=2", "lora.dropout=0.1")
    more = more[: 4 if "lora.rank=4" in settings else 3]
    whole = train("qwen3_vl", *settings, *more, name="whole")
    train("qwen3_vl", *settings, *more, "max_steps=2", name="parts")
    parts = train("qwen3_vl", *settings, *more, name="parts")
    assert metrics(parts.parent, timed=False) == metrics(whole.parent, timed=False)
    assert digests(parts) == digests(whole)


@pytest.mark.parametrize("targets", ["[q_proj,down_proj]", "[q_proj,vision.blocks.*]"])
def test_peft_opens_the_adapter_with_equal_logits(folder, train, targets):
    images = "train" if "vision" in targets else "frozen"
    checkpoint = train(
        "qwen3_vl", "lora.rank=4", f"lora.targets={targets}", f"model.images={images}", "optimizer.lr=0.1"
    )
    model = peft.PeftModel.from_pretrained(theirs(folder / "qwen3_vl"), checkpoint)
    assert any("visual" in name for name, _ in model.named_parameters() if "lora_A" in name) == (images == "train")
    own = load_model(folder / "qwen3_vl", images=images)
    load_adapter(own, checkpoint)
    pairs = zip(our_logits(own, folder, "qwen3_vl"), their_logits(model, folder, "qwen3_vl"), strict=True)
    torch.testing.assert_close(*map(torch.cat, zip(*pairs, strict=True)), rtol=0, atol=1e-4)


def test_the_checkpoint_is_a_complete_folder(folder, train):
    """Equal logits follow from the equal weights of the first test; here are the other files."""
    checkpoint = train("qwen3_vl", "model.images=train", "max_steps=1")
    own = {file.name for file in checkpoint.iterdir() if file.is_file()}
    assert own >= {file.name for file in (folder / "qwen3_vl").iterdir()}
    for name in ("config.json", "preprocessor_config.json"):
        assert (checkpoint / name).read_bytes() == (folder / "qwen3_vl" / name).read_bytes()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_projector_trains_alone_at_its_own_learning_rate(folder, train, family):
    settings = ("model.images=train", "optimizer.name=sgd", "train=[vision.*merger*]", "max_steps=1")
    before = load_file(folder / family / "model.safetensors")
    full, half = (
        load_file(
            train(family, *settings, f"optimizer.lr_ratios={{vision: {ratio}}}", name=f"{ratio}") / "model.safetensors"
        )
        for ratio in (2, 1)
    )
    moved = {name for name in before if not torch.equal(full[name], before[name])}
    assert moved == {name for name in before if "merger" in name or "multi_modal_projector" in name}
    for name in moved:
        torch.testing.assert_close(full[name] - before[name], 2 * (half[name] - before[name]), rtol=1e-3, atol=1e-6)


def test_noise_is_added_to_embeddings_of_text_alone(folder):
    model, columns = load_model(folder / "qwen3_vl", images="train"), columns_of(folder, "qwen3_vl")
    batch = batch_of([columns[0]], kind="padded", row_tokens=256, pad_id=0, image_rules=columns.image_rules)
    seen: list[torch.Tensor] = []
    model.model.layers[0].register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()[0]))
    model(**batch.inputs)
    add_embedding_noise(model.train(), alpha=5.0)
    model(**batch.inputs)
    is_equal = (seen[0] == seen[1]).all(-1)
    assert is_equal.nonzero()[:, 0].tolist() == batch.inputs["images"].places.tolist()
