"""Pictures of pages say what the results say. Their words are in the files' descriptions."""

import functools
import json
import re

import draw_memory
import pytest
import trl_curves
from make_tables import find_result
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image
from results import RESULTS, narrow_path, words_of


@functools.cache
def figure_of(name: str, narrow: bool) -> Figure:
    if name == "memory":
        return draw_memory.picture(narrow)
    file = find_result("trl_curves", RESULTS)
    assert file
    return trl_curves.picture(json.loads(file.read_text()), narrow)


PICTURES = {"memory": draw_memory.PICTURE, "trl_curves": trl_curves.PICTURE}


@pytest.fixture(scope="module", params=[(name, narrow) for name in PICTURES for narrow in (False, True)], ids=str)
def drawn(request):
    """The file of a picture, and the figure of the results."""
    name, narrow = request.param
    return narrow_path(PICTURES[name]) if narrow else PICTURES[name], figure_of(name, narrow)


def prose_of(figure: Figure) -> set[str]:
    """The words and amounts of a figure, without the numbers of its axes."""
    return {line for line in words_of(figure).splitlines() if re.search("[a-z]{3}|iB", line) and "$" not in line}


@pytest.mark.parametrize("name", PICTURES)
def test_the_picture_for_phones_has_the_words_of_the_wide_one(name):
    assert prose_of(figure_of(name, narrow=True)) == prose_of(figure_of(name, narrow=False))


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
