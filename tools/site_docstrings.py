"""What the API pages need beside mkdocstrings: a docstring's section `Example:` is one of code."""

from __future__ import annotations

import re
from typing import Any

import griffe


class ExampleSections(griffe.Extension):
    """Names the section `Examples:`, which is how griffe knows one whose text is a session of the interpreter."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rename the section in the docstring of one object."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
