"""Token ids that end a completion."""

import json

from lean_ft.models import Decoder
from lean_ft.tokenizers import Tokenizer


def stop_ids(model: Decoder, tokenizer: Tokenizer) -> frozenset[int]:
    """Return the ids that end a completion: eos, the tokens that end a turn in the chat template, and those in the model's
    generation_config.json."""
    configured = json.loads(model.source.generation_config or b"{}").get("eos_token_id")
    ids = configured if isinstance(configured, list) else [configured]
    own = [token for token in (*ids, tokenizer.eos_id) if token is not None and token < tokenizer.vocab_size]
    return frozenset(own) | tokenizer.turn_ends
