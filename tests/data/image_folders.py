"""Model folders of three families that read images: their tokenizers and processors alone. Bytes are tokens."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.images.their_processors import write_folder

# What the template writes for an image, and the control tokens of images.
WRITTEN = {
    "qwen3_vl": (
        "<|vision_start|><|image_pad|><|vision_end|>",
        ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>"],
    ),
    "gemma3": ("<start_of_image>", ["<start_of_image>", "<end_of_image>", "<image_soft_token>"]),
    "mistral3": ("[IMG]", ["[IMG]", "[IMG_BREAK]", "[IMG_END]"]),
    "smolvlm": ("<image>", ["<image>", "<fake_token_around_image>", "<global-img>", "<row_1_col_1>"]),
}
CHATML = """{%- for m in messages -%}<|im_start|>{{ m.role }}
{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{% if p.type == 'image' %}IMAGE{% else %}{{ p.text }}
{%- endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""  # noqa: E501


def make_folder(folder: Path, family: str) -> PreTrainedTokenizerFast:
    """Write the folder of a family, and return the tokenizer of transformers. Line breaks merge with each other, so
    what stands around an image changes its tokens."""
    image, control = WRITTEN[family]
    merges = [("Ċ", "Ċ"), ("ĊĊ", "Ċ"), ("ĊĊ", "ĊĊ")]
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges)]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    theirs = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    theirs.add_special_tokens({"additional_special_tokens": ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *control]})
    theirs.chat_template = CHATML.replace("IMAGE", image)
    theirs.save_pretrained(write_folder(folder, family))
    return theirs
