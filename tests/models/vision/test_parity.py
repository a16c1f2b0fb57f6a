"""Models with images against transformers, in float32."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from lean_ft.models import Decoder, load_model, save_model
from lean_ft.training.checkpoint import restore_weights
from tests.models.vision.documents import (
    CASES,
    COUNTS,
    IMAGE,
    Case,
    batch_of,
    differences,
    draw_all,
    greedy_tokens,
    inputs,
    position_shift,
    save,
    split,
    stack_experts,
    their_greedy_tokens,
)

TOWERS = ("qwen3_vl", "gemma3", "lfm2_vl", "mistral3", "gemma4", "gemma4_unified", "smolvlm", "qwen2_5_vl")
QUICK = TOWERS[:3]  # others run as long tests, but for logits and gradients
BATCHES = [
    pytest.param(counts, packed, marks=[pytest.mark.long] * (counts != [1, 0, 2] or not packed))
    for counts in COUNTS
    for packed in (False, True)
]


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=[pytest.mark.long] * (name not in QUICK)) for name in CASES]
)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture(scope="module")
def folder(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(case, tmp_path_factory.mktemp(case.name))


@pytest.fixture
def model(folder: Path) -> Decoder:
    return load_model(folder, images="train")


@pytest.mark.parametrize(("counts", "packed"), BATCHES, ids=str)
@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=[pytest.mark.long] * (name not in TOWERS)) for name in CASES], indirect=True
)
def test_logits_and_gradients(case: Case, model: Decoder, counts: list[int], packed: bool):
    of_logits, of_gradients = differences(case, model, draw_all(case, counts), packed=packed)
    assert of_logits <= case.tolerance
    assert of_gradients <= 1e-3


@pytest.mark.first(1)
@pytest.mark.parametrize("name", ["gemma3", "smolvlm", "lfm2_vl"])
def test_towers_without_rotary_positions_have_heads_of_any_size(name: str, tmp_path: Path):
    case = replace(CASES[name], vision=CASES[name].vision | {"hidden_size": 30})  # 15 features per head
    of_logits, of_gradients = differences(
        case, load_model(save(case, tmp_path), images="train"), draw_all(case, [1, 2]), packed=True
    )
    assert of_logits <= case.tolerance and of_gradients <= 1e-3


@pytest.mark.parametrize("written", [True, False], ids=["written", "by default"])
def test_images_as_long_as_the_window(written: bool, tmp_path: Path):
    """Of longer ones, programs differ: `ImageRules.check` refuses them."""
    case = CASES["gemma4_unified"]
    case = replace(case, text=case.text | {"sliding_window": 9}, grids=((3, 3), (1, 5)))
    file = save(case, tmp_path) / "config.json"
    if not written:
        config = json.loads(file.read_text())
        del config["text_config"]["use_bidirectional_attention"]
        file.write_text(json.dumps(config))
    model = load_model(tmp_path, images="train")
    of_logits, of_gradients = differences(case, model, draw_all(case, [1, 0, 2]), packed=True)
    assert of_logits <= case.tolerance
    assert of_gradients <= 1e-3


def test_a_packed_document_is_computed_as_if_alone(case: Case, model: Decoder):
    documents = draw_all(case, [1, 0, 2])
    packed = split(model(**inputs(case, model, documents, packed=True)), documents, packed=True)
    for document, own in zip(documents, packed, strict=True):
        alone = model(**inputs(case, model, [document], packed=True))[0]
        torch.testing.assert_close(own, alone, rtol=0, atol=0 if case.is_exact else case.tolerance)


def test_another_image_changes_its_own_document_alone(case: Case, model: Decoder):
    first, second = documents = draw_all(case, [1, 1])
    before = split(model(**inputs(case, model, documents, packed=True)), documents, packed=True)
    documents = [first._replace(images=[255 - image for image in first.images]), second]
    after = split(model(**inputs(case, model, documents, packed=True)), documents, packed=True)
    place = first.spans[0][0]
    assert torch.equal(before[1], after[1])
    assert torch.equal(before[0][:place], after[0][:place]) and not torch.equal(before[0][place:], after[0][place:])


def test_a_frozen_tower_keeps_no_graph_and_computes_groups_of_images(case: Case, folder: Path, monkeypatch):
    documents = draw_all(case, [1, 2])
    trained, frozen = load_model(folder, images="train"), load_model(folder, images="frozen")
    monkeypatch.setattr("lean_ft.models.vision.tower.GROUP_PATCHES", 40)
    expected, logits = (m(**inputs(case, m, documents, packed=True)) for m in (trained, frozen))
    torch.testing.assert_close(logits, expected, rtol=0, atol=case.tolerance)
    logits.sum().backward()
    assert {name for name, p in frozen.named_parameters() if p.grad is None} == {
        name for name, _ in frozen.named_parameters() if name.startswith("vision.")
    }


def test_greedy_tokens(case: Case, model: Decoder):
    """With a cache, in rows of different lengths."""
    documents = draw_all(case, [2, 0, 1], seed=3)
    assert greedy_tokens(case, model, documents) == [their_greedy_tokens(case, document) for document in documents]


def _document(case: Case, model: Decoder) -> tuple[dict[str, Any], Any]:
    """A document with 2 images, and the decoder's arguments."""
    (document,) = draw_all(case, [2])
    kwargs = inputs(case, model, [document], packed=False)
    kwargs.setdefault("position_shift", torch.from_numpy(position_shift(document))[None] * 0)
    return kwargs, document


@torch.no_grad()
def test_a_prompt_in_two_parts(case: Case, model: Decoder):
    """Each part has whole images."""
    kwargs, document = _document(case, model)
    cut, cache = document.spans[1][0] - 1, model.new_cache(1, 200)
    parts = []
    for part, image in ((slice(0, cut), document.images[:1]), (slice(cut, None), document.images[1:])):
        ids, shift = (kwargs[name][:, part] for name in ("input_ids", "position_shift"))
        images = batch_of(case, image, (ids[0] == IMAGE).nonzero()[:, 0])
        parts.append(model(ids, images=images, position_shift=shift, cache=cache))
    torch.testing.assert_close(torch.cat(parts, 1), model(**kwargs), rtol=0, atol=case.tolerance)


def test_completions_share_a_prompt_with_images(case: Case, model: Decoder):
    if model.config.has_states:
        pytest.skip("recurrent layers have no shared prompts")
    kwargs, document = _document(case, model)
    length, completions = len(document.ids), [[20, 30, 40, 50, 25, 35], [60, 70, 80]]
    shift = kwargs["position_shift"]
    bounds = torch.tensor([0, 0, *map(len, completions)]).cumsum(0) + torch.tensor([0, length, length, length])
    shared = kwargs | {
        "input_ids": torch.tensor([document.ids + completions[0] + completions[1]]),
        "position_shift": torch.cat((shift, shift[:, -1:].expand(1, 9)), 1),
        "cu_seqlens": bounds.int(), "prefixes": torch.tensor([[0, 0], [0, length], [0, length]]).int(),
    }  # fmt: skip
    logits = model(**shared, num_prefix_tokens=2 * length)[0].split([length, *map(len, completions)])
    for completion, own in zip(completions, logits[1:], strict=True):
        longer = {"position_shift": torch.cat((shift, shift[:, -1:].expand(1, len(completion))), 1)}
        alone = model(**kwargs | longer | {"input_ids": torch.tensor([document.ids + completion])})[0, length:]
        torch.testing.assert_close(own, alone, rtol=0, atol=case.tolerance)


def test_text_is_computed_as_without_the_tower(case: Case, folder: Path, model: Decoder):
    kwargs = inputs(case, model, draw_all(case, [0, 0]), packed=True)
    kwargs.pop("position_shift", None)
    assert torch.equal(model(**kwargs), load_model(folder)(**kwargs))


# Beginnings of names as transformers saves them, and as they are on the Hub.
SPELLINGS = {
    "gemma3": {"vision_tower.": "vision_tower.vision_model."},
    "mistral3": {"model.vision_tower.": "vision_tower.", "model.language_model.": "language_model.model."},
    "lfm2_vl": {"model.vision_tower.": "model.vision_tower.vision_model."},
    "gemma4_unified": {
        "model.embed_vision.multimodal_embedder.": "model.embed_vision.",
        "model.embed_vision.p": "model.vision_embedder.p",
    },
    "qwen2_5_vl": {"model.visual.": "visual.", "model.language_model.": "model."},
}  # fmt: skip


@pytest.mark.first(3)
@pytest.mark.parametrize("name", SPELLINGS)
def test_other_spellings_of_names_are_read_and_written(name: str, tmp_path: Path):
    source, copy = save(CASES[name], tmp_path / "source"), tmp_path / "copy"
    expected = load_model(source, images="frozen").state_dict()
    tensors = {}
    for place, tensor in load_file(source / "model.safetensors").items():
        place = re.sub("^(language_model.model.|model.language_model.)", "model.language_model.", place)
        place = re.sub("^(vision_tower|multi_modal_projector)", r"model.\1", place) if name != "gemma3" else place
        for start, other in SPELLINGS[name].items():
            place = other + place.removeprefix(start) if place.startswith(start) else place
        tensors[place] = tensor
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    model = load_model(source, images="frozen")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
    save_model(model, copy)
    assert load_file(copy / "model.safetensors").keys() == tensors.keys()


@pytest.mark.first(1)
@pytest.mark.parametrize("transposed", [False, True], ids=["as in memory", "transposed"])
@pytest.mark.parametrize("name", ["qwen3_vl_moe", "qwen3_5_moe"])
def test_stacks_of_experts_are_read_and_written_as_published(name: str, transposed: bool, tmp_path: Path):
    source, copy, alone = save(CASES[name], tmp_path / "source"), tmp_path / "copy", tmp_path / "alone"
    expected = load_model(source, images="frozen").state_dict()
    stack_experts(source, transposed)
    model, resumed = (load_model(source, images="frozen", random_init=is_random) for is_random in (False, True))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
    save_model(model, copy)
    assert (copy / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    resumed.source = model.source
    restore_weights(copy, resumed)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in resumed.state_dict().items())

    text = load_model(source)
    save_model(text, copy, whole=True)
    assert (copy / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    save_model(text, alone)  # one tensor per expert
    ids = torch.arange(16, 48)[None]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(alone)(ids).logits
    torch.testing.assert_close(text(ids), theirs, rtol=0, atol=CASES[name].tolerance)


def test_random_weights_are_saved_as_a_folder_that_is_read(case: Case, folder: Path, tmp_path: Path):
    model = load_model(folder, images="train", random_init=True)
    save_model(model, tmp_path)
    state = load_model(tmp_path, images="train").state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert all(tensor.isfinite().all() for name, tensor in state.items() if not name.endswith(("_min", "_max")))


def test_saving_writes_the_folder_that_was_read(case: Case, folder: Path, model: Decoder, tmp_path: Path):
    save_model(model, tmp_path)
    for name in ("config.json", "model.safetensors", "preprocessor_config.json"):
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes(), name
