"""Training with images, next to plain loops on transformers and PEFT."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import peft
import pytest
import torch
import torch.nn.functional as F
import transformers
from PIL import Image
from safetensors.torch import load_file

from lean_ft.data import prepare_batches
from lean_ft.data.collate import batch_of
from lean_ft.data.columns import Columns
from lean_ft.export import export_folder, export_gguf
from lean_ft.memory import checkpoint_layers
from lean_ft.models import REWARD_LABELS, Decoder, load_model
from lean_ft.models.vision.tower import VisionTower
from lean_ft.peft import load_adapter, load_merged
from lean_ft.tokenizers import load_tokenizer
from lean_ft.training.regularization import add_embedding_noise
from tests.models.vision.documents import CASES
from tests.recipes.conftest import config_of, run_recipe
from tests.training.image_runs import image_inputs, model_folder, picture, write_rows
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
    return prepare_batches(cfg.data, load_tokenizer(cfg.model), batch_size=4, seed=0)[0].layout.columns


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
    batches = (batch_of([one], kind="padded", row_tokens=256, pad_id=0) for one in columns)
    lengths = columns.lengths
    return [model(**batch.inputs)[0, :length] for batch, length in zip(batches, lengths, strict=True)]


@pytest.mark.long
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


@pytest.mark.long
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


@pytest.mark.long
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


@pytest.mark.long
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
    batch = batch_of([columns[0]], kind="padded", row_tokens=256, pad_id=0)
    seen: list[torch.Tensor] = []
    model.model.layers[0].register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()[0]))
    model(**batch.inputs)
    add_embedding_noise(model.train(), alpha=5.0)
    model(**batch.inputs)
    is_equal = (seen[0] == seen[1]).all(-1)
    assert is_equal.nonzero()[:, 0].tolist() == batch.inputs["images"].places.tolist()


@pytest.mark.long
@pytest.mark.parametrize(
    "settings", [("model.images=train",), ("model.images=train", "lora.targets=[vision.blocks.*]")]
)
def test_an_export_is_a_complete_folder_and_no_file_without_the_trained_tower(folder, train, tmp_path, settings):
    checkpoint, is_adapter = train("qwen3_vl", *settings), len(settings) > 1
    exported = export_folder(checkpoint.parent, tmp_path / "out", merge=is_adapter).destination
    own = load_model(folder / "qwen3_vl" if is_adapter else checkpoint, images="train")
    if is_adapter:
        load_adapter(own, checkpoint)
    ours, expected = our_logits(own, folder, "qwen3_vl"), their_logits(theirs(exported), folder, "qwen3_vl")
    torch.testing.assert_close(torch.cat(ours), torch.cat(expected), rtol=0, atol=1e-4)
    with pytest.raises(ValueError, match="a vision tower that was trained"):
        export_gguf(checkpoint, tmp_path / "out.gguf", merge=is_adapter)


def test_a_gguf_file_of_a_frozen_tower_has_the_language_model(train, tmp_path):
    report = str(export_gguf(train("qwen3_vl", "model.images=frozen", "max_steps=1"), tmp_path / "out.gguf"))
    assert (
        "architecture qwen3vl," in report
        and "The language model is that of qwen3_vl. To read images, llama.cpp also needs" in report
    )


@pytest.mark.long
@pytest.mark.parametrize("settings", [
    ("memory.activation_checkpointing=full",),
    ("memory.activation_checkpointing=selective", "memory.tile_mlp=2"),
    ("optimizer.in_backward=true",),
    ("batch_size=2", "gradient_accumulation_steps=2"),
    PACKED,
], ids=str)  # fmt: skip
def test_memory_and_layout_change_no_number(train, settings):
    plain, other = (train("qwen3_vl", "model.images=train", *more, name=f"{bool(more)}") for more in ((), settings))
    weights = [load_file(folder / "model.safetensors") for folder in (plain, other)]
    for name, tensor in weights[0].items():
        assert (weights[1][name] - tensor).norm() <= 1e-3 * tensor.norm(), name
    rows = [[row["loss"] for row in metrics(folder.parent) if "loss" in row] for folder in (plain, other)]
    assert rows[1] == pytest.approx(rows[0], rel=1e-4)


def test_checkpointed_blocks_keep_their_inputs_alone(folder):
    def num_kept(model: Decoder) -> int:
        """Number of tensors with values of all patches that are kept for the backward pass."""
        places = set[int]()

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.numel() >= 1024 * 24 and not tensor.is_leaf:
                places.add(tensor.data_ptr())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model.vision(torch.zeros(1024, 3, 16, 16, dtype=torch.uint8), ((32, 32),))
        return len(places)

    plain, checkpointed = (load_model(folder / "qwen3_vl", images="train") for _ in range(2))
    checkpoint_layers(checkpointed)
    assert num_kept(checkpointed) < 0.4 * num_kept(plain)


@pytest.mark.parametrize(("settings", "reason"), [
    (("model.images=train",), "add layers of the tower to lora.targets"),
    (("model.images=frozen", "lora.targets=[vision.blocks.*]"), "model.images=frozen does not train the tower"),
])  # fmt: skip
def test_an_adapter_and_the_tower_train_together_or_are_refused(train, settings, reason):
    with pytest.raises(ValueError, match=reason):
        train("qwen3_vl", "lora.rank=4", *settings)


def write_pairs(folder: Path, rows: Path, numbers: list[int]) -> str:
    """Pairs with one picture each, whose texts are equal."""
    chosen, rejected = ({"role": "assistant", "content": text} for text in ("A cat.", "A dog, I think."))
    asked = {"prompt": [{"role": "user", "content": "What is this?"}], "chosen": [chosen], "rejected": [rejected]}
    file = folder / f"pairs{numbers}.jsonl"
    lines = (json.dumps({**asked, "images": [str(rows / f"{number}.png")]}) + "\n" for number in numbers)
    file.write_text("".join(lines))
    return f"data.source={file}"


@pytest.mark.long
def test_pairs_with_equal_ids_share_nothing_but_their_own_image(folder, train, tmp_path, capfd):
    """Picture 4 has the size of picture 0, so both rows have equal ids."""
    rows = folder / "qwen3_vl_rows"
    picture("qwen3_vl", 4).save(rows / "4.png")
    both = write_pairs(tmp_path, rows, [0, 4])
    settings = ("model.images=frozen", "batch_size=2", "epochs=1", "optimizer.name=sgd", "optimizer.lr=0")
    values = {}
    for name, more in {
        "both": (both,),
        "second": (write_pairs(tmp_path, rows, [4]),),
        "unshared": (both, "data.shared_prompt=false"),
        "packed": (both, "data.packing=bfd", "data.max_length=256"),
    }.items():
        capfd.readouterr()
        train("qwen3_vl", *settings, *more, name=name, recipe="dpo")
        values[name] = (
            metrics(tmp_path / name)[0],
            re.findall(r"log-probabilities of (\d) of", "".join(capfd.readouterr())),
        )
    assert [computed for _, computed in values.values()] == [["2"], ["1"], ["0"], ["0"]]
    assert all(row["rewards/margins"] == 0 for row, _ in values.values())
    # With shared prompts an image is encoded once for both sides, and counted once.
    counts = {name: (row["images"], row["patches"]) for name, (row, _) in values.items()}
    assert counts == {"both": (2, 48), "second": (1, 24), "unshared": (4, 48), "packed": (2, 48)}


@pytest.mark.long
@pytest.mark.parametrize(("images", "passes"), [("frozen", 1), ("train", 2)])
def test_a_frozen_tower_is_computed_once_for_the_policy_and_its_reference(
    folder, train, tmp_path, monkeypatch, images, passes
):
    computed, forward = [], VisionTower.forward
    monkeypatch.setattr(VisionTower, "forward", lambda tower, *given: computed.append(tower) or forward(tower, *given))
    pairs = write_pairs(tmp_path, folder / "qwen3_vl_rows", [0, 1, 2, 3])
    targets = "lora.targets=[q_proj,vision.blocks.*]" if images == "train" else "lora.targets=[q_proj]"
    settings = (pairs, f"model.images={images}", "batch_size=2", "epochs=2", "lora.rank=4", targets)
    found = {}
    for kind in ("adapter_off", "model"):
        computed.clear()
        checkpoint = train("qwen3_vl", *settings, f"reference.kind={kind}", name=kind, recipe="dpo")
        found[kind] = len(computed), digests(checkpoint)["adapter_model.safetensors"]
    assert found["adapter_off"][0] == passes * 4
    assert found["model"][0] == 2 * 4
    assert found["adapter_off"][1] == found["model"][1]


@pytest.mark.long
@pytest.mark.parametrize("settings", [(), ("lora.rank=4",)], ids=["full", "adapter"])
def test_a_reward_model_is_opened_with_its_tower(folder, train, tmp_path, settings):
    source = write_pairs(tmp_path, folder / "qwen3_vl_rows", [0, 1])
    checkpoint = train("qwen3_vl", source, "model.images=frozen", *settings, recipe="reward")
    if settings:
        own, _ = load_merged(checkpoint, dtype=torch.float32, images="frozen")
    else:
        own = load_model(checkpoint, scores=REWARD_LABELS, images="frozen")
    assert own.vision is not None and own.score is not None and own.score.weight.abs().max() > 0
