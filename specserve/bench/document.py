"""A document of parts, as Markdown or as one self-contained HTML page."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """Rows under a head; every cell is text."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Part:
    """One section: sentences, then pictures (SVG), then a table."""

    title: str
    text: tuple[str, ...] = ()
    table: Table | None = None
    plots: tuple[str, ...] = ()


def markdown(parts: Sequence[Part], title: str) -> str:
    """The document as Markdown, without pictures."""
    out = [f"# {title}", ""]
    for part in parts:
        out += [f"## {part.title}", "", *(line for text in part.text for line in (text, ""))]
        if part.table and part.table.rows:
            out += [
                _row(part.table.head),
                _row(tuple("---" for _ in part.table.head)),
                *map(_row, part.table.rows),
                "",
            ]
    return "\n".join(out)


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(c.replace("|", "\\|").replace("\n", " ") for c in cells) + " |"


_STYLE = (
    ":root{color-scheme:light dark}body{font:16px/1.5 system-ui,sans-serif;max-width:80rem;margin:2rem auto;"
    "padding:0 1rem}"
    "table{border-collapse:collapse;display:block;overflow-x:auto;font-size:13px}td,th{padding:.25rem .6rem;"
    "border-bottom:1px solid #8884;text-align:left;max-width:32rem}th,td:not(:last-child){white-space:nowrap}"
    "div{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(30rem,100%),1fr));gap:1rem}"
    "section:first-of-type p{font-size:1.15rem}svg{max-width:100%;height:auto;background:#fff;border-radius:6px}"
    "figure{margin:0}"
)


def page(parts: Sequence[Part], title: str) -> str:
    """The document as one self-contained HTML page."""
    body = []
    for part in parts:
        body.append(f"<section><h2>{html.escape(part.title)}</h2>")
        body += [f"<p>{html.escape(t)}</p>" for t in part.text]
        if part.plots:
            body.append(
                "<div>" + "".join(f"<figure>{svg}</figure>" for svg in part.plots) + "</div>"
            )
        if part.table and part.table.rows:
            body.append(_html_table(part.table))
        body.append("</section>")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head>'
        f"<body><h1>{html.escape(title)}</h1>{''.join(body)}</body></html>\n"
    )


def _html_table(table: Table) -> str:
    head = "".join(f"<th>{html.escape(h)}</th>" for h in table.head)
    rows = "".join(
        "<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in row) + "</tr>" for row in table.rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
