"""A document of sections, as Markdown or as one self-contained HTML page."""

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
class ReportSection:
    """Sentences, then pictures (SVG), then a table."""

    title: str
    text: tuple[str, ...] = ()
    table: Table | None = None
    plots: tuple[str, ...] = ()


def markdown(sections: Sequence[ReportSection], title: str) -> str:
    """The document as Markdown, without pictures."""
    out = [f"# {_plain(title)}", ""]
    for section in sections:
        out += [f"## {_plain(section.title)}", ""]
        for text in section.text:
            out += [_plain(text), ""]
        if section.table and section.table.rows:
            rule = ["---" for _ in section.table.head]
            rows = (section.table.head, rule, *section.table.rows)
            out += [*map(_row, rows), ""]
    return "\n".join(out)


def _plain(text: str) -> str:
    """One line in which no tag stands: Markdown lets HTML through, and names come from results."""
    return html.escape(text.replace("\n", " "), quote=False)


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(_plain(cell).replace("|", "\\|") for cell in cells) + " |"


_STYLE = (
    ":root{color-scheme:light dark}"
    "body{font:16px/1.5 system-ui,sans-serif;max-width:80rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse;display:block;overflow-x:auto;font-size:13px}"
    "td,th{padding:.25rem .6rem;border-bottom:1px solid #8884;text-align:left;max-width:32rem}"
    "th,td:not(:last-child){white-space:nowrap}"
    "div{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(30rem,100%),1fr));gap:1rem}"
    "section:first-of-type p{font-size:1.15rem}"
    "svg{max-width:100%;height:auto;background:#fff;border-radius:6px}"
    "figure{margin:0}"
)


def page(sections: Sequence[ReportSection], title: str) -> str:
    """The document as one self-contained HTML page."""
    body = []
    for section in sections:
        body.append(f"<section><h2>{html.escape(section.title)}</h2>")
        body += [f"<p>{html.escape(t)}</p>" for t in section.text]
        if section.plots:
            figures = "".join(f"<figure>{svg}</figure>" for svg in section.plots)
            body.append(f"<div>{figures}</div>")
        if section.table and section.table.rows:
            body.append(_html_table(section.table))
        body.append("</section>")
    head = html.escape(title)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>{head}</title>"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head>"
        f"<body><h1>{head}</h1>{''.join(body)}</body></html>\n"
    )


def _html_table(table: Table) -> str:
    head = _cells("th", table.head)
    rows = "".join(_cells("td", row) for row in table.rows)
    return f"<table><thead>{head}</thead><tbody>{rows}</tbody></table>"


def _cells(tag: str, row: Sequence[str]) -> str:
    cells = "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row)
    return f"<tr>{cells}</tr>"
