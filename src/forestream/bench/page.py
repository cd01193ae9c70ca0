"""A report of result files: Markdown, and one page of HTML that needs nothing but itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Final

from markdown_it import MarkdownIt

from forestream.bench.details import details
from forestream.bench.plots import Plot, plot_of, plots_of
from forestream.bench.report import markdown
from forestream.bench.results import TRAINING, Result
from forestream.bench.series import markdown as series_markdown
from forestream.bench.series import series_of
from forestream.bench.tables import cell, table
from forestream.errors import DataError

TITLE: Final = "Results"


@dataclass(frozen=True)
class Section:
    """A part of a report: its heading, Markdown, and what is drawn in the page."""

    heading: str
    text: str
    plots: tuple[Plot, ...] = ()


def sections_of(results: Sequence[Result]) -> list[Section]:
    """Sweeps first, then a section for every file in the order given.

    Raises:
        DataError: a record lacks what its kind has; its file is named.
    """
    own = [_section(result) for result in results]
    sweeps = [
        Section(f"By {one.axis}: {', '.join(one.methods)}", series_markdown(one), (plot_of(one),))
        for one in series_of(results)
    ]
    return [*sweeps, *own]


def _section(result: Result) -> Section:
    try:
        if result.kind == TRAINING:
            text = _training(result.record["lines"])
        else:
            text = markdown(result.record)
        if result.kind == "methods":
            text = f"{text}\n{details(result.record)}"
        return Section(result.name, text, tuple(plots_of(result)))
    except (KeyError, TypeError, AttributeError, ValueError, IndexError, StopIteration) as error:
        raise DataError(
            f"{result.path} is no whole record of its kind ({type(error).__name__}: {error}); write it anew"
        ) from error


def _training(lines: Sequence[dict[str, Any]]) -> str:
    """The first and the last line that hold each figure."""
    names = [name for name in dict.fromkeys(n for line in lines for n in line) if name.endswith(("loss", "accuracy"))]
    rows = []
    for name in names:
        held = [line for line in lines if isinstance(line.get(name), int | float)]
        if held:
            first, last = held[0], held[-1]
            ends = (f"{one[name]:.4f} (update {one['step']})" for one in (first, last))
            rows.append((name.replace("_", " "), *ends))
    return table(["figure", "first logged", "last logged"], rows)


def report_markdown(sections: Sequence[Section]) -> str:
    """Tables and lines; plots are in the page."""
    parts = [f"# {TITLE}\n", *(f"## {cell(one.heading)}\n\n{one.text}" for one in sections)]
    return "\n".join(part if part.endswith("\n") else f"{part}\n" for part in parts)


def report_page(sections: Sequence[Section]) -> str:
    """The same with plots, as HTML. Whatever records hold is shown as text: tags, links and pictures in it are not."""
    render = _renderer()
    entries = "".join(f'<li><a href="#s{n}">{escape(one.heading)}</a></li>\n' for n, one in enumerate(sections, 1))
    body = "".join(_part(number, one, render) for number, one in enumerate(sections, 1))
    return _PAGE.format(title=TITLE, style=_STYLE, entries=entries, body=body)


def _part(number: int, section: Section, render: MarkdownIt) -> str:
    figures = "".join(
        f'<figure role="img" aria-label="{escape(plot.caption)}">\n{plot.svg}\n'
        f"<figcaption>{escape(plot.caption)}</figcaption>\n</figure>\n"
        for plot in section.plots
    )
    # The main table comes first, then what is drawn, then the rest.
    main, mark, rest = section.text.partition("\n### ")
    rendered = render.render(main), render.render(mark + rest)
    heading = f'<h2 id="s{number}">{escape(section.heading)}</h2>\n'
    return f"<section>\n{heading}{rendered[0]}{figures}{rendered[1]}</section>\n"


def _renderer() -> MarkdownIt:
    found = MarkdownIt("commonmark", {"html": False}).enable("table")
    found.disable(["image", "link", "autolink", "reference", "html_inline", "html_block"])
    # Wide tables scroll inside their own frame, below a head that stays.
    found.add_render_rule("table_open", lambda *given: '<div class="table" tabindex="0"><table>\n')
    found.add_render_rule("table_close", lambda *given: "</table></div>\n")
    return found


_STYLE: Final = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 64rem; padding: 1rem; background: #ffffff; color: #1a1a1a;
  font: 16px/1.5 system-ui, sans-serif; }
h1, h2, h3 { line-height: 1.2; margin: 1.5em 0 0.5em; overflow-wrap: anywhere; }
h2 { border-top: 1px solid #cccccc; padding-top: 1em; }
a { color: #00568f; }
code { font: 0.85em ui-monospace, monospace; overflow-wrap: anywhere; }
.table { max-height: 70vh; overflow: auto; margin: 0.5em 0; border: 1px solid #cccccc; }
table { border-collapse: collapse; font-size: 0.9rem; min-width: 100%; }
th, td { padding: 0.3em 0.6em; text-align: left; border-bottom: 1px solid #e5e5e5; }
th { position: sticky; top: 0; background: #f2f2f2; }
figure { margin: 1em 0; }
svg { display: block; width: 100%; max-width: 44rem; height: auto; font-family: system-ui, sans-serif; }
figcaption { font-size: 0.85rem; color: #444444; }
"""

_PAGE: Final = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<h1>{title}</h1>
<nav><ul>
{entries}</ul></nav>
<main>
{body}</main>
</body>
</html>
"""
