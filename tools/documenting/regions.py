"""Generated regions of a page, between two comments."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping

MARK = "<!-- generated: "
END = "<!-- until here -->"
_REGION = re.compile(rf"^({re.escape(MARK)}(.+?) -->\n)(.*?)(^{re.escape(END)}$)", re.DOTALL | re.MULTILINE)


def rewritten(text: str, writers: Mapping[str, Callable[..., str]], page: str) -> str:
    """The page with every region written anew."""

    def write(found: re.Match[str]) -> str:
        name, *arguments = shlex.split(found[2])
        assert name in writers, f"{page}: nobody writes {name!r}; known are {', '.join(writers)}"
        return f"{found[1]}\n{writers[name](*arguments).strip()}\n\n{found[4]}"

    marks, written = text.count(MARK), len(_REGION.findall(text))
    assert marks == written, f"{page}: {marks} regions begin and {written} end"
    return _REGION.sub(write, text)
