"""Tokenizers and chat templates: text to ids, chats to ids and a mask of what is trained."""

from lean_ft.tokenizers.chat_template import ROLES
from lean_ft.tokenizers.loading import TEMPLATE_FOLDERS, TOKENIZER_FILES, load_tokenizer
from lean_ft.tokenizers.passages import Passage
from lean_ft.tokenizers.tokenizer import Tokenizer, TrainOn

__all__ = ["ROLES", "TEMPLATE_FOLDERS", "TOKENIZER_FILES", "Passage", "Tokenizer", "TrainOn", "load_tokenizer"]
