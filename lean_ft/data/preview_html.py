"""A preview as one HTML page to share: no script, nothing loaded, and whatever is in the data is text."""

from html import escape

from lean_ft.data.preview import Preview, ShownDocument, ShownRow, Stretch
from lean_ft.data.visible import visible

STYLE = """
body { font: 15px/1.6 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
pre { font: 13px/1.6 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; margin: 0; }
section { border: 1px solid #ccc; border-radius: 6px; margin: 1rem 0; }
h2 { font-size: 1rem; margin: 0; padding: .4rem .8rem; background: #eee; }
article { padding: .4rem .8rem; border-top: 1px dashed #999; }
small { color: #666; }
.trained { background: #c7ecc7; }
.masked { color: #666; }
.control { font-weight: bold; color: #8a2a8a; }
@media (prefers-color-scheme: dark) {
  body { background: #1b1b1b; color: #ddd; } h2 { background: #2a2a2a; } small, .masked { color: #999; }
  .trained { background: #1f4d26; } .control { color: #e39be3; } section { border-color: #444; }
}
"""
# Even if something were not escaped, a browser would run and load nothing.
POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def preview_page(preview: Preview, title: str) -> str:
    """The page. `title` is plain text, as is everything in `preview`."""
    notes = "".join(f"<li>{_text(note)}</li>" for note in preview.notes)
    rows = "".join(_row(row, i) for i, row in enumerate(preview.rows, start=1))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width">\n'
        f"<title>{_text(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<h1>{_text(title)}</h1>\n"
        f"<p>{_text(str(preview.report))}</p>\n"
        '<p><span class="trained">trained</span> <span class="masked">masked</span> '
        '<span class="control">control token</span></p>\n'
        f"{f'<ul>{notes}</ul>' if notes else ''}\n{rows}</body>\n</html>\n"
    )


def _row(row: ShownRow, number: int) -> str:
    padding = f"<article><small>{row.padding:,} positions of padding</small></article>\n" if row.padding else ""
    return f"<section>\n<h2>Row {number}</h2>\n{''.join(map(_document, row.documents))}{padding}</section>\n"


def _document(document: ShownDocument) -> str:
    goes_on = ", goes on from another row" if document.begins_before else ""
    counts = f"{document.num_tokens:,} tokens, {document.num_trained:,} trained{goes_on}"
    return (
        f"<article>\n<small>{_text(document.place)}: {counts}</small>\n"
        f"<pre>{''.join(map(_stretch, document.stretches))}</pre>\n</article>\n"
    )


def _stretch(stretch: Stretch) -> str:
    classes = f"{'trained' if stretch.trained else 'masked'}{' control' if stretch.control else ''}"
    return f'<span class="{classes}">{_text(stretch.text)}</span>'


def _text(text: str) -> str:
    return escape(visible(text))
