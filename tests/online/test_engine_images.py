"""Images in requests to a real vLLM server: the same greedy tokens as from the built-in sampler, in float32."""

import json
from dataclasses import replace
from importlib.resources import files as resources
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from benchmarks.vllm_server import UNTIED, vllm_server
from lean_ft.data import prompt_rows
from lean_ft.data.columns import Document
from lean_ft.data.images import ImageKind
from lean_ft.generation import Sampling, sample, stop_ids
from lean_ft.models import load_model
from lean_ft.models.vision.config import VISION_FAMILIES
from lean_ft.online.engines import VLLMServer
from lean_ft.settings import GenerationConfig
from lean_ft.tokenizers import load_tokenizer
from tests.data.image_folders import CHATML, WRITTEN
from tests.images.pictures import odd_picture
from tests.images.their_processors import HALF, write_folder
from tests.models.vision import documents
from tests.recipes.conftest import config_of

NEW_TOKENS = 12
TOLERANCE = 5e-5  # of log-probabilities; float32 rounds to 1e-6 at each of the few layers


def gemma3_folder(folder: Path) -> str:
    """A random Gemma 3 of transformers, with the line breaks of its tokenizer, which merge with those around images."""
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *WRITTEN["gemma3"][1]]
    merges = [("\n", "\n"), ("\n\n", "\n"), ("\n\n", "\n\n")]
    words = [*map(chr, range(32, 127)), "\n", *map("".join, merges)]
    bpe = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    bpe.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.add_special_tokens({"additional_special_tokens": control})
    tokenizer.chat_template = CHATML.replace("IMAGE", "<start_of_image>")
    tokenizer.save_pretrained(write_folder(folder, "gemma3"))
    first, last, image = (tokenizer.convert_tokens_to_ids(name) for name in WRITTEN["gemma3"][1])
    ids = {"image_token_id": image, "image_token_index": image, "boi_token_index": first, "eoi_token_index": last}
    case = documents.CASES["gemma3"]
    text = {"vocab_size": 128, "head_dim": 32, "hidden_size": 64, "sliding_window": 512, "bos_token_id": None}
    text |= {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    vision = {"patch_size": 14, "image_size": 112, "hidden_size": 64}
    others = case.others | ids | {"mm_tokens_per_image": 4}
    documents.reference(
        replace(case, text=case.text | text, vision=case.vision | vision, others=others)
    ).save_pretrained(folder)
    # Published folders, and so vLLM, have the names of transformers 4.
    tensors = {
        name.replace("vision_tower.", "vision_tower.vision_model."): tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    processor = {"image_processor_type": "Gemma3ImageProcessorFast", "processor_class": "Gemma3Processor", **HALF}
    processor |= {"size": {"height": 112, "width": 112}, "resample": 2, "do_pan_and_scan": False}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor | {"image_seq_length": 4}))
    names = {"image_seq_length": 4, "processor_class": "Gemma3Processor"}
    (folder / "processor_config.json").write_text(json.dumps(names))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    special = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    settings |= {"extra_special_tokens": special, "processor_class": "Gemma3Processor"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return str(folder)


def write_rows(folder: Path) -> Path:
    """Prompts with one image, two or none; images that are resized, turned by EXIF, transparent, gray, or equal."""
    exif = Image.Exif()
    exif[0x0112] = 6
    noise = np.random.default_rng(0).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    Image.fromarray(noise).resize((300, 200), 3).save(folder / "0", "JPEG")
    Image.fromarray(noise).resize((97, 411), 3).save(folder / "1", "PNG", exif=exif)
    for name, number in (("2", 33), ("3", 57)):
        (folder / name).write_bytes(odd_picture(number))
    asked = [("What is this?", "0"), ("Compare.\n", "10"), ("Hello.", ""), ("One <image>\n<image>\n\ntwo", "12")]
    asked += [("And this?", "2"), ("This?", "3"), ("Two equal ones.", "11")]
    rows = [{"messages": [{"role": "user", "content": text}], "images": [*names]} for text, names in asked]
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.long
@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3"])
@torch.no_grad()
def test_greedy_tokens_equal_those_of_the_built_in_sampler(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Also behind sampled tokens, of which some open, close or stand for images."""
    facts = VISION_FAMILIES["gemma3"].facts  # vLLM's kernels for CPUs are causal, also among the tokens of an image
    causal = replace(VISION_FAMILIES["gemma3"], facts=lambda *fields: facts(*fields) | {"sees_image": "never"})
    monkeypatch.setitem(VISION_FAMILIES, "gemma3", causal)
    folder = str(resources("lean_ft") / "assets/tiny-images/model")
    if family == "gemma3":
        folder = gemma3_folder(tmp_path / "model")
    settings = (f"model.path={folder}", "model.images=frozen", f"data.source={write_rows(tmp_path)}")
    cfg = config_of("grpo", *settings, "data.shuffle=false", "rewards=[length]", "device=cpu", "model.dtype=float32")
    tokenizer, model = load_tokenizer(cfg.model), load_model(cfg.model)
    prompts, _ = prompt_rows(cfg.data, tokenizer, cfg.seed)
    asked: list[Document] = [prompts[i].text for i in range(len(prompts))]
    kind = asked[0].kinds[0]
    assert isinstance(kind, ImageKind)
    kind.check_engine(tokenizer)
    typed = [65, *sorted(kind.never_trained), 66]
    asked += [document.continued(typed) for document in asked[:3]]
    how = Sampling(max_new_tokens=NEW_TOKENS, stop_ids=stop_ids(model, tokenizer))
    numbers = [0] * len(asked)
    own = sample(model, asked, how, numbers=numbers)
    flags = UNTIED if model.config.tied_embeddings else ()
    with vllm_server(Path(cfg.model.path), "--max-model-len", "512", *flags, log=tmp_path / "log") as server:
        generation = GenerationConfig.model_validate({"engine": "vllm", "engine_url": server.url})
        engine = VLLMServer(generation, tmp_path, 512, tokenizer)
        engine.publish(model)
        found = engine.sample(asked, how, numbers)  # raises an error if the server expands other ids
    assert [turn.ids for turn in found] == [completion.ids for completion in own]
    for turn, completion in zip(found, own, strict=True):
        assert turn.log_probs == pytest.approx(completion.log_probs, abs=TOLERANCE)
