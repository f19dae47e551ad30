"""Report pages: one self-contained HTML file each, no script, no network."""

from __future__ import annotations

from typing import Any

import jinja2


def render(template: str, **values: Any) -> str:
    """Fill one of the templates that lie beside this file; a value that it misses is an error."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("meki_edge", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(**values)
