"""Drawings of the docs as SVG, made by `scripts/docs` from the arithmetic that they show."""

from __future__ import annotations

from collections.abc import Iterable

INK, SOFT, LINE = "#1f2933", "#52606d", "#cbd2d9"
TARGET, DRAFT, KEPT, WRONG = "#3e6fb0", "#b8c7dc", "#2f855a", "#c05621"
CURVES = {1: "#9fb3c8", 2: "#627d98", 4: "#3e6fb0", 8: "#2f855a"}
"""Colour of a curve by its tokens per draft."""


def tokens_per_step(acceptance: float, num_speculative_tokens: int) -> float:
    """Tokens that one step of the target yields on average, its own included.

    Where each drafted token is right with the same probability, whatever came before it.

    >>> round(tokens_per_step(0.8, 4), 2)
    3.36
    >>> tokens_per_step(1.0, 4)
    5.0
    """
    return sum(acceptance**position for position in range(num_speculative_tokens + 1))


def _svg(width: int, height: int, title: str, parts: Iterable[str]) -> str:
    """A picture on a white card, so that it reads on a dark page too."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'font-family="system-ui, sans-serif" font-size="14">'
    )
    card = f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>'
    return "\n".join([head, f"<title>{title}</title>", card, *parts, "</svg>"]) + "\n"


def _text(x: float, y: float, text: str, *, fill: str = INK, anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" fill="{fill}" text-anchor="{anchor}">{text}</text>'


def _box(x: float, y: float, width: float, text: str, fill: str, *, ink: str = "#ffffff") -> str:
    rect = f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="34" rx="4" fill="{fill}"/>'
    return rect + _text(x + width / 2, y + 22, text, fill=ink, anchor="middle")


def steps() -> str:
    """Four tokens by four steps of the target, and by one step that checks a draft."""
    words = ["the", "cat", "sat", "on"]
    guesses = ["the", "cat", "sat", "in"]
    parts = [_text(24, 34, "Without speculation: one token a step")]
    for index, word in enumerate(words):
        left = 24 + index * 160
        parts += [_box(left, 48, 146, "target", TARGET), _box(left + 76, 90, 70, word, KEPT)]
    parts.append(_text(24, 168, "With speculation: a draft of four tokens, checked in one step"))
    for index, guess in enumerate(guesses):
        parts.append(_box(24 + index * 62, 182, 56, guess, DRAFT, ink=INK))
    parts.append(_box(276, 182, 160, "target, once", TARGET))
    for index, word in enumerate(words):
        right = word == guesses[index]
        fill = WRONG
        if right:
            fill = KEPT
        parts.append(_box(276 + index * 62, 224, 56, word, fill))
    parts += [
        _text(24, 246, "cheap guesses, one after another", fill=SOFT),
        _text(532, 246, "3 accepted + 1 of its own", fill=SOFT),
        _text(24, 292, "time", fill=SOFT),
        f'<path d="M62 287 H640 l-7 -4 m7 4 l-7 4" stroke="{SOFT}" fill="none"/>',
    ]
    return _svg(720, 308, "Four tokens with and without speculation", parts)


def curves() -> str:
    """Tokens of a step over the chance that a drafted token is right."""
    left, top, width, height, most = 64.0, 24.0, 480.0, 260.0, 6.0

    def place(acceptance: float, tokens: float) -> tuple[float, float]:
        return left + width * acceptance, top + height * (1 - (tokens - 1) / (most - 1))

    parts = []
    for tokens in range(1, int(most) + 1):
        _, y = place(0, tokens)
        parts.append(f'<path d="M{left:g} {y:.1f} h{width:g}" stroke="{LINE}"/>')
        parts.append(_text(left - 10, y + 5, str(tokens), fill=SOFT, anchor="end"))
    for percent in range(0, 101, 20):
        x, y = place(percent / 100, 1)
        parts.append(_text(x, y + 22, f"{percent} %", fill=SOFT, anchor="middle"))
    for count, colour in CURVES.items():
        points = []
        for percent in range(101):
            tokens = tokens_per_step(percent / 100, count)
            if tokens > most:
                break
            x, y = place(percent / 100, tokens)
            points.append(f"{x:.1f},{y:.1f}")
        shape = f'<polyline points="{" ".join(points)}" stroke="{colour}" stroke-width="2.5"'
        parts.append(f'{shape} fill="none"/>')
    for row, (count, colour) in enumerate(CURVES.items()):
        y = top + 20 + row * 24
        parts.append(f'<path d="M574 {y:g} h24" stroke="{colour}" stroke-width="2.5"/>')
        parts.append(_text(606, y + 5, f"{count} per draft"))
    parts.append(
        _text(left + width / 2, 336, "chance that a drafted token is right", anchor="middle")
    )
    parts.append(_text(16, 16, "tokens per step of the target"))
    return _svg(720, 352, "Tokens per step by acceptance and draft length", parts)
