"""A hook of mkdocs (mkdocs.yml): a picture NAME with a file NAME_narrow beside it is shown in that form on phones."""

import posixpath
import re

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

PHONES = "(max-width: 44.9em)"  # as in docs/assets/extra.css


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Add the narrow forms of the page's pictures."""

    def with_narrow(image: re.Match[str]) -> str:
        narrow = f"{image[1]}_narrow{image[2]}"
        if posixpath.normpath(posixpath.join(page.url, narrow)) not in files.src_uris:
            return image[0]
        return f'<picture><source media="{PHONES}" srcset="{narrow}">{image[0]}</picture>'

    return re.sub(r'<img [^>]*src="([^":]+)(\.(?:png|svg))"[^>]*>', with_narrow, html)
