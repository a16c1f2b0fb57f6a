"""The process that `lean_ft.data.documents` shares rows out to: `python -m lean_ft.data.documents_worker`.

It imports no torch, so it starts in half a second and stays small.
"""

from collections.abc import Callable
from typing import Any

from lean_ft.data.detection import RowFormat
from lean_ft.data.documents import ARRAYS, rows_to_documents
from lean_ft.data.formats import RowReader
from lean_ft.data.render import Renderer
from lean_ft.data.rows import Row
from lean_ft.data.workers import Answer, serve
from lean_ft.settings import SFTDataConfig
from lean_ft.tokenizers import load_tokenizer


def begin(setup: dict[str, Any]) -> Callable[[list[Any]], Answer]:
    """A function from rows to documents and counts, all as messages have them."""
    config, tokenizer = SFTDataConfig(**setup["config"]), load_tokenizer(setup["tokenizer"])
    formats = {source: RowFormat(name, columns) for source, name, columns in setup["formats"]}
    render = Renderer(config, RowReader(formats, config.train_on, tokenizer), tokenizer)

    def answer(rows: list[Any]) -> Answer:
        documents, report = rows_to_documents(render, [Row(*row) for row in rows])
        return Answer(report.to_dict(), [getattr(documents, name) for name in ARRAYS])

    return answer


if __name__ == "__main__":
    serve(begin)
