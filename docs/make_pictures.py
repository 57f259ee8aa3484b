"""Makes the pictures of README and documentation: of the page in headless Chromium, of commands in a terminal.

    python docs/make_pictures.py            # all of them, into docs/pictures
    python docs/make_pictures.py chat race  # only these

how-it-works.svg is drawn by hand; bench/controller.py plots controller-*.svg.

It needs Playwright and Chromium (Debian: apt-get install chromium). Prompts, settings and sizes are fixed and the
output is greedy; the times in the pictures are those of the machine on which it runs.
"""

from __future__ import annotations

import argparse
import base64
import fcntl
import io
import os
import pty
import re
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import termios
import time
import urllib.request
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

FOLDER = Path(__file__).parent / "pictures"
FORETELL = [sys.executable, "-m", "foretell"]
MODEL = "smollm2-135m"
SIZE = (1200, 780)  # of the browser's window
RACE_SIZE = (1200, 960)
SCALE = 1.5  # pixels of a picture per pixel of the window, for sharp text on dense screens
COLUMNS = 92  # of the terminal
START_SECONDS = 120  # for the server to be ready
POINTED_AT = 9  # which accepted draft token of the paragraph after the code shows its card
QUESTION = "Write a Python function that reverses a string, and show how it is called."
COMMANDS = {
    "demo": "demo",
    "certify": "certify --drafter ngram --quick",
    "plan": "plan --target llama-3.1-70b --draft llama-3.2-1b --gpu h100 --count 4 --batch 1..16 --context 8k",
}
REPORT = "bench offline --quick --html"  # makes the page of report.png
SHOWN_LINES = {"plan": 30}  # of an output that is longer than a picture should be
# Returns the pixels of a PNG picture as indices into a palette of its 256 most frequent colours.
INDEX_COLOURS = """async (png) => {
  const bytes = Uint8Array.from(atob(png), (c) => c.charCodeAt(0));
  const image = await createImageBitmap(new Blob([bytes]));
  const canvas = new OffscreenCanvas(image.width, image.height);
  const context = canvas.getContext("2d");
  context.drawImage(image, 0, 0);
  const pixels = new Uint32Array(context.getImageData(0, 0, image.width, image.height).data.buffer);
  const counts = new Map();
  for (const pixel of pixels) counts.set(pixel, (counts.get(pixel) ?? 0) + 1);
  const palette = [...counts].sort((a, b) => b[1] - a[1]).slice(0, 256).map(([colour]) => colour);
  const parts = (colour) => [colour & 255, (colour >> 8) & 255, (colour >> 16) & 255];
  const known = palette.map(parts);
  const index = new Map();
  for (const colour of counts.keys()) {
    const given = parts(colour);
    const far = known.map((each) => each.reduce((sum, value, i) => sum + (value - given[i]) ** 2, 0));
    index.set(colour, far.indexOf(Math.min(...far)));
  }
  let indices = "";
  for (const pixel of pixels) indices += String.fromCharCode(index.get(pixel));
  return { width: image.width, height: image.height, palette: known, indices: btoa(indices) };
}"""


def main() -> None:
    names = (*VIEWS, "report", *COMMANDS)
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("pictures", nargs="*", metavar="NAME", help=f"one of {', '.join(names)} (default: all)")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the pictures")
    given = parser.parse_args()
    unknown = set(given.pictures) - set(names)
    if unknown:
        parser.error(f"no picture {', '.join(sorted(unknown))}; known: {', '.join(names)}")
    wanted = given.pictures or names
    given.out.mkdir(parents=True, exist_ok=True)
    views = [name for name in VIEWS if name in wanted]
    if views or "report" in wanted:
        take_screenshots(given.out, views, with_report="report" in wanted)
    for name in COMMANDS:
        if name in wanted:
            draw_terminal(given.out / f"{name}.svg", COMMANDS[name])


def take_screenshots(folder: Path, views: list[str], with_report: bool) -> None:
    """Take the pictures of the page's views, in order, and of a report of a benchmark."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        binary = os.environ.get("FORETELL_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(executable_path=binary, args=["--font-render-hinting=none"])
        if with_report:
            with tempfile.TemporaryDirectory() as temporary:
                report = Path(temporary) / "report.html"
                subprocess.run([*FORETELL, *REPORT.split(), str(report)], check=True, stdout=subprocess.DEVNULL)
                with opened(browser, report.as_uri()) as page:
                    save(browser, page, folder / "report.png")
        if views:
            with serving() as url, opened(browser, url) as page:
                page.wait_for_selector("#set-rule option[value=match]", state="attached")
                for view in views:
                    page.click(f"#tab-{view}")
                    VIEWS[view](page)
                    save(browser, page, folder / f"{view}.png")
        browser.close()


@contextmanager
def opened(browser: Browser, url: str) -> Iterator[Page]:
    """Open a page in light colours and without animation."""
    width, height = SIZE
    context = browser.new_context(
        viewport={"width": width, "height": height},
        device_scale_factor=SCALE,
        color_scheme="light",
        reduced_motion="reduce",
    )
    try:
        page = context.new_page()
        page.set_default_timeout(START_SECONDS * 1000)
        page.goto(url)
        yield page
    finally:
        context.close()


def show_chat(page: Page) -> None:
    """Ask for code, and point at a token that a drafter proposed."""
    page.fill("#message", QUESTION)
    page.press("#message", "Enter")
    page.wait_for_selector(".answer:not(.writing)")
    page.locator(".answer .rendered > p .token:not(.by-target)").nth(POINTED_AT).hover()


def show_race(page: Page) -> None:
    """Run the default race to its end."""
    width, height = RACE_SIZE
    page.set_viewport_size({"width": width, "height": height})
    page.click("#race-go")
    page.wait_for_selector("#race-result:not([hidden])")
    page.locator("#view-race").evaluate("view => view.scrollTo(0, view.scrollHeight)")


def show_server(page: Page) -> None:
    """Wait for two updates, between which rates are computed."""
    width, height = SIZE
    page.set_viewport_size({"width": width, "height": height})
    page.wait_for_selector("#server-drafters tr th")
    page.wait_for_timeout(2500)


VIEWS = {"chat": show_chat, "race": show_race, "server": show_server}


@contextmanager
def serving() -> Iterator[str]:
    """Start a server on loopback and stop it afterwards."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}/"
    command = [*FORETELL, "serve", MODEL, "--port", str(port)]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log)
        try:
            wait_until_ready(f"{url}ready", process, log)
            yield url
        finally:
            process.terminate()
            process.wait()


def wait_until_ready(url: str, process: subprocess.Popen[bytes], log: IO[bytes]) -> None:
    """Wait for a server; raise with its log if it stops."""
    give_up = time.monotonic() + START_SECONDS
    while time.monotonic() < give_up:
        if process.poll() is not None:
            log.seek(0)
            said = log.read().decode(errors="replace")
            raise SystemExit(f"the server stopped with exit code {process.returncode}:\n{said}")
        try:
            urllib.request.urlopen(url).close()
            return
        except OSError:
            time.sleep(0.2)
    raise SystemExit(f"the server was not ready after {START_SECONDS} seconds")


def save(browser: Browser, page: Page, path: Path) -> None:
    """Save a screenshot with 256 colours, which is a third of its size with all."""
    picture = base64.b64encode(page.screenshot()).decode()
    canvas = browser.new_page()
    found = canvas.evaluate(INDEX_COLOURS, picture)
    canvas.close()
    path.write_bytes(indexed_png(found))
    report_file(path)


def indexed_png(picture: dict[str, Any]) -> bytes:
    """Return the PNG file of a picture with a palette."""
    width, height, pixels = picture["width"], picture["height"], base64.b64decode(picture["indices"])
    rows = b"".join(b"\0" + pixels[row * width : (row + 1) * width] for row in range(height))  # 0: no filter

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)  # 8 bits, palette
    palette = bytes(value for colour in picture["palette"] for value in colour)
    parts = (
        chunk(b"IHDR", header),
        chunk(b"PLTE", palette),
        chunk(b"IDAT", zlib.compress(rows, 9)),
        chunk(b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def draw_terminal(path: Path, arguments: str) -> None:
    """Run a command in a terminal and draw its output as SVG."""
    from rich.console import Console
    from rich.text import Text

    output = run_in_terminal([*FORETELL, *arguments.split()])
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, highlight=False)
    prompt = Text.assemble(("$ ", "bold green"), (f"foretell {arguments}", "bold"))
    lines = Text.from_ansi(output.replace("\r\n", "\n").strip("\n")).split("\n", allow_blank=True)
    shown = SHOWN_LINES.get(path.stem, len(lines))
    console.print(prompt, *lines[:shown], *([Text("…")] if shown < len(lines) else []), sep="\n")
    svg = console.export_svg(title="foretell", unique_id=path.stem)
    path.write_text(re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL))  # fonts of another server
    report_file(path)


def run_in_terminal(command: list[str]) -> str:
    """Return what a command writes to a terminal; its progress, on standard error, is left out."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 50, COLUMNS, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "COLORTERM": "truecolor"}
    environment.pop("NO_COLOR", None)
    with tempfile.TemporaryFile() as errors:  # a pipe without a reader blocks the server once it is full
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=follower, stderr=errors, env=environment)
        os.close(follower)
        found = b"".join(iter(lambda: read(leader), b""))
        os.close(leader)
        if process.wait() != 0:
            errors.seek(0)
            said = (found + errors.read()).decode(errors="replace")
            raise SystemExit(f"`{' '.join(command)}` failed:\n{said}")
    return found.decode()


def read(terminal: int) -> bytes:
    """Return the next output; Linux reports the end of a terminal as an error."""
    try:
        return os.read(terminal, 65536)
    except OSError:
        return b""


def report_file(path: Path) -> None:
    print(f"{path}: {path.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
