"""Tokenizers and chat templates: text to ids, chats to ids and a mask of what is trained."""

from lean_ft.tokenizers.loading import TOKENIZER_FILES, load_tokenizer
from lean_ft.tokenizers.tokenizer import Passage, Tokenizer, TrainOn

__all__ = ["TOKENIZER_FILES", "Passage", "Tokenizer", "TrainOn", "load_tokenizer"]
