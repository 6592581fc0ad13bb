"""The tables at the end of docs/methods/*.md: knobs from the code, figures from bench/results.

    python bench/pages.py

What stands above the line `<!-- tables -->` is written by hand, what stands below it is not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline import registry
from paceline.core.parts import Part

HERE = Path(__file__).parent
PAGES = HERE.parent / "docs" / "methods"
MARK = "<!-- tables -->"
LINKS = ("unlimited", "1gbit", "100mbit", "10mbit")
CPU = {  # what bench/reducers.py calls it
    "qsgd": ("qsgd 4 bits", "qsgd 8 bits", "qsgd 2 bits"),
    "nuqsgd": ("nuqsgd 4 bits",),
    "sign": ("sign",),
    "int8": ("int8",),
    "topk": ("topk 1.0%", "topk 0.1%"),
}
GPU = {  # what bench/kernels_gpu.py calls it
    "qsgd": (
        "encode_blocks uniform 4",
        "add_blocks uniform 4, W=2",
        "encode_blocks uniform 8",
        "encode_blocks uniform 4, bf16",
    ),
    "nuqsgd": ("encode_blocks powers 4", "add_blocks powers 4, W=2"),
    "sign": ("encode_blocks sign", "add_blocks sign, W=2", "add_blocks sign, W=1, keep"),
    "int8": ("encode_bytes", "add_bytes W=2"),
    "topk": tuple(
        f"{what} {share}" for share in ("1.0%", "0.1%") for what in ("largest", "those above it", "topk of torch")
    ),
}


def results(name: str) -> dict[str, Any]:
    path = HERE / "results" / f"{name}.json"
    return dict(json.loads(path.read_text())) if path.exists() else {}


def table(head: list[str], rows: list[list[str]]) -> Iterator[str]:
    yield "| " + " | ".join(head) + " |"
    yield "|" + "|".join("---" if i == 0 else "--:" for i in range(len(head))) + "|"
    for row in rows:
        yield "| " + " | ".join(row) + " |"
    yield ""


def knobs(cls: type[Part]) -> Iterator[str]:
    rows = [
        [f"`{k.name}`", _default(k.default), k.range.replace(" | ", ", "), f"{k.effect}{k.unit and f' ({k.unit})'}"]
        for k in cls.knobs()
    ]
    if rows:
        yield "## Knobs"
        yield ""
        yield from ("| knob | default | range | effect |", "|---|---|---|---|")
        yield from ("| " + " | ".join(row) + " |" for row in rows)
        yield ""


def _default(value: Any) -> str:
    shown = value.name if isinstance(value, Part) else repr(value)
    return f"`{shown}`"


def to_target(name: str) -> Iterator[str]:
    """Seconds to the target on every link, beside exact's."""
    book = results("time_to_accuracy")
    known = {(c["task"], c["workers"], c["method"], c["link"]): c for c in book.get("seconds_to_target", [])}
    mine = [m for m in dict.fromkeys(key[2] for key in known) if m.split()[0] == name]
    if not mine:
        return
    yield "Seconds to the target, as steps × measured step time (`bench/results/time_to_accuracy.json`; two cores)."
    yield ""
    for task, workers in sorted({key[:2] for key in known}):
        shown = [m for m in dict.fromkeys(["exact", *mine]) if (task, workers, m, LINKS[0]) in known]
        if not any(m in shown for m in mine):
            continue
        yield from table(
            [f"{task}, {workers} workers, to {book['targets'][task]}", "steps", *LINKS],
            [_row(m, [known.get((task, workers, m, link)) for link in LINKS]) for m in shown],
        )


def _row(method: str, cells: list[dict[str, Any] | None]) -> list[str]:
    steps = next((f"{c['steps']:.0f}" for c in cells if c and c["seconds"]), "not reached")
    return [method, steps, *("" if c is None else f"{c['seconds']:.1f}" if c["seconds"] else "–" for c in cells)]


def whole_runs(name: str) -> Iterator[str]:
    """Seconds to the target as they were, beside exact's."""
    book = results("time_to_accuracy")
    spec = {**book.get("tuned", {}), **book.get("syncs_knobs", {})}
    mine = [r for r in book.get("syncs_summary", []) if r["method"] in spec and _tells_of(name, spec[r["method"]][0])]
    if not mine:
        return
    yield "Whole runs, two cores, means over the seeds (`bench/results/time_to_accuracy.json`, part `syncs`); exact"
    yield "on a slow link by steps × step time."
    yield ""
    for method in dict.fromkeys(row["method"] for row in mine):
        what, knobs = spec[method]
        said = ", ".join(f"{k}={v}" for k, v in knobs.items())
        yield from table(
            [
                f"{what} {said and f'({said})'}".strip(),
                "seeds",
                "seconds",
                "over exact, free link",
                "exact there over it",
            ],
            [[_where(r), f"{r['seeds']}", *(_number(r[key]) for key in _WHOLE)] for r in mine if r["method"] == method],
        )


def _tells_of(name: str, method: str) -> bool:
    """Whether what the method did says something about this part of it: with another sync, it is the sync's doing."""
    parts = method.split("+")
    return name in parts and name in ([p for p in parts if registry.find(p).axis == "sync"] or parts)


_WHOLE = ("seconds", "over_exact_unlimited", "faster_than_exact_here")


def _where(row: dict[str, Any]) -> str:
    how = ", by steps × step time" * row.get("by_steps", False)
    return f"{row['task']}, {row['workers']} workers, {row['condition']}{how}"


ORDERS = {"Sixteen": "order_16_cores", "Two": "order"}


def orders(name: str) -> Iterator[str]:
    """Of an order: a step beside torch DDP's, and how near it comes to the ideal pipeline."""
    found = {cores: cells for cores, book in ORDERS.items() if (cells := results(book).get("cells"))}
    if not any(cell["method"].split()[0] == name for cells in found.values() for cell in cells):
        return
    yield "A stack of equal layers, whose bytes take `comm/comp` times its computing on that link, each worker on a"
    yield "host of its own in the network lab. `near` is the larger of the two, which no order can beat, over the step."
    yield "The lab's links are made of the same cores: where four workers share two, gradients are smaller, and an"
    yield "order has less to gain."
    head = ["workers", "gradients", "comm/comp", "link", "order", "step ms", "torch DDP over it", "near"]
    keys = ("ratio", "link", "method")
    for cores, cells in found.items():
        yield ""
        yield f"{cores} cores (`bench/results/{ORDERS[cores]}.json`):"
        yield ""
        yield from table(
            head,
            [
                [
                    str(c["workers"]),
                    f"{c['gradient_bytes'] / 1e6:.1f} MB",
                    *(str(c[key]) for key in keys),
                    f"{c['step_ms']:.0f}",
                    f"{c['over_ddp']:.2f}",
                    f"{c['near_ideal']:.2f}",
                ]
                for c in cells
            ],
        )


def sharing(name: str) -> Iterator[str]:
    """Of a layout: memory and time beside torch's, which shares out the same."""
    book = results("zero")
    memory, time = ([c for c in book.get(key, []) if c["method"] == name] for key in ("memory", "time"))
    if name not in _PEER or not memory or not time:
        return
    yield "A GPT of 6.4 million fp32 parameters with AdamW on two cores (`bench/results/zero.json`). Live bytes of"
    yield "tensors for each parameter, activations of one window included, after `zero_grad` and at the most in a step,"
    yield f"and how many times as much torch's takes ({_PEER[name]}):"
    yield ""
    keys = ("between_steps_bytes", "peak_bytes")
    yield from table(
        ["workers", "between steps", "peak", "torch's over it", "at the peak"],
        [[str(c["workers"]), *(f"{c[k]:.1f}" for k in keys), *(f"{c['ratio'][k]:.2f}" for k in keys)] for c in memory],
    )
    yield "A step, and torch's over it; 100mbit is between hosts of the network lab:"
    yield ""
    yield from table(
        ["workers", "link", "step ms", "torch's over it"],
        [[str(c["workers"]), c["link"], f"{c['step_ms']:.0f}", f"{c['ratio']['step_ms']:.2f}"] for c in time],
    )


_PEER = {"zero1": "ZeroRedundancyOptimizer", "zero2": "ZeroRedundancyOptimizer", "zero3": "FSDP2"}


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def costs(name: str) -> Iterator[str]:
    cpu, gpu = results("reducers"), results("kernels_gpu")
    rows = [row for row in cpu.get("rows", []) if row["code"] in CPU.get(name, ())]
    if rows:
        yield "One CPU thread, 10 M elements, in copies of the same vector (`bench/results/reducers.json`):"
        yield ""
        words = [[row["code"], *(f"{row[f'{k}_memcpys']:.1f}" for k in ("encode", "decode", "plain"))] for row in rows]
        yield from table(["", "encode", "decode", "plain torch encode"], words)
    kernels = [row for row in gpu.get("kernels", []) if row.get("kernel") in GPU.get(name, ()) and "ms" in row]
    if kernels:
        yield f"{gpu['machine']}, 100 M elements (`bench/results/kernels_gpu.json`):"
        yield ""
        words = [[row["kernel"], f"{row['ms']:.3f}", f"{row['ratio']:.2f}"] for row in kernels]
        yield from table(["", "ms", "× its bytes in a copy"], words)


def page(name: str, text: str) -> str:
    """The page with its tables as they should be."""
    cls = registry.find(name)
    measured = [*to_target(name), *whole_runs(name), *orders(name), *sharing(name), *costs(name)]
    made = [*knobs(cls), *(["## Measured", ""] if measured else []), *measured]
    return "\n".join([text.partition(MARK)[0].rstrip(), "", MARK, "", *made]).rstrip() + "\n"


def main() -> None:
    for path in sorted(PAGES.glob("*.md")):
        if path.stem in registry.parts():
            path.write_text(page(path.stem, path.read_text()))


if __name__ == "__main__":
    main()
