"""Generated parts of the reference pages:

    python docs/generate.py [--check]

writes the text between <!-- generated NAME --> and <!-- end of NAME --> in the pages of docs/, from the
option declarations, the argument parsers, the docstrings and the Prometheus metrics. --check writes nothing and fails
where a page differs from the code.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any

import foretell
from foretell import program
from foretell.cli.command_table import COMMANDS
from foretell.cli.main import build_parser
from foretell.cluster.config import ClusterConfig
from foretell.config import EngineConfig, SpeculationConfig
from foretell.sampling_params import SamplingParams
from foretell.server.compat_flags import CompatFlags
from foretell.server.config import ServerConfig

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs"
SIGNATURE_WIDTH = 100  # columns
PROSE_WIDTH = 160  # columns
PLACE = re.compile(
    r"(?P<head><!-- generated (?P<name>[\w -]+) -->\n)(?P<text>.*?)(?P<foot><!-- end of (?P=name) -->)", re.S
)
MARK = re.compile(
    r"<!-- (?:generated|end of(?! run -->)) [^>]*-->"
)  # a run's table is written by bench/readme_table.py
# Options that several commands share: their class, and the heading on the configuration page.
SHARED: dict[type, str] = {
    EngineConfig: "Model and engine",
    SpeculationConfig: "Speculation",
    SamplingParams: "Sampling",
    ServerConfig: "Server",
    ClusterConfig: "Replicas",
    CompatFlags: "Flags of other engines",
}


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, PROSE_WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def anchor(heading: str) -> str:
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


# Options


def option_table(cls: type) -> list[str]:
    """Return a row for each option: flag and aliases, default, meaning."""
    lines = [row("flag", "default", "meaning"), row("---", "---", "---")]
    for field in fields(cls):  # type: ignore[arg-type]
        if "help" in field.metadata:
            names = ["--" + field.name.replace("_", "-"), *field.metadata["aliases"]]
            meaning = str(field.metadata["help"])
            if field.metadata["choices"]:
                meaning += f": {', '.join(field.metadata['choices'])}"
            lines.append(row(", ".join(f"`{name}`" for name in names), default_of(field), cell(meaning)))
    return lines


def default_of(field: Field[Any]) -> str:
    if field.default in (None, MISSING, (), ""):
        return ""
    return f"`{json.dumps(field.default).strip(chr(34))}`"


def refused_flags() -> list[str]:
    """Return the flags of other engines that are refused, by reason."""
    from foretell.server.foreign_flags import ONLY, UNSUPPORTED

    reasons: dict[str, list[str]] = {}
    for flag, reason in UNSUPPORTED.items():
        reasons.setdefault(reason, []).append(f"`{flag}`")
    for flag, (values, reason) in ONLY.items():
        reasons.setdefault(reason, []).append(f"`{flag}` (other than {' or '.join(values)})")
    lines = [row("flags", "why"), row("---", "---")]
    return [*lines, *(row(", ".join(flags), cell(reason)) for reason, flags in reasons.items())]


def ignored_flags() -> list[str]:
    """Return the flags of other engines that are accepted without effect."""
    from foretell.server.foreign_flags import OPTIONAL_VALUE, SWITCHES, WITH_VALUES

    return wrapped(", ".join(f"`{flag}`" for flag in sorted((*SWITCHES, *WITH_VALUES, *OPTIONAL_VALUE))))


# Commands


def commands() -> list[str]:
    parsers = build_parser()[1]
    order = list(parsers)
    names = sorted(parsers, key=lambda name: order.index(name.split()[0]))  # `plan fleet` comes after `plan`
    lines = [row("command", "purpose"), row("---", "---")]
    lines += [row(f"[`foretell {each}`](#{anchor('foretell ' + each)})", about(parsers[each])) for each in names]
    for name in names:
        lines += ["", *command(f"foretell {name}", parsers[name], level=2)]
    return lines


def about(parser: argparse.ArgumentParser) -> str:
    return cell(parser.description or "")


def command(name: str, parser: argparse.ArgumentParser, level: int) -> list[str]:
    """Return the section of a command: examples, arguments, own options, links to shared ones, subcommands."""
    lines = [f"{'#' * level} {name}", about(parser)]
    if found := re.search(r"^examples:\n((?:  .+\n)+)", parser.format_help(), re.M):
        lines += ["", "```sh", *textwrap.dedent(found[1]).splitlines(), "```"]
    lines += arguments(parser)
    described: dict[tuple[str, ...], str] = {}
    for word, inner in subcommands(parser).items():
        if f"{name} {word}".removeprefix("foretell ") in COMMANDS:  # has a section of its own
            continue
        same = described.setdefault(tuple(arguments(inner)), f"{name} {word}")
        if same == f"{name} {word}":
            lines += ["", *command(same, inner, level + 1)]
        else:
            lines += ["", f"{'#' * (level + 1)} {name} {word}", about(inner)]
            lines += ["", f"It has the arguments of [`{same}`](#{anchor(same)})."]
    return lines


def subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    found = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(found[0].choices) if found else {}


def arguments(parser: argparse.ArgumentParser) -> list[str]:
    """Return the table of a command's own arguments, and links to the options that it shares."""
    groups = [group for group in parser._action_groups if group.description == argparse.SUPPRESS]
    hidden = [action for group in groups for action in group._group_actions]  # of another page of the same command
    own, shared = [], []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction) or "--help" in action.option_strings or action in hidden:
            continue
        if not action.help or action.help == argparse.SUPPRESS:
            continue
        if (heading := shared_heading(action)) is not None:
            shared.append(heading)
        else:
            own.append(row(flags_of(action), cell(action.help.replace("%%", "%"))))
    lines = ["", row("argument", "meaning"), row("---", "---"), *own] if own else []
    if shared:
        links = [f"[{heading.lower()}](configuration.md#{anchor(heading)})" for heading in dict.fromkeys(shared)]
        lines += ["", *wrapped(f"Also the options of {', '.join(links)}.")]
    return lines


def shared_heading(action: argparse.Action) -> str | None:
    """Return the heading under which an option of several commands is listed."""
    for cls, heading in SHARED.items():
        declared = {field.name: field.metadata for field in fields(cls) if "help" in field.metadata}  # type: ignore[arg-type]
        if action.dest in declared and (action.help or "").startswith(declared[action.dest]["help"].replace("%", "%%")):
            return heading
    return None


def flags_of(action: argparse.Action) -> str:
    if not action.option_strings:
        return f"`{action.metavar or action.dest.upper()}`"
    shown = ", ".join(action.option_strings)
    if action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction):
        return f"`{shown}`"
    values = "{" + ",".join(map(str, action.choices)) + "}" if action.choices else action.metavar or action.dest.upper()
    return f"`{shown} {values if isinstance(values, str) else ' '.join(values)}`".replace("|", "\\|")


# Python


def python() -> list[str]:
    lines: list[str] = []
    for name in foretell.__all__:
        if name != "__version__":
            lines += definition(f"foretell.{name}", getattr(foretell, name))
    return lines


def plug_ins() -> list[str]:
    """Return what a drafter or a rule of another package uses."""
    from foretell import errors, types
    from foretell.draft.base import Drafter
    from foretell.structured_output import GrammarSpec

    lines = definition("foretell.structured_output.GrammarSpec", GrammarSpec)
    lines += definition("foretell.draft.base.Drafter", Drafter)
    for name in ("DrafterTraits", "Sequence", "Budget", "Draft", "StepResult", "VerifyResult", "Delta"):
        lines += definition(f"foretell.types.{name}", getattr(types, name))
    for name in ("ForetellError", "RequestError", "ModelError", "CapacityError"):
        lines += definition(f"foretell.errors.{name}", getattr(errors, name))
    return lines


def programs() -> list[str]:
    return [line for name in program.__all__ for line in definition(f"fp.{name}", getattr(program, name))]


def definition(name: str, value: Any) -> list[str]:
    """Return the section of a class or function: signature, docstring, fields and public methods."""
    short = name.rpartition(".")[2]
    lines = [f"### {name}", "```py", signature(short, value), "```", *paragraphs(value)]
    if inspect.isclass(value):
        lines += field_table(value)
        for method, function in members(value):
            lines += ["", "```py", signature(method, function), "```", *paragraphs(function)]
    return [*lines, ""]


def signature(name: str, value: Any) -> str:
    """Return a signature, one parameter per line where it is long."""
    if isinstance(value, property):
        return name
    if inspect.isclass(value) and (is_dataclass(value) or issubclass(value, Exception) or inspect.isabstract(value)):
        return f"class {name}"
    found = inspect.signature(value)
    shown = list(parameters(found))
    returned = "" if inspect.isclass(value) or not found.return_annotation else f" -> {found.return_annotation}"
    text = f"{name}({', '.join(shown)}){returned}"
    if len(text) <= SIGNATURE_WIDTH:
        return text
    return "\n".join([f"{name}(", *(f"    {each}," for each in shown), f"){returned}"])


def parameters(found: inspect.Signature) -> Iterator[str]:
    """Yield the parameters as they are written in the source; a default that is an object by its class."""
    named_only = False
    for each in found.parameters.values():
        if each.name == "self":
            continue
        if each.kind is each.KEYWORD_ONLY and not named_only:
            named_only = True
            yield "*"
        stars = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "")
        kind = "" if each.annotation is each.empty else f": {each.annotation}"
        plain = each.default is None or isinstance(each.default, str | int | float | tuple)
        default = repr(each.default) if plain else f"{type(each.default).__name__}()"
        yield f"{stars}{each.name}{kind}" + ("" if each.default is each.empty else f" = {default}")


def paragraphs(value: Any) -> list[str]:
    """Return the docstring, without those that dataclasses generate."""
    text = inspect.getdoc(value) or ""
    if not text or text.startswith(f"{getattr(value, '__name__', '')}("):
        return []
    return [text.replace("<", "&lt;")]


def field_table(cls: type) -> list[str]:
    """Return the fields of a dataclass with their types, defaults and meanings."""
    if not is_dataclass(cls):
        return []
    said = comments(cls)
    lines = ["", row("field", "type", "default", "meaning"), row("---", "---", "---", "---")]
    for field in fields(cls):
        meaning = str(field.metadata.get("help", said.get(field.name, "")))
        lines.append(row(f"`{field.name}`", f"`{cell(str(field.type))}`", default_text(field), cell(meaning)))
    return lines


def default_text(field: Field[Any]) -> str:
    if field.default is not MISSING:
        return f"`{field.default!r}`"
    return "" if field.default_factory is MISSING else f"`{field.default_factory()!r}`"


def comments(cls: type) -> dict[str, str]:
    """Return the comment at the end of each field's line."""
    source = textwrap.dedent(inspect.getsource(cls))
    lines = source.splitlines()
    (tree,) = ast.parse(source).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            rest = lines[node.end_lineno - 1][node.end_col_offset :]  # type: ignore[operator]
            found[node.target.id] = rest.partition("# ")[2]
    return found


def members(cls: type) -> Iterator[tuple[str, Any]]:
    """Yield the public methods and properties that a class itself defines and documents."""
    for name, value in vars(cls).items():
        if name.startswith("_") or not inspect.getdoc(getattr(cls, name)):
            continue
        if inspect.isfunction(value) or isinstance(value, property):
            yield name, value
        elif isinstance(value, classmethod):
            yield name, getattr(cls, name)


# Metrics


def metric_table(registry: Any) -> list[str]:
    lines = [row("metric", "type", "labels", "meaning"), row("---", "---", "---", "---")]
    for collector in dict.fromkeys(registry._names_to_collectors.values()):
        (metric,) = collector.describe()
        labels = [label for label in collector._labelnames if label != "model_name"]
        name = metric.name.removeprefix("foretell:") + ("_total" if metric.type == "counter" else "")
        lines.append(
            row(f"`{name}`", metric.type, ", ".join(f"`{label}`" for label in labels), cell(metric.documentation))
        )
    return lines


def metrics() -> list[str]:
    from foretell.server.metrics import PrometheusMetrics

    return metric_table(PrometheusMetrics("model").registry)


def gateway_metrics() -> list[str]:
    from foretell.cluster.gateway_metrics import GatewayMetrics

    return metric_table(GatewayMetrics().registry)


# Planner


def catalog() -> list[str]:
    known = json.loads((ROOT / "foretell" / "plan" / "known.json").read_text(encoding="utf-8"))
    names = {"devices": known["gpus"], "models": known["models"]}
    listed = (f"- **{kind}**: {', '.join(f'`{name}`' for name in found)}" for kind, found in names.items())
    return [line for item in listed for line in wrapped(item, indent="  ")]


def families() -> list[str]:
    from foretell.models.families import family_table

    names = ("family", "formats", "CPU", "CUDA", "run with real weights", "compared with transformers")
    rows = [(*cells[:4], cells[4] if cells[4] == "no" else f"`{cells[4]}`", cells[5]) for cells in family_table()]
    return [row(*names), row(*["---"] * len(names)), *(row(*cells) for cells in rows)]


PARTS: dict[str, Callable[[], Iterable[str]]] = {
    "commands": commands,
    "python": python,
    "plug-ins": plug_ins,
    "programs": programs,
    "metrics": metrics,
    "gateway metrics": gateway_metrics,
    "catalog": catalog,
    "families": families,
    "refused flags": refused_flags,
    "ignored flags": ignored_flags,
}
PARTS |= {heading.lower(): (lambda cls=cls: option_table(cls)) for cls, heading in SHARED.items()}


def generated(text: str) -> str:
    """Return a page with its generated parts written again.

    Raises ValueError for a mark without its counterpart, and for a part that does not exist.
    """
    places = list(PLACE.finditer(text))
    paired = Counter(mark for each in places for mark in (each["head"].strip(), each["foot"]))
    if alone := list(Counter(MARK.findall(text)) - paired):
        raise ValueError(f"{alone[0]} stands alone; a part is between <!-- generated NAME --> and <!-- end of NAME -->")
    if unknown := [each["name"] for each in places if each["name"] not in PARTS]:
        raise ValueError(f"there is no part {unknown[0]!r}; known: {', '.join(PARTS)}")
    return PLACE.sub(
        lambda found: found["head"] + "\n".join(PARTS[found["name"]]()).rstrip() + "\n" + found["foot"], text
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args(argv)
    stale = broken = 0
    for page in sorted(PAGES.glob("**/*.md")):
        text = page.read_text(encoding="utf-8")
        try:
            new = generated(text)
        except ValueError as error:
            broken += 1
            print(f"{page.relative_to(ROOT)}: {error}")
            continue
        if new != text:
            stale += 1
            fate = "differs from the code; run python docs/generate.py" if args.check else "written"
            print(f"{page.relative_to(ROOT)}: {fate}")
            if not args.check:
                page.write_text(new, encoding="utf-8")
    return 1 if broken or (args.check and stale) else 0


if __name__ == "__main__":
    sys.exit(main())
