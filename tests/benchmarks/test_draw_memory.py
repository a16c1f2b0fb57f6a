"""The picture of the front page says what the results say."""

import draw_memory
import pytest
from matplotlib.text import Text
from PIL import Image


@pytest.fixture(scope="module")
def figure():
    return draw_memory.picture()


def test_the_picture_has_the_words_and_numbers_of_the_results(figure):
    with Image.open(draw_memory.PICTURE) as image:
        shown = image.text["Description"]
    assert shown == draw_memory.words(figure), "run python benchmarks/draw_memory.py"
    assert "On a real NVIDIA H200" in shown


def test_no_word_is_cut_off(figure):
    for text in figure.findobj(Text):
        if text.get_text() and text.get_visible():
            bounds = text.get_window_extent()
            assert bounds.x0 >= 0, text
            assert bounds.x1 <= figure.bbox.x1, text
