"""Plots as SVG inside a page, which take the page's font and theme. Drawn with matplotlib.

Lines keep their colours. Text, axes and grid are drawn in stand-in colours that are then replaced by the page's own.
"""

from __future__ import annotations

import io
import re
from typing import Any

INK, GRID = "#010203", "#030201"  # the stand-ins; no line has these colours


def new_figure(height: float) -> tuple[Any, Any]:
    """An empty figure and its axes, as matplotlib objects. The height is in inches."""
    from matplotlib.figure import Figure  # not pyplot: no window, no global state

    figure = Figure(figsize=(7.6, height), layout="constrained")
    figure.patch.set_alpha(0)
    axes = figure.add_subplot()
    axes.patch.set_alpha(0)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(GRID)
    axes.tick_params(colors=INK, color=GRID, labelcolor=INK)
    axes.xaxis.label.set_color(INK)
    axes.yaxis.label.set_color(INK)
    return figure, axes


def to_svg(figure: Any, columns: int) -> str:
    """The figure as an <svg> element, with a legend of that many columns below it."""
    import matplotlib

    figure.legend(
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        labelcolor=INK,
        handlelength=2.2,
        fontsize=10,
    )
    out = io.StringIO()
    # Text stays text: it scales, can be copied and found, and takes the page's font.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "paceline", "font.size": 11}):
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    # Without a size of its own the drawing takes the width of the page.
    for attribute in ("height", "width"):
        text = re.sub(rf'(<svg[^>]*?) {attribute}="[^"]*"', r"\1", text, count=1)
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"font-family:[^;\"]*|font: [^;\"]*", lambda m: _plain_font(m[0]), text)
    return text.replace(INK, "currentColor").replace(GRID, "var(--line)")


def _plain_font(style: str) -> str:
    """The style with the page's font in place of matplotlib's own, which browsers lack, at the same size."""
    size = re.search(r"[\d.]+px", style)
    return f"font-size: {size[0]}; font-family: inherit" if size else "font-family: inherit"
