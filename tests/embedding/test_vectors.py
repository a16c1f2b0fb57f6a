"""Pooled vectors equal sentence-transformers' pooling of padded rows, and a loop over texts."""

import pytest
import torch

from lean_ft.embedding.vectors import Pooling, pooled
from tests.embedding import theirs as st

THEIRS: dict[Pooling, str] = {"last": "lasttoken", "mean": "mean", "cls": "cls"}
LENGTHS = (7, 1, 12, 5)


def _rows() -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states (4, 12, 6) of rows padded on the right, and their mask."""
    mask = torch.arange(12) < torch.tensor(LENGTHS)[:, None]
    return torch.randn(4, 12, 6, generator=torch.Generator().manual_seed(0)), mask


@pytest.mark.long
@pytest.mark.parametrize("pooling", THEIRS)
def test_padded_rows_equal_sentence_transformers(pooling: Pooling):
    hidden, mask = _rows()
    features = {"token_embeddings": hidden, "attention_mask": mask.long()}
    expected = st.modules.Pooling(6, THEIRS[pooling])(features)["sentence_embedding"]
    lengths = torch.tensor(LENGTHS)
    last = torch.arange(4) * 12 + lengths - 1
    torch.testing.assert_close(pooled(hidden.flatten(0, 1), last, lengths, pooling), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("pooling", THEIRS)
def test_packed_texts_in_any_order_equal_a_loop_with_gradients(pooling: Pooling):
    """Texts lie in another order than they are numbered, with padding before, between and after them."""
    hidden = torch.randn(40, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    lengths, last = torch.tensor(LENGTHS), torch.tensor([38, 3, 15, 28])
    stretches = [hidden[end - size + 1 : end + 1] for end, size in zip(last.tolist(), LENGTHS, strict=True)]
    read = {"last": lambda text: text[-1], "mean": lambda text: text.mean(0), "cls": lambda text: text[0]}[pooling]
    expected, weight = torch.stack([read(text) for text in stretches]), torch.linspace(-1, 1, 24).view(4, 6)
    found = pooled(hidden, last, lengths, pooling)
    torch.testing.assert_close(found, expected)
    (of_found,) = torch.autograd.grad((found * weight).sum(), hidden)
    (of_expected,) = torch.autograd.grad((expected * weight).sum(), hidden)
    torch.testing.assert_close(of_found, of_expected)


def test_a_mean_has_equal_bits_whatever_lies_around_the_text():
    text = torch.randn(9, 6).bfloat16()
    alone = pooled(text, torch.tensor([8]), torch.tensor([9]), "mean")
    others = torch.full((50, 6), float("nan")).bfloat16()
    others[20:29], others[:5] = text, 3.0
    among = pooled(others, torch.tensor([28, 4]), torch.tensor([9, 5]), "mean")
    assert alone.dtype == torch.float32
    assert torch.equal(among[0], alone[0])
    assert torch.equal(among[1], torch.full((6,), 3.0))


@pytest.mark.parametrize("pooling", THEIRS)
def test_no_texts_have_no_vectors(pooling: Pooling):
    none = torch.zeros(0, dtype=torch.int64)
    assert pooled(torch.randn(8, 6), none, none, pooling).shape == (0, 6)
