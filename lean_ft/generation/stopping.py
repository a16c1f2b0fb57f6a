"""Token ids that end a completion."""

from lean_ft.models import Decoder
from lean_ft.tokenizers import Tokenizer


def stop_ids(model: Decoder, tokenizer: Tokenizer) -> frozenset[int]:
    """Return the ids that end a completion: eos, the tokens that end a turn in the chat template, and those in the
    model's files (`end_ids`)."""
    ids = [*model.source.end_ids, *([] if tokenizer.eos_id is None else [tokenizer.eos_id])]
    return frozenset(token for token in ids if 0 <= token < tokenizer.vocab_size) | tokenizer.turn_ends
