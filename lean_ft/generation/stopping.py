"""Token ids that end a completion."""

import json

from lean_ft.models import Decoder
from lean_ft.tokenizers import Tokenizer


def stop_ids(model: Decoder, tokenizer: Tokenizer) -> frozenset[int]:
    """Return the ids that end a completion: eos, the tokens that end a turn in the chat template, and those in the model's
    generation_config.json."""
    configured = json.loads(model.source.generation_config or b"{}").get("eos_token_id")
    ids = configured if isinstance(configured, list) else [configured]
    known = range(tokenizer.vocab_size)
    return frozenset(token for token in (*ids, tokenizer.eos_id, *tokenizer.turn_ends) if token in known)
