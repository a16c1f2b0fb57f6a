"""What code that knows no capability asks of kinds of columns."""

from dataclasses import dataclass
from pathlib import Path

import torch

from lean_ft.data.columns import Document
from lean_ft.data.images import ImageKind
from lean_ft.data.kinds import Kind, kinds_in, next_cut
from lean_ft.data.largest import largest_batch
from lean_ft.images.rules import image_rules
from lean_ft.models import load_model
from lean_ft.settings import SFTDataConfig, TowerMode
from tests.training.image_runs import model_folder


@dataclass(frozen=True)
class Whole(Kind):
    """A stretch of tokens that is never cut."""

    first: int
    end: int

    def is_in(self, document: Document) -> bool:
        return self.first < len(document)

    def next_cut(self, document: Document, place: int) -> int:
        return self.end if self.first < place < self.end else place


def test_a_cut_fits_all_kinds_of_a_document():
    text = Document.of(range(20))
    document = Document(text.ids, text.trained, kinds=(Whole(8, 12), Whole(3, 9), Whole(30, 40)))
    assert [next_cut(document, place) for place in (2, 3, 4, 9, 12, 15)] == [2, 3, 12, 12, 12, 15]
    assert kinds_in(document) == [Whole(8, 12), Whole(3, 9)]
    assert (next_cut(text, 4), kinds_in(text)) == (4, [])


@torch.no_grad()
def test_a_frozen_tower_encodes_a_batch_once_and_a_trained_one_in_each_pass(tmp_path: Path):
    folder = model_folder("qwen3_vl", tmp_path)
    modes: dict[TowerMode, int] = {"frozen": 1, "train": 2}
    data = SFTDataConfig.model_validate({"source": "unread", "max_length": 64})
    for images, passes in modes.items():
        model, calls = load_model(folder, images=images), list[int]()
        assert model.vision is not None
        model.vision.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        batch = largest_batch(data, 2, kinds=[ImageKind(image_rules(folder))])
        before = model(**batch.inputs)
        calls.clear()
        batch.encode_once(model)
        assert all(torch.equal(model(**batch.inputs), before) for _ in range(2)) and len(calls) == passes
