"""The page of a run: whole, safe, and right in a real browser at both widths and in both colours."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from foretell.bench.measure import MeasureJob, TimedOutput, Variant
from foretell.bench.metrics import AcceptanceByDepth
from foretell.bench.page import check, compare, load, never_slower, synthetic
from foretell.bench.page.charts import (
    Scale,
    duration,
    ratio_row,
    ratio_scale,
    ratio_values,
    round_step,
    time_scale,
    value_scale,
)
from foretell.bench.page.offline import output_waits, page, series_of
from foretell.bench.results import BenchResult
from foretell.bench.run import BenchJob, run
from foretell.bench.settings import BenchSettings
from tests.browser import DESKTOP, PHONE, browser, expect, open_page

from . import pages
from .fakes import FakeBackend, ignore_progress, items, variants

if TYPE_CHECKING:
    from playwright.sync_api import Browser

__all__ = ["browser"]  # the fixture

NASTY = "<script>document.title='pwned'</script><b>&amp;"
MACHINE = {"device": "a processor", "cores": 2}
FACTS = {"model": "smollm2-135m", "version": "0.1.0", "machine": MACHINE, "max_tokens": None}
SMALL = "[...document.querySelectorAll('svg text, small, td, .label')]"


class Writing(FakeBackend):
    """Adds acceptance by depth, step times and token origins."""

    def generate(self, variant: Variant, job: MeasureJob) -> TimedOutput:
        written = super().generate(variant, job)
        a_token = written.decode_seconds / (len(written.tokens) - 1)
        pace = tuple((a_token * (1 + i % 3), 1 + i % 3) for i in range(5))
        if variant.name == "plain":
            return replace(written, step_times=pace)
        origins = tuple("target" if i % 3 else "ngram" for i in range(len(written.tokens)))
        return replace(
            written, step_times=pace, origins=origins, acceptance=AcceptanceByDepth((40, 30, 20, 6, 1), (30, 15, 6))
        )

    def decode(self, tokens: Any) -> list[str]:
        return [f"{NASTY} word{token} " for token in tokens]


def result(names: tuple[str, ...] = ("auto",), batches: tuple[int, ...] = (1,), **tasks: int) -> BenchResult:
    def seconds(variant: str, job: MeasureJob, time: int) -> float:
        return 0.02 * (1 + 0.1 * time) / (1.0 if variant == "plain" else 1.6 + 0.2 * len(job.task))

    settings = BenchSettings(temperatures=(0.0,), rounds=3, batches=batches)
    order = BenchJob(
        "offline", variants(*names), items(**(tasks or {"code": 2, "chat": 2, "edit": 2})), settings, dict(FACTS)
    )
    return run(order, Writing(seconds, steps=5), ignore_progress).result


# Places on a line


def test_scales() -> None:
    assert Scale(0, 10).at(2.5) == 25.0 and Scale(0, 10).at(99) == 100.0 and Scale(1, 1).at(1) == 50.0
    assert Scale(1, 100, logarithmic=True).at(10) == 50.0
    scale, ticks = ratio_scale([1.3, 4.0])
    assert "1×" in [tick.label for tick in ticks] and 0 < scale.at(1.0) < scale.at(4.0) < 100
    scale, ticks = value_scale([3.4], low=1.0)
    assert ticks[0].label == "1" and ticks[0].at == 0.0 and ticks[-1].at == 100.0 and scale.high >= 3.4
    assert len(ticks) <= 8 and len(time_scale([0.0001, 30.0])[1]) <= 8
    assert value_scale([])[1] and time_scale([])[1] and ratio_scale([])[1], "nothing to show is no fault"
    assert (round_step(10), round_step(0.3), round_step(700)) == (2.0, 0.05, 200.0)
    assert (duration(2.0), duration(0.0123), duration(0.00005)) == ("2 s", "12.3 ms", "50 µs")


def test_an_interval_that_says_nothing_stretches_no_axis_and_shows_no_figures() -> None:
    assert ratio_values(1.5, (1.2, 1.9)) == [1.2, 1.9, 1.5] and ratio_values(1.5, None) == [1.5]
    assert ratio_values(1.5, (0.001, 12742.8)) == [1.5]
    scale, _ = ratio_scale([1.5])
    row = ratio_row("code", 1.5, (0.001, 12742.8), scale, "c0")
    assert (row.value, row.more) == ("1.50×", "wide") and [mark.start for mark in row.marks][0] == 0.0
    assert ratio_row("code", 1.5, (1.2, 1.9), scale, "c0").more == "1.20 to 1.90"


# The page itself


def test_one_file_that_asks_for_nothing() -> None:
    text = page(result())
    assert text.startswith("<!doctype html>") and "{{" not in text and "{%" not in text
    assert not re.search(r'(src|href)="(?!data:)', text) and "@import" not in text and "url(" not in text
    assert "<script" not in text, "not even what a model wrote"
    assert "&lt;script&gt;" in text, "that is shown as it was written"


def test_a_speedup_is_a_shorter_time_after_the_first_token() -> None:
    """A slow prefill, as of a head without cached KV, must not turn a faster variant into a slower one."""

    class SlowPrefill(FakeBackend):
        def generate(self, variant: Variant, job: MeasureJob) -> TimedOutput:
            written = super().generate(variant, job)
            return replace(written, total_seconds=written.total_seconds + 9 * (variant.name == "fast"))

    def seconds(variant: str, job: MeasureJob, time: int) -> float:
        return {"plain": 0.02, "fast": 0.01, "slow": 0.03}[variant] * (1 + 0.1 * time)

    order = BenchJob("offline", variants("fast", "slow"), items(code=2, chat=2), BenchSettings(temperatures=(0.0,)))
    found = run(order, SlowPrefill(seconds), ignore_progress).result
    chart = output_waits(series_of(found))
    shown = {row.name: float(row.value.removesuffix(" ms")) for row in chart.rows}
    assert len(found.overall) == 2
    for cell in found.overall:
        assert cell.speedup is not None and cell.decode_seconds is not None and cell.plain_decode_seconds is not None
        assert (cell.speedup > 1) is (cell.decode_seconds.p50 < cell.plain_decode_seconds.p50)
        assert (cell.speedup > 1) is (shown[cell.variant] < shown["plain"]) is (cell.variant == "fast")
    assert "first token" in chart.about and chart.title in page(found)


def test_it_shows_what_the_run_found() -> None:
    found = result()
    text = page(found)
    for cell in found.cells:
        assert cell.speedup is not None and cell.speedup_interval is not None
        assert f"<b>{cell.speedup:.2f}×</b>" in text and f"{cell.speedup_interval[0]:.2f} to " in text
    assert "75.0% of " in text and "50.0% of " in text, "acceptance by depth"
    assert "drafting" in text and "verification" in text and "host" in text
    assert "Time per token" in text and "Time per output" in text
    assert "p99 " in text and "a processor" in text and "not set" in text
    assert text.count('<details class="text">') == 6 and "4 of 11 tokens drafted" in text
    assert text.count('good">same text</span>') == 6


def test_depths_that_few_drafts_reached_are_left_out() -> None:
    assert page(result(code=1)).count('class="column"') == 4


def test_what_is_wrong_is_shown_first() -> None:
    found = result()
    wrong = replace(found, complete=False, cells=(replace(found.cells[0], same_text=False), *found.cells[1:]))
    text = page(wrong)
    assert text.count('role="alert"') == 2 and "must not" in text and '<div class="tile bad"><b>NO</b>' in text


def test_tasks_of_many_settings_are_folded() -> None:
    few, many = page(result(("a", "b"))), page(result(("a", "b"), (1, 2)))
    assert "Task by task" not in few and "Task by task" in many
    assert "The fastest of 4 settings" in many and "b, batch 2" in many


def test_an_output_too_short_to_be_timed_is_no_error() -> None:
    backend = FakeBackend(tokens=lambda variant, job: (7,), steps=1)
    found = run(
        BenchJob("offline", variants("a"), items(code=1), BenchSettings(rounds=1), {}), backend, ignore_progress
    ).result
    assert "too short" in page(found)


# In a browser


@pytest.fixture(scope="module")
def folder_of_pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pages")


PAGES: dict[str, Callable[[], str]] = {
    "offline": lambda: page(result(("auto", "ngram"))),
    "compare": lambda: compare.page(pages.compared(NASTY)),
    "check": lambda: check.page(pages.checked(NASTY)),
    "load": lambda: load.page(pages.loaded()),
    "synthetic": lambda: synthetic.page(pages.set_at_a_rate()),
    "never-slower": lambda: never_slower.page(pages.held_to_a_bar()),
}
WITH_TEXTS = ("offline", "compare", "check")


LOOKS = list(product((DESKTOP, PHONE), (False, True)))
SEEN = [("offline", *look) for look in LOOKS] + [
    (name, *look) for name in PAGES if name != "offline" for look in LOOKS[::3]
]


@pytest.mark.parametrize(("name", "size", "dark"), SEEN)
def test_it_looks_right(browser: Browser, folder_of_pages: Path, name: str, size: tuple[int, int], dark: bool) -> None:
    file = folder_of_pages / f"{name}.html"
    file.write_text(PAGES[name](), encoding="utf-8")
    with open_page(browser, file.as_uri(), size, dark) as opened:
        view = opened.page
        assert opened.overflow == 0, "no horizontal scrolling"
        assert view.title() == f"Foretell bench: {name}", "model output is not executed"
        colours = view.evaluate("(({backgroundColor: b, color: c}) => [b, c])(getComputedStyle(document.body))")
        ground, ink = (sum(map(int, re.findall(r"\d+", each)[:3])) for each in colours)
        assert (ground < 120 and ink > 600) if dark else (ground > 600 and ink < 120)
        assert_marks_are_drawn(view)
        if name in WITH_TEXTS:
            assert_texts_open(view)
        assert opened.overflow == 0, "nor with open transcripts"
        assert opened.screenshot(f"bench-{name}-{size[0]}-{'dark' if dark else 'light'}").stat().st_size > 20_000
    assert not opened.errors and not opened.asked


def assert_marks_are_drawn(view: Any) -> None:
    """Every mark lies in its line, and text is large enough to be read."""
    boxes = view.evaluate(
        """[...document.querySelectorAll('.track svg')].map(svg => {
            const line = svg.getBoundingClientRect();
            return [...svg.querySelectorAll('circle, rect')].map(mark => {
                const box = mark.getBoundingClientRect();
                return [box.left - line.left, line.right - box.right, box.width];
            });
        })"""
    )
    marks = [mark for each in boxes for mark in each]
    assert len(marks) > 5
    assert all(left >= -7 and right >= -7 and width > 0 for left, right, width in marks)
    sizes = view.evaluate(f"{SMALL}.map(each => parseFloat(getComputedStyle(each).fontSize))")
    assert min(sizes) >= 11


def assert_texts_open(view: Any) -> None:
    """Prompts and outputs open on a click."""
    words = view.locator("details.text .words").first
    assert not words.is_visible()
    view.locator("details.task > summary").first.click()
    view.locator("details.text > summary").first.click()
    expect(words).to_be_visible()
    assert NASTY in words.inner_text()
