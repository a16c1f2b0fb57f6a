"""A renderer does the same in another process, and the counts of parts add up to those of the whole."""

from lean_ft.data.formats import RowReader
from lean_ft.data.render import Renderer
from lean_ft.data.rows import Row
from lean_ft.settings import SFTDataConfig


def rows_of(count: int) -> list[Row]:
    return [Row({"prompt": "p" * (i % 9), "completion": f"c{i}"}, f"rows.jsonl, line {i + 1}") for i in range(count)]


def renderer(tokenizer) -> Renderer:
    config = SFTDataConfig(source="rows.jsonl", max_length=40)
    return Renderer(config, RowReader.of(config, rows_of(1), tokenizer), tokenizer)


def test_reports_of_parts_add_up(plain_tokenizer):
    render, rows = renderer(plain_tokenizer), rows_of(30)
    whole = render.empty_report()
    for part in (rows[:7], rows[7:7], rows[7:]):
        whole.add(render(part)[1])
    assert whole == render(rows)[1]
    assert whole.rows == 30
