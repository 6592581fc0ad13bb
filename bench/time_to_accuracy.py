"""Seconds until a model is good enough, for every reducer, beside torch, on four links.

    python bench/time_to_accuracy.py --out bench/results/time_to_accuracy.json --plot docs/methods/plots

A synchronous method's trajectory does not depend on the link: only the time of a step does. So the grid is cut in two.

steps    how many steps a method takes to the target, for each task, number of workers and seed: really trained, by
         real processes on this machine's loopback. torch:ddp takes as many as exact: it is the same mean
         (tests/oracle/test_ddp.py). Buckets are as small as a slow link makes them, because some reducers round a
         bucket at a time.
time     the median step, for each task, number of workers and link: methods take turns, as in `paceline race`. `floor`,
         which sends nothing, runs with them: by its steps the summary takes out what the machine itself was slower on
         one link's turn than on another's.
syncs    whole runs of the methods that agree less often or not all together (and, by name, of any other), beside exact:
         on slow links, and on a free one with a worker of half the speed. Weights are kept as they go by and evaluated
         when training is over, so that nobody who looks gives the others time for nothing. What would take longer than
         five minutes is run for a few steps and given the steps of the next faster link, and said to be so.

final    how good the model is at the end of a run over which the learning rate falls to zero, as it does where training
         is finished and not only timed: for exact, for the reducers and syncs that were fastest. text is trained for
         longer than to its target, where it is still learning fast, and its learning rate rises at first: without that
         it is chance how long a run stays near where it began, and seeds differ more than methods.

Seconds to the target are steps × step time, and said to be so; those of `syncs` are measured whole. A
method that sends more in its first steps than later (dgc, onebit_adam) is given the time of the bytes it really sent.

Every cell is written when it is known, and what is known is not measured again: run it as often as it takes. What
failed or was refused is tried again, and a method that did not get there with one seed is not tried with the next.
With `--seeds 0` first there is a whole grid soon; without it the other seeds are added. Wants root for the shaped
links; leave the machine alone while it runs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.integrations.peers import PEERS
from paceline.method import method as make_method
from paceline.session.settings import Settings
from paceline.telemetry import files
from paceline.telemetry.events import Step
from paceline.tools.lab import namespaces
from paceline.tools.lab.namespaces import parse_link
from paceline.tools.race import result, runner, score
from paceline.tools.race.contenders import Contender, task_command
from paceline.tools.race.network import open_network
from paceline.tools.race.runner import RaceRules
from paceline.tools.race.score import Target

LINKS = ("unlimited", "1gbit", "100mbit", "10mbit")
SEEDS = (0, 1, 2)
GOALS = {"100mbit": 1.15, "10mbit": 1.5}  # the best of ours over exact without a limit
POINTS = 0.5  # of accuracy at the end that it may lose

PAPERS = ("exact", "half", "int8", "qsgd", "nuqsgd", "sign", "topk", "randomk", "dgc", "powersgd", "onebit_adam")
# name: (method, knobs). What we would set for these tasks, found by trying.
TUNED: dict[str, tuple[str, dict[str, Any]]] = {
    "powersgd rank=8": ("powersgd", {"rank": 8}),
    "powersgd bf16": ("powersgd", {"wire": "bf16"}),
    "powersgd rank=8 bf16": ("powersgd", {"rank": 8, "wire": "bf16", "bucket_mb": 16}),
    "topk ratio=0.1": ("topk", {"ratio": 0.1}),
    "qsgd bits=8": ("qsgd", {"bits": 8}),
    "powersgd rank=8 int4": ("powersgd", {"rank": 8, "wire": "int4", "bucket_mb": 16}),
    "powersgd rank=8 int8": ("powersgd", {"rank": 8, "wire": "int8", "bucket_mb": 16}),
    "powersgd rank=8..64 int8": (
        "warmup+powersgd",
        {"schedule": "rank", "start": 8, "stages": 1, "steps": 90, "rank": 64, "wire": "int8", "bucket_mb": 16},
    ),
    "powersgd priority": ("powersgd+priority", {"rank": 8, "wire": "bf16"}),
}
# Methods with another sync, by the name they have in `syncs`.
SYNCS: dict[str, tuple[str, dict[str, Any]]] = {
    "local_sgd": ("local_sgd", {"every": 8}),
    "local_sgd powersgd": ("local_sgd+powersgd", {"every": 8, "rank": 8, "wire": "bf16", "delay": 3}),
    "local_sgd powersgd H=4": ("local_sgd+powersgd", {"every": 4, "rank": 8, "wire": "bf16", "delay": 2}),
    "local_sgd powersgd H=3": ("local_sgd+powersgd", {"every": 3, "rank": 10, "wire": "bf16", "delay": 1}),
    "local_sgd powersgd H=2": ("local_sgd+powersgd", {"every": 2, "rank": 8, "wire": "bf16", "delay": 1}),
    "local_sgd powersgd int4": ("local_sgd+powersgd", {"every": 4, "rank": 16, "wire": "int4", "bucket_mb": 16}),
    "post_local_sgd": ("post_local_sgd+powersgd", {"start": 20, "every": 8, "rank": 8, "wire": "bf16", "delay": 3}),
    "slowmo powersgd": ("slowmo+powersgd", {"every": 8, "beta": 0.3, "rank": 8, "wire": "bf16", "delay": 3}),
    "diloco powersgd H=4": (
        "diloco+powersgd",
        {"every": 4, "outer_momentum": 0.5, "rank": 8, "wire": "bf16", "delay": 2},
    ),
    "diloco powersgd": ("diloco+powersgd", {"every": 16, "rank": 8, "wire": "bf16", "delay": 3}),
    "torch:local_sgd": ("torch:local_sgd", {}),
    "sma": ("sma", {}),
    "gossip": ("gossip", {}),
    "gossip_lowbit": ("gossip_lowbit", {}),
    "async_average": ("async_average", {}),
    "async_average H=4": ("async_average", {"every": 4}),
    "async_average H=2": ("async_average", {"every": 2}),
    "async_average H=1": ("async_average", {"every": 1}),
    "delayed powersgd": ("delayed+powersgd", {"staleness": 1, "rank": 8, "wire": "bf16"}),
    "backup_workers": ("backup_workers", {"backups": 1}),
    "parameter_server": ("parameter_server", {"consistency": "bounded"}),
}
FINAL = (
    *("exact", "powersgd rank=8", "powersgd bf16", "powersgd rank=8 bf16"),
    *("powersgd rank=8..64 int8", "qsgd"),
    *(f"local_sgd powersgd{h}" for h in ("", " H=4", " H=3")),
)
# What we would use on a slow link.
OURS = {
    ("fashion", 2, "100mbit"): "local_sgd powersgd H=4",
    ("fashion", 2, "10mbit"): "local_sgd powersgd H=4",
    ("fashion", 4, "100mbit"): "local_sgd powersgd H=3",
    ("fashion", 4, "10mbit"): "local_sgd powersgd H=3",
    ("text", 2, "100mbit"): "powersgd rank=8..64 int8",
    ("text", 2, "10mbit"): "powersgd rank=8..64 int8",
    ("text", 4, "100mbit"): "powersgd rank=8..64 int8",
    ("text", 4, "10mbit"): "powersgd rank=8..64 int8",
}
SLOW = "one slow worker"  # a condition of `syncs`, in the place of a link
CONDITIONS = ("unlimited", "100mbit", "10mbit", SLOW)
# Who sends so much in every step that a whole run of text on the slowest link takes longer than five minutes.
LONG = ("sma", "gossip", "gossip_lowbit", "parameter_server")
A_FEW = 11  # steps of it

TORCH = ("torch:ddp", "torch:fp16", "torch:powersgd")
YARDSTICK = "floor"
SAME_STEPS = {"torch:ddp": "exact"}

SMALL_BUCKET_MB = Settings().bucket_bytes(slow_link=True) / 2**20
START_LINK = "1gbit"
NEVER = 10**9
PROCESSES = 32  # at once: each has torch and the data in memory
STEP_SECONDS, STEP_COUNT = 5.0, 40  # of a cell of `time`, whichever is first
SLOW_TURN, TURN = 3, 6  # steps of a turn of `time`; at 10 Mbit/s a step takes up to 14 s, and the first does not count
SCHEDULED = 1.05  # more bytes to the target than in the steps that were timed, by this factor: it has a schedule

Cell = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """A task with its target, and the arguments that some methods need to be comparable."""

    target: str
    steps: int  # at most, for exact itself
    turn: int  # the target is looked at in between
    whole: int  # steps of a run of `syncs`
    trained: int  # ... of `final`
    eval_every: int
    rising: float = 0.0  # share of the steps of `final` in which the learning rate rises
    own: dict[str, list[str]] = field(default_factory=dict)
    without: tuple[str, ...] = ()  # methods for another optimizer


TASKS = {
    # dgc applies the momentum itself.
    "fashion": Task("accuracy=0.85", 800, 20, 400, 400, 20, 0.0, {"dgc": ["--momentum", "0"]}, ("onebit_adam",)),
    "text": Task("eval_loss=2.9", 300, 10, 160, 960, 5, 0.1, {}, ("dgc",)),
}


def spec(name: str) -> tuple[str, dict[str, Any]]:
    return {**TUNED, **SYNCS}.get(name, (name, {}))


def contender(task: str, name: str, *, seed: int = 0, extra: Sequence[str] = ()) -> Contender:
    """The method as it will race. Raises a PacelineError if there is no such method."""
    method, knobs = spec(name)
    settings = ["--bucket-mb", f"{knobs['bucket_mb']:g}"] if "bucket_mb" in knobs else []
    knobs = {knob: value for knob, value in knobs.items() if knob != "bucket_mb"}
    if method not in PEERS:
        make_method(method, **knobs)
    arguments = task_command(task, [*TASKS[task].own.get(method, []), *extra, *settings], seed=seed)
    return Contender(method, arguments, knobs, alias=name.replace(" ", "-"))


def race(contenders: list[Contender], rules: RaceRules, workers: int, link: str) -> str:
    """Run it, and what kind of link it ran on. Every contender knows what came of it.

    In the lab the link gets its speed when all have started: to share the first weights of a dozen contenders at
    10 Mbit/s would take longer than all that is measured.
    """
    limited = link != "unlimited" and namespaces.available() is None
    with open_network(START_LINK if limited else link, workers, None) as links, tempfile.TemporaryDirectory() as folder:

        def slow_down(one: Contender) -> None:
            if one.state == "running" and links.lab is not None and links.lab.link != parse_link(link):
                links.lab.link = parse_link(link)
                for host in range(links.lab.hosts):
                    links.lab.shape(host, links.lab.link)

        if not runner.run(contenders, rules, links, Path(folder), slow_down):
            raise KeyboardInterrupt
        return links.kind


def bucket(link: str) -> list[str]:
    """The size that a worker chooses when it starts on a slow link; here it starts on a faster one."""
    return [] if link == "unlimited" else ["--bucket-mb", f"{SMALL_BUCKET_MB:g}"]


def refusal(error: str) -> str:
    told = error.partition(" (log: ")[0]
    return f"refused: {told}" if "MethodError" in error else f"failed: {told}"


# ---------------------------------------------------------------------------------------------------- the three parts


def train(task: str, name: str, workers: int, seed: int, limit: int) -> Cell:
    """Train until the target, or for `limit` steps, on a free link with buckets as the slowest has them."""
    job = TASKS[task]
    target = Target.parse(job.target)
    try:
        one = contender(task, name, seed=seed, extra=["--eval-every", str(job.eval_every), *bucket(LINKS[-1])])
    except PacelineError as error:
        return {"error": f"refused: {error.what}"}
    kind = race([one], RaceRules(steps=limit, warmup=0, turn=job.turn, target=target), workers, "unlimited")
    events = one.record(workers).events
    curve = score.progress(events, target.name)
    met = next((p for p in curve if target.met(p.value)), None)
    best = (min if target.falls else max)((p.value for p in curve), default=None)
    sent = dict(score.bytes_by_step(events, wire=False))
    steps = met.step + 1 if met else None
    return {
        "steps": steps,
        "seconds": round(met.busy_s, 3) if met else None,
        "ran": one.done,
        "best": best and round(best, 4),
        "sent_bytes_per_step": round(sent[steps] / steps) if steps and sent.get(steps) else None,
        "link_kind": kind,
        "curve": [(p.step + 1, round(p.value, 4)) for p in curve if (p.step + 1) % 10 == 0],
        "error": refusal(one.error) if one.error else None,
    }


def train_whole(task: str, name: str, workers: int, condition: str, seed: int, limit: int) -> Cell:
    """The script's own run of `limit` steps, evaluated afterwards: nothing stops it in between."""
    job, link = TASKS[task], "unlimited" if condition == SLOW else condition
    target = Target.parse(job.target)
    extra = ["--eval-later", "--eval-every", str(job.eval_every), "--steps", str(limit), *bucket(link)]
    try:
        one = contender(task, name, seed=seed, extra=[*extra, *(["--slow-worker", "1"] if condition == SLOW else [])])
    except PacelineError as error:
        return {"error": f"refused: {error.what}"}
    kind = race([one], RaceRules(steps=2 * limit, warmup=0, turn=2 * limit), workers, link)
    events = one.record(workers).events
    curve = score.progress(events[:1], target.name)  # worker 0's: where workers keep their own pace, so does this
    met = next((p for p in curve if target.met(p.value)), None)
    sent = sum(event.sent for event in (events[0] if events else ()) if isinstance(event, Step))
    return {
        "steps": met.step if met else None,
        "seconds": round(met.busy_s, 3) if met else None,
        "ran": limit,
        "ran_seconds": round(curve[-1].busy_s, 3) if curve else None,
        "best": round((min if target.falls else max)(p.value for p in curve), 4) if curve else None,
        "sent_bytes_per_step": round(sent / limit),
        "link_kind": kind,
        "curve": [(p.step, round(p.busy_s, 2), round(p.value, 4)) for p in curve],
        "error": refusal(one.error) if one.error else None,
    }


def train_a_few(task: str, name: str, workers: int) -> float | None:
    """The mean step on the slowest link, by a few of them; None: it failed."""
    cell = train_whole(task, name, workers, LINKS[-1], SEEDS[0], A_FEW)
    if cell["error"] or len(cell["curve"]) < 2:
        return None
    (first, began, _), *_, (last, ended, _) = cell["curve"]
    return float((ended - began) / (last - first))


def train_out(task: str, name: str, workers: int, seed: int) -> Cell:
    """A run with a falling learning rate, evaluated at its end."""
    job = TASKS[task]
    steps = job.trained
    rate = ["--lr-decay", "--lr-warmup", str(max(1, round(job.rising * steps)))]
    extra = [*rate, "--eval-every", str(steps), "--steps", str(steps), *bucket(LINKS[-1])]
    one = contender(task, name, seed=seed, extra=extra)
    race([one], RaceRules(steps=2 * steps, warmup=0, turn=2 * steps), workers, "unlimited")
    curve = score.progress(one.record(workers).events, "accuracy")
    last = round(curve[-1].value, 4) if curve else None
    return {"last": last, "steps": steps, "error": refusal(one.error) if one.error else None}


def time_steps(task: str, names: Sequence[str], workers: int, link: str) -> Iterator[tuple[str, Cell]]:
    """The median step of each, taking turns."""
    racing = {}
    for name in names:
        try:
            racing[name] = contender(task, name, extra=["--eval-every", str(NEVER), *bucket(link)])
        except PacelineError as error:
            yield name, {"error": f"refused: {error.what}"}
    if not racing:
        return
    turn = SLOW_TURN if link == LINKS[-1] else TURN
    rules = RaceRules(steps=STEP_COUNT, warmup=2, turn=turn, seconds=STEP_SECONDS)
    kind = race(list(racing.values()), rules, workers, link)
    for name, one in racing.items():
        row = score.rows([one.record(workers)], link=link, warmup=rules.warmup)[0]
        known = {key: getattr(row, key) for key in ("sent_bytes_per_step", "wire_bytes_per_step", "cpu_ms_per_step")}
        yield (
            name,
            {
                "step_ms": row.step_ms_median,
                "measured_steps": row.steps,
                **known,
                "link_kind": kind,
                "error": refusal(one.error) if one.error else None,
            },
        )


# ---------------------------------------------------------------------------------------------------- the file


class Book:
    """All cells, in a file that is whole after every one of them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.cells: dict[str, list[Cell]] = {"steps": [], "time": [], "syncs": [], "final": []}
        if path.exists():
            known = json.loads(path.read_text())
            self.cells |= {part: known[part] for part in self.cells if part in known}
        self.header = result.header("time_to_accuracy")

    def find(self, part: str, **key: Any) -> list[Cell]:
        return [c for c in self.cells[part] if all(c[k] == v for k, v in key.items())]

    def known(self, part: str, **key: Any) -> bool:
        return any(not cell["error"] for cell in self.find(part, **key))

    def add(self, part: str, key: dict[str, Any], cell: Cell) -> None:
        self.cells[part] = [c for c in self.cells[part] if any(c[k] != v for k, v in key.items())]
        self.cells[part].append(
            {
                **key,
                "date": result.now(),
                "commit": self.header["commit"],
                "cpu": self.header["machine"]["cpu"],
                **cell,
            }
        )
        self.write()
        words = " ".join(f"{value}" for value in key.values())
        shown = {
            k: v
            for k, v in cell.items()
            if k in ("steps", "seconds", "step_ms", "best", "last", "error") and v is not None
        }
        print(f"{part:8s}{words:40s} {' '.join(f'{k} {v}' for k, v in shown.items())}"[:160], flush=True)

    def write(self) -> None:
        whole = {
            **self.header,
            "targets": {name: task.target for name, task in TASKS.items()},
            "tuned": TUNED,
            "syncs_knobs": SYNCS,
            "bucket_mb_of_steps": SMALL_BUCKET_MB,
            **self.cells,
            "seconds_to_target": list(estimates(self)),
            "summary": list(summary(self)),
            "syncs_summary": list(syncs_summary(self)),
            "final_summary": list(final_summary(self)),
            "goals": list(goals(self)),
        }
        files.write(self.path, json.dumps(whole, indent=1) + "\n")


# ---------------------------------------------------------------------------------------------------- what follows


def names(task: str) -> list[str]:
    """Who runs on this task; exact first, since it says how long the others may take."""
    return [name for name in (YARDSTICK, *PAPERS, *TUNED, *TORCH) if spec(name)[0] not in TASKS[task].without]


def steps_of(book: Book, task: str, workers: int, name: str) -> list[Cell]:
    return book.find("steps", task=task, workers=workers, method=SAME_STEPS.get(name, name))


def step_seconds(timed: Cell, trained: Sequence[Cell], link: str) -> tuple[float, bool]:
    """A mean step on the way to the target; True: it is not the timed one, because a schedule changes its bytes."""
    sent = [cell["sent_bytes_per_step"] for cell in trained if cell.get("sent_bytes_per_step")]
    bits, there = parse_link(link).bits_per_second, timed.get("sent_bytes_per_step")
    if bits is None or not sent or not there or 1 / SCHEDULED < statistics.mean(sent) / there < SCHEDULED:
        return timed["step_ms"] / 1e3, False
    # On a link this slow the bytes are what a step waits for; never for less than it computes.
    changed = timed["step_ms"] / 1e3 + 8 * (statistics.mean(sent) - there) / bits
    return max(changed, timed["cpu_ms_per_step"] / 1e3), True


def estimates(book: Book) -> Iterator[Cell]:
    """Steps × step time, wherever both are known."""
    for timed in book.cells["time"]:
        task, workers, name, link = (timed[key] for key in ("task", "workers", "method", "link"))
        trained = steps_of(book, task, workers, name)
        if not trained:
            continue
        cell = {key: timed[key] for key in ("task", "workers", "method", "link")}
        error = timed["error"] or next((c["error"] for c in trained if c["error"]), None)
        reached = [c["steps"] for c in trained if c.get("steps")]
        if error or len(reached) < len(trained):
            best = [c["best"] for c in trained if c.get("best") is not None]
            why = error or f"not reached in {len(trained) - len(reached)} of {len(trained)} runs"
            yield {**cell, "seconds": None, "why": why, "best": best and round(statistics.mean(best), 4)}
            continue
        step_s, scheduled = step_seconds(timed, trained, link)
        steps = statistics.mean(reached)
        how = "steps × measured step time" + ", bytes of its schedule" * scheduled
        spread = [min(reached), max(reached)]
        yield {**cell, "seconds": round(steps * step_s, 2), "steps": round(steps, 1), "spread": spread, "how": how}


def at_exacts_steps(book: Book, task: str, workers: int, name: str) -> float | None:
    """How good it is when exact has reached the target: mean over the seeds both have run."""
    found = []
    for cell in steps_of(book, task, workers, name):
        exact = next((c for c in steps_of(book, task, workers, "exact") if c["seed"] == cell["seed"]), {})
        upto = [value for step, value in cell.get("curve", []) if step <= (exact.get("steps") or 0)]
        found += upto[-1:]
    return statistics.mean(found) if found else None


def best_of_ours(cells: Iterable[Cell]) -> Cell | None:
    ours = [cell for cell in cells if cell["seconds"] and cell["method"] not in TORCH]
    return min(ours, key=lambda cell: float(cell["seconds"]), default=None)


def slower(book: Book, task: str, workers: int, link: str) -> float:
    """How much slower the machine itself was on this link's turn than on the unlimited one's."""
    ms = {
        one: cell["step_ms"]
        for one in (link, "unlimited")
        for cell in book.find("time", task=task, workers=workers, link=one, method=YARDSTICK)
        if cell.get("step_ms")
    }
    return ms[link] / ms["unlimited"] if len(ms) == 2 else 1.0


def summary(book: Book) -> Iterator[Cell]:
    """For each link the best of ours over exact without a limit: by steps × step time at the same speed of the machine,
    and by whole runs.
    """
    known = list(estimates(book))
    whole = [row for row in syncs_summary(book) if row["over_exact_unlimited"] and row["seeds"] >= len(SEEDS)]
    for task, workers in sorted({(cell["task"], cell["workers"]) for cell in known}):
        where = {"task": task, "workers": workers}
        here = [cell for cell in known if where.items() <= cell.items()]
        base = next((c["seconds"] for c in here if (c["method"], c["link"]) == ("exact", "unlimited")), None)
        for link in LINKS:
            best = best_of_ours(cell for cell in here if cell["link"] == link)
            if best is None:
                continue
            machine = slower(book, task, workers, link)
            ran = [row for row in whole if {**where, "condition": link}.items() <= row.items()]
            fastest = min(ran, key=lambda row: row["over_exact_unlimited"], default=None)
            yield {
                **where,
                "link": link,
                "goal": GOALS.get(link),
                "best": best["method"],
                "seconds": best["seconds"],
                "machine_slower": round(machine, 3),
                "over_exact_unlimited": round(best["seconds"] / machine / base, 3) if base else None,
                "value_at_exacts_steps": _rounded(at_exacts_steps(book, task, workers, best["method"])),
                "exacts_value": _rounded(at_exacts_steps(book, task, workers, "exact")),
                "best_whole": fastest and fastest["method"],
                "whole_over_exact_unlimited": fastest and fastest["over_exact_unlimited"],
            }


def syncs_summary(book: Book) -> Iterator[Cell]:
    """By condition: each method's seconds to the target over exact's without a limit, and exact's own over it (on a
    slow link as steps × step time: a whole run of it would take the better part of an hour); and how good the model is
    at the end of the run, in the same steps. Means over the seeds, and compared over those that both have run. Only
    what ran on machines of one kind is compared.
    """
    by_steps = {(c["task"], c["workers"], c["link"]): c["seconds"] for c in estimates(book) if c["method"] == "exact"}
    for task, workers, condition in sorted({(c["task"], c["workers"], c["condition"]) for c in book.cells["syncs"]}):
        where = {"task": task, "workers": workers}

        def seeds(name: str, condition: str, where: Cell = where) -> set[int]:
            return {c["seed"] for c in book.find("syncs", **where, method=name, condition=condition)}

        def seconds(name: str, condition: str, among: set[int], where: Cell = where) -> float | None:
            cells = book.find("syncs", **where, method=name, condition=condition)
            met = [c.get("seconds") for c in cells if c["seed"] in among]
            return statistics.mean(s for s in met if s) if met and all(met) else None

        def last(name: str, condition: str, where: Cell = where) -> float | None:
            cells = book.find("syncs", **where, method=name, condition=condition)
            ends = [c["curve"][-1][-1] for c in cells if c.get("curve")]
            return statistics.mean(ends) if ends else None

        def machines(name: str, condition: str, where: Cell = where) -> set[str]:
            return {c.get("cpu", "") for c in book.find("syncs", **where, method=name, condition=condition)}

        for name in ("exact", *TUNED, *SYNCS):
            if not (own := seeds(name, condition)):
                continue
            both = own & seeds("exact", "unlimited")
            took, free = seconds(name, condition, own), seconds("exact", "unlimited", both)
            shared = seconds(name, condition, both)
            here = seconds("exact", condition, own) or by_steps.get((task, workers, condition))
            alike = machines(name, condition) == machines("exact", "unlimited")
            yield {
                **where,
                "condition": condition,
                "method": name,
                "seeds": len(own),
                "by_steps": any("how" in c for c in book.find("syncs", **where, method=name, condition=condition)),
                "seconds": _rounded(took),
                "over_exact_unlimited": _rounded(shared / free) if shared and free and alike else None,
                "faster_than_exact_here": _rounded(here / took) if took and here else None,
                "last_value": _rounded(last(name, condition)),
                "exacts_last_value": _rounded(last("exact", "unlimited")),
            }


def final_summary(book: Book) -> Iterator[Cell]:
    """Means over the seeds."""
    for task, workers in sorted({(c["task"], c["workers"]) for c in book.cells["final"]}):
        for name in FINAL:
            last = [c["last"] for c in book.find("final", task=task, workers=workers, method=name) if c["last"]]
            if last:
                where = {"task": task, "workers": workers, "method": name, "seeds": len(last)}
                yield {**where, "last": _rounded(statistics.mean(last)), "spread": [min(last), max(last)]}


def goals(book: Book) -> Iterator[Cell]:
    """What we would use on a slow link, beside both goals: exact's seconds on a free one, and exact's end."""
    whole = {tuple(row[k] for k in ("task", "workers", "condition", "method")): row for row in syncs_summary(book)}
    end = {(row["task"], row["workers"], row["method"]): row["last"] for row in final_summary(book)}
    for (task, workers, link), name in OURS.items():
        row = whole.get((task, workers, link, name), {})
        last, exacts = (end.get((task, workers, who)) for who in (name, "exact"))
        yield {
            "task": task,
            "workers": workers,
            "link": link,
            "method": name,
            "seeds": row.get("seeds"),
            "seconds": row.get("seconds"),
            "over_exact_unlimited": row.get("over_exact_unlimited"),
            "goal": GOALS[link],
            "points_over_exact_at_the_end": round(100 * (last - exacts), 2) if last and exacts else None,
            "goal_points": -POINTS,
        }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def table(book: Book, task: str, workers: int) -> Iterator[str]:
    """Fits 80 columns. Seconds to the target, by link; the fastest on the slowest link first."""
    known = {(c["method"], c["link"]): c for c in estimates(book) if (c["task"], c["workers"]) == (task, workers)}
    if not known:
        return
    yield f"{task}, {workers} workers: seconds to {Target.parse(TASKS[task].target)}, as steps × measured step time"
    yield f"{'method':17s}{'steps':>6s}" + "".join(f"{link:>11s}" for link in LINKS) + f"{'as exact':>10s}"
    shown = dict.fromkeys(name for name, _ in known)

    def slowest(name: str) -> list[float]:
        return [known.get((name, link), {}).get("seconds") or math.inf for link in reversed(LINKS)]

    for name in sorted(shown, key=slowest):
        cells = [known.get((name, link)) for link in LINKS]
        steps = next((f"{c['steps']:.0f}" for c in cells if c and c["seconds"]), "")
        words = ["" if c is None else f"{c['seconds']:.1f}" if c["seconds"] else "–" for c in cells]
        value = at_exacts_steps(book, task, workers, name)
        last = "" if value is None else f"{value:.3f}"
        yield f"{name:17s}{steps:>6s}" + "".join(f"{word:>11s}" for word in words) + f"{last:>10s}"
        if why := next((c["why"] for c in cells if c and not c["seconds"]), None):
            yield f"  {name}: {why}"[:80]


def conclusion(book: Book) -> Iterator[str]:
    """Fits 80 columns."""
    yield "the best of ours over exact without a limit, W workers: by steps × step time,"
    yield "and in whole runs"
    yield f"{'task':8s}{'W':>2s}{'link':>10s} {'by steps':16s}{'ratio':>5s} {'whole':26s}{'ratio':>6s}{'goal':>5s}"
    for cell in summary(book):
        ratios = ("over_exact_unlimited", "whole_over_exact_unlimited", "goal")
        steps, whole, goal = (f"{cell[key]:.2f}" if cell[key] else "–" for key in ratios)
        where = f"{cell['task']:8s}{cell['workers']:2d}{cell['link']:>10s}"
        yield f"{where} {cell['best']:16s}{steps:>5s} {cell['best_whole'] or '–':26s}{whole:>6s}{goal:>5s}"


def syncs_table(book: Book) -> Iterator[str]:
    """Fits 80 columns. ~: by steps × step time."""
    rows = list(syncs_summary(book))
    for task, workers, condition in dict.fromkeys((r["task"], r["workers"], r["condition"]) for r in rows):
        here = [r for r in rows if (r["task"], r["workers"], r["condition"]) == (task, workers, condition)]
        yield f"{task}, {workers} workers, {condition}: seconds to {Target.parse(TASKS[task].target)}, whole runs"
        yield f"{'method':25s}{'seeds':>5s}{'seconds':>8s}{'over exact free':>17s}{'exact here over':>17s}{'last':>7s}"
        for row in sorted(here, key=lambda r: r["seconds"] or math.inf):
            ratios = [("over_exact_unlimited", 17, 2), ("faster_than_exact_here", 17, 2)]
            keys = [("seeds", 5, 0), ("seconds", 8, 1), *ratios, ("last_value", 7, 3)]
            words = [(f"{row[key]:.{digits}f}" if row[key] else "–").rjust(width) for key, width, digits in keys]
            if row["by_steps"]:
                words[1] = f"~{words[1].strip()}".rjust(len(words[1]))
            yield f"{row['method']:25s}{''.join(words)}"
        yield ""


def final_table(book: Book) -> Iterator[str]:
    """Fits 80 columns."""
    rows = list(final_summary(book))
    for task, workers in dict.fromkeys((r["task"], r["workers"]) for r in rows):
        steps = TASKS[task].trained
        yield f"{task}, {workers} workers: accuracy after {steps} steps of a learning rate that falls to zero"
        for row in [r for r in rows if (r["task"], r["workers"]) == (task, workers)]:
            low, high = row["spread"]
            yield f"{row['method']:26s}{row['last']:9.4f}  {low:.4f} to {high:.4f}, {row['seeds']} seeds"
        yield ""


def goals_table(book: Book) -> Iterator[str]:
    """Fits 80 columns."""
    yield "ours on a slow link: seconds over exact's on a free one; points over its end"
    for row in goals(book):
        ratio, points = row["over_exact_unlimited"], row["points_over_exact_at_the_end"]
        where = f"{row['task']:8s}{row['workers']:2d}{row['link']:>9s} {row['method']:25s}"
        speed = f"{ratio:5.2f}" if ratio else f"{'–':>5s}"
        last = f"{points:+6.2f}" if points is not None else f"{'–':>6s}"
        yield f"{where}{speed} (goal {row['goal']:.2f}){last} (goal {row['goal_points']:+.1f})"


def plot(book: Book, folder: Path) -> None:
    """Seconds to the target by link speed, one line a method; and what we would use on a slow link, measured whole."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    folder.mkdir(parents=True, exist_ok=True)
    x = {link: (parse_link(link).bits_per_second or 10**10) / 1e6 for link in LINKS}
    known = [cell for cell in estimates(book) if cell["seconds"]]
    whole = [row for row in goals(book) if row["seconds"]]
    for task, workers in sorted({(cell["task"], cell["workers"]) for cell in known}):
        figure = Figure(figsize=(8, 5), layout="constrained")
        axes = figure.add_subplot()
        for i, name in enumerate(names(task)):
            points = [
                (x[cell["link"]], cell["seconds"])
                for cell in known
                if (cell["task"], cell["workers"], cell["method"]) == (task, workers, name)
            ]
            style = "--" if name in TORCH else "-." if name in TUNED else "-"
            colour = "black" if name == "exact" else matplotlib.colormaps["tab20"](i % 20)
            if points:
                axes.plot(*zip(*sorted(points), strict=True), style, marker="o", ms=4, color=colour, label=name)
        ours = [row for row in whole if (row["task"], row["workers"]) == (task, workers)]
        for name in dict.fromkeys(row["method"] for row in ours):
            points = [(x[row["link"]], row["seconds"]) for row in ours if row["method"] == name]
            label = f"{name},\nwhole runs"
            axes.plot(*zip(*sorted(points), strict=True), marker="*", ms=11, lw=2.5, color="crimson", label=label)
        axes.set(xscale="log", yscale="log", xlabel="link", ylabel=f"seconds to {Target.parse(TASKS[task].target)}")
        axes.set_xticks(list(x.values()), list(x))
        axes.minorticks_off()
        axes.grid(lw=0.5, alpha=0.5)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_title(f"{task}, {workers} workers: steps × measured step time", fontsize=11)
        figure.legend(loc="outside right upper", frameon=False, fontsize=9)
        with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "paceline"}):
            figure.savefig(folder / f"time_to_accuracy_{task}_{workers}.svg", metadata={"Date": None})


# ---------------------------------------------------------------------------------------------------- the run


def fill_steps(
    book: Book, task: str, workers: int, seeds: Sequence[int], chosen: Sequence[str], patience: float
) -> None:
    for seed, name in itertools.product(seeds, chosen):
        key = {"task": task, "method": name, "workers": workers, "seed": seed}
        if name in (*SAME_STEPS, YARDSTICK) or book.known("steps", **key):
            continue
        if any(c.get("steps") is None and not c["error"] for c in steps_of(book, task, workers, name)):
            continue  # an earlier seed had all its steps and did not get there
        exact = [c["steps"] for c in book.find("steps", **{**key, "method": "exact"}) if c.get("steps")]
        limit = math.ceil(patience * exact[0]) if exact else TASKS[task].steps
        book.add("steps", key, train(task, name, workers, seed, limit))


def fill_time(book: Book, task: str, workers: int, link: str, chosen: Sequence[str]) -> None:
    where = {"task": task, "workers": workers, "link": link}
    missing = [name for name in chosen if not book.known("time", **where, method=name)]
    at_once = max(1, PROCESSES // workers)
    for i in range(0, len(missing), at_once):
        for name, cell in time_steps(task, missing[i : i + at_once], workers, link):
            book.add("time", {"task": task, "method": name, "workers": workers, "link": link}, cell)


def fill_syncs(
    book: Book,
    task: str,
    workers: int,
    conditions: Sequence[str],
    seeds: Sequence[int],
    chosen: Sequence[str],
    limit: int,
) -> None:
    for seed, condition, name in itertools.product(seeds, conditions, ("exact", *TUNED, *SYNCS)):
        key = {"task": task, "method": name, "workers": workers, "condition": condition, "seed": seed}
        slow_exact = name == "exact" and condition in LINKS[2:]  # hundreds of seconds, and in `seconds_to_target`
        if name not in chosen or slow_exact or book.known("syncs", **key):
            continue
        if name in LONG and condition == LINKS[-1]:
            fill_by_steps(book, key)
        else:
            book.add("syncs", key, train_whole(task, name, workers, condition, seed, limit or TASKS[task].whole))


def fill_by_steps(book: Book, key: dict[str, Any]) -> None:
    """What the run on the next faster link would have taken on the slowest: its steps × the time of one there, which
    is no matter of the seed.
    """
    faster = book.find("syncs", **{**key, "condition": LINKS[-2]})
    if not faster or faster[0]["error"]:
        return
    timed = [c["step_s"] for c in book.find("syncs", **{k: v for k, v in key.items() if k != "seed"}) if "step_s" in c]
    step_s = timed[0] if timed else train_a_few(key["task"], key["method"], key["workers"])
    if step_s:
        there = {k: faster[0][k] for k in ("steps", "best", "sent_bytes_per_step", "link_kind", "curve", "error")}
        took = {"seconds": there["steps"] and round(there["steps"] * step_s, 2), "step_s": step_s}
        book.add("syncs", key, {**there, **took, "how": f"steps on {LINKS[-2]} × a mean step here"})


def fill_final(book: Book, task: str, workers: int, seeds: Sequence[int], chosen: Sequence[str]) -> None:
    for seed, name in itertools.product(seeds, FINAL):
        key = {"task": task, "method": name, "workers": workers, "seed": seed}
        if name in chosen and not book.known("final", **key):
            book.add("final", key, train_out(task, name, workers, seed))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the JSON file; what is in it is not measured again")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="draw what is known as SVG into this folder")
    parser.add_argument("--parts", default="steps,time,syncs,final", help="none: only print and draw what is known")
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--workers", default="2,4")
    parser.add_argument("--links", default=",".join(LINKS))
    parser.add_argument("--methods", help="all, if not given")
    parser.add_argument("--seeds", help="0,1,2 if not given; of syncs 0")
    parser.add_argument("--conditions", default=",".join(CONDITIONS), help="of syncs")
    parser.add_argument("--limit", type=int, default=0, help="steps of a run of syncs, if not the task's")
    parser.add_argument("--patience", type=float, default=2.0, help="times exact's steps, until a run is given up")
    args = parser.parse_args()
    tasks, links, parts = args.tasks.split(","), args.links.split(","), args.parts.split(",")
    files.check_writable(args.out)
    book = Book(args.out)
    for part, task, workers in itertools.product(parts, tasks, [int(w) for w in args.workers.split(",")]):
        chosen = [n for n in names(task) if args.methods is None or n in (YARDSTICK, *args.methods.split(","))]
        seeds = [int(s) for s in args.seeds.split(",")] if args.seeds else SEEDS
        if part == "steps":
            fill_steps(book, task, workers, seeds, chosen, args.patience)
        if part == "syncs":
            named = args.methods.split(",") if args.methods else ["exact", *SYNCS]
            seeds = [int(s) for s in args.seeds.split(",")] if args.seeds else [0]
            fill_syncs(book, task, workers, args.conditions.split(","), seeds, named, args.limit)
        if part == "final":
            fill_final(book, task, workers, seeds, args.methods.split(",") if args.methods else FINAL)
        for link in links:
            if part == "time":
                fill_time(book, task, workers, link, chosen)
    book.write()
    for task, workers in itertools.product(tasks, [int(w) for w in args.workers.split(",")]):
        print(*table(book, task, workers), "", sep="\n")
    print(*conclusion(book), "", *syncs_table(book), *final_table(book), *goals_table(book), sep="\n")
    if args.plot:
        plot(book, args.plot)


if __name__ == "__main__":
    main()
