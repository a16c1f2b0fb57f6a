"""Pictures of pages say what the results say. Their words are in the files' descriptions."""

import json
import re

import draw_memory
import pytest
import trl_curves
from make_tables import find_result
from matplotlib.text import Text
from PIL import Image
from results import RESULTS, words_of


@pytest.fixture(scope="module", params=["memory", "trl_curves"])
def drawn(request):
    """The file of a picture, and the figure of the results."""
    if request.param == "memory":
        return draw_memory.PICTURE, draw_memory.picture()
    file = find_result("trl_curves", RESULTS)
    assert file
    return trl_curves.PICTURE, trl_curves.picture(json.loads(file.read_text()))


def test_a_picture_has_the_words_and_numbers_of_the_results(drawn):
    path, figure = drawn
    with Image.open(path) as image:
        shown = image.text["Description"]
    assert len(shown.splitlines()) > 20
    assert shown == words_of(figure), f"draw {path.name} again: python benchmarks/draw_memory.py or trl_curves.py"


def test_no_word_is_cut_off(drawn):
    _, figure = drawn
    for text in figure.findobj(Text):
        if re.search("[a-z]", text.get_text()):  # numbers of an axis beyond its end are not drawn
            bounds = text.get_window_extent()
            assert bounds.x0 >= 0, text
            assert bounds.x1 <= figure.bbox.x1, text
