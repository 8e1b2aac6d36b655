"""What speculation did: what each verify drafted, accepted and emitted."""

import dataclasses
from collections.abc import Sequence

from statecore.display._html import Markup, element, joined, svg, table
from statecore.speculative import Telemetry

_SQUARE, _GAP, _LEFT = 12, 3, 34
_PER_LINE = 44
_ACCEPTED, _REJECTED, _OWN = "#2a9d8f", "#c2497a", "#3b82c4"
# Two colors in turn tell each verify from the next; a plain step has none.
_TINTS = ("rgba(42,157,143,.30)", "rgba(59,130,196,.30)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Emission:
    """Tokens emitted at once: by a verify, or by a plain step where nothing was guessed.

    num_drafted: tokens guessed; 0 for a plain step.
    num_accepted: guesses that plain decoding would have emitted too.
    num_tokens: tokens emitted: the accepted ones and the one that the model said next.
    text: the text of those tokens.
    """

    num_drafted: int
    num_accepted: int
    num_tokens: int
    text: str


def speculation_html(emissions: Sequence[Emission]) -> Markup:
    """Returns a picture of the verifies, one column each, and the text colored by who emitted it."""
    lines = [emissions[i : i + _PER_LINE] for i in range(0, len(emissions), _PER_LINE)]
    pictures = [element("div", _columns(line)) for line in lines]
    return element("div", _key(), *pictures, _text(emissions))


def telemetry_html(telemetry: Telemetry) -> Markup:
    """Returns a picture of a measured stretch: each verify, how often each place was accepted, where time went."""
    columns = zip(telemetry.drafted, telemetry.accepted, telemetry.emitted, strict=True)
    emissions = [Emission(num_drafted=a, num_accepted=b, num_tokens=c, text="") for a, b, c in columns]
    lines = [emissions[i : i + _PER_LINE] for i in range(0, len(emissions), _PER_LINE)]
    places = zip(telemetry.drafted_at, telemetry.accepted_at, strict=False)
    rows = [[f"draft {i + 1}", str(n), f"{k / n:.0%}" if n else "-"] for i, (n, k) in enumerate(places)]
    parts = {"draft": telemetry.seconds_draft, "verify": telemetry.seconds_verify, "commit": telemetry.seconds_commit}
    rest = telemetry.seconds - sum(parts.values())
    times = [[name, f"{seconds * 1e3:.1f} ms"] for name, seconds in (parts | {"rest": rest}).items()]
    said = f"{telemetry.tokens_per_second:.1f} tokens a second, mode {telemetry.mode or 'none'}"
    return element(
        "div", _key(), *[element("div", _columns(line)) for line in lines], element("p", said),
        table(["place", "verified", "accepted"], rows), table(["part", "time"], times),
    )  # fmt: skip


def _columns(emissions: Sequence[Emission]) -> Markup:
    """Returns a column a verify: accepted guesses from below, the model's own token, rejected guesses above."""
    tallest = max(max(item.num_tokens, item.num_drafted + 1) for item in emissions)
    height = tallest * (_SQUARE + 2)
    drawn = [_column(item, _LEFT + i * (_SQUARE + _GAP), height) for i, item in enumerate(emissions)]
    label = element("text", "tokens", x=0, y=height - 2, font_size=10)
    width = _LEFT + _PER_LINE * (_SQUARE + _GAP)
    return svg(width, height + 6, "tokens that each verify drafted, accepted and emitted", label, *drawn)


def _column(item: Emission, left: float, height: float) -> Markup:
    own = item.num_tokens - item.num_accepted
    colors = [_ACCEPTED] * item.num_accepted + [_OWN] * own
    rejected = item.num_drafted - item.num_accepted
    squares = [
        element("rect", x=left, y=height - (i + 1) * (_SQUARE + 2), width=_SQUARE, height=_SQUARE, fill=color)
        for i, color in enumerate(colors)
    ]
    squares += [
        element(
            "rect", x=left + 0.5, y=height - (len(colors) + i + 1) * (_SQUARE + 2) + 0.5, width=_SQUARE - 1,
            height=_SQUARE - 1, fill="none", stroke=_REJECTED, stroke_dasharray="2 2",
        )
        for i in range(rejected)
    ]  # fmt: skip
    return element("g", element("title", told(item)), *squares)


def told(item: Emission) -> str:
    """Returns in a sentence what was drafted, accepted and emitted."""
    if not item.num_drafted:
        return f"a plain step: {item.text!r}"
    return f"{item.num_drafted} drafted, {item.num_accepted} accepted, {item.num_tokens} emitted: {item.text!r}"


def _key() -> Markup:
    items = (
        (_ACCEPTED, "a guess that was right"),
        (_OWN, "the model's own token"),
        (_REJECTED, "a guess that was wrong"),
    )
    return element(
        "p", *[joined([element("span", "■ ", style=f"color:{color}"), text, "   "]) for color, text in items]
    )


def _text(emissions: Sequence[Emission]) -> Markup:
    spans, verifies = [], 0
    for item in emissions:
        verifies += bool(item.num_drafted)
        style = f"background:{_TINTS[verifies % 2]}" if item.num_drafted else None
        spans.append(element("span", item.text, title=told(item), style=style))
    return element("pre", *spans, style="white-space:pre-wrap;overflow-wrap:anywhere")
