"""The report as one HTML page that opens offline: styles, tables and figures are all inside it, and no script."""

import re
from html import escape
from typing import NamedTuple

from tinypod.study.answers import Analysis
from tinypod.study.figures import SERIES, VARIABLES, Plot
from tinypod.study.tables import Table

_DARK = {"ink": "#d5dae0", "grid": "#2c3238", "axis": "#58616b", "quiet": "#6d7680"}
_DARK_SERIES = ("#6db3ea", "#f0808d", "#63c58d", "#f0b04f", "#b39adb", "#57c9d6", "#d9956f", "#a9b4c2")
assert len(_DARK_SERIES) == len(SERIES)


class _Section(NamedTuple):
    anchor: str
    title: str
    tables: tuple[str, ...]
    figures: tuple[str, ...]  # beginnings of their names


_SECTIONS = (
    _Section("results", "Results", ("variants",), ("final", "grid")),
    _Section("differences", "Differences", ("differences",), ()),
    _Section("learning", "Learning curves", (), ("curves", "train_curves", "loss")),
    _Section("cost", "What it costs", ("costs",), ("cost_",)),
    _Section("scaling", "Scaling", ("scaling",), ("scaling_",)),
    _Section("target", "Time to the target", ("target",), ()),
    _Section("critical-batch", "Critical batch size", ("critical_batch",), ("critical_batch_",)),
    _Section("gap", "Training against held out", ("gap",), ()),
    _Section("runs", "Runs", ("ends",), ()),
)

_STYLE = """
*{box-sizing:border-box}
h1,h2,h3,p,li,figcaption,summary{overflow-wrap:anywhere}
html{-webkit-text-size-adjust:100%}
body{margin:0 auto;max-width:1120px;padding:1.5rem 1.25rem 4rem;background:var(--page);color:var(--text);
  font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
h1{font-size:1.75rem;line-height:1.2;margin:0 0 .25rem}
h2{font-size:1.2rem;margin:2.5rem 0 .75rem;padding-top:.75rem;border-top:1px solid var(--line)}
p{margin:.4rem 0}
.about,.note,figcaption{color:var(--soft)}
.note,figcaption{font-size:.85rem}
.short{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:.75rem 1.1rem .75rem 2.1rem;
  margin:1.25rem 0}
.short li{margin:.3rem 0}
.scroll{overflow-x:auto;margin:.75rem 0;border:1px solid var(--line);border-radius:10px}
table{border-collapse:collapse;width:100%;font-size:.9rem;font-variant-numeric:tabular-nums}
th,td{padding:.45rem .8rem;text-align:right;white-space:nowrap;vertical-align:top}
th{font-weight:600;color:var(--soft);background:var(--card)}
.name,.words{text-align:left}
.long{white-space:normal;min-width:15rem}
tbody tr{border-top:1px solid var(--line)}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,430px),1fr));gap:1.25rem;align-items:start}
figure{margin:0;background:var(--card);border:1px solid var(--line);border-radius:10px;padding:.9rem;max-width:640px}
figure h3{font-size:.95rem;margin:0 0 .5rem}
figure svg{display:block;width:100%;height:auto}
figure svg text{font-family:system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif!important}
a{color:var(--series-0)}
summary{cursor:pointer;font-weight:600}
nav{display:flex;flex-wrap:wrap;gap:.25rem 1rem;font-size:.9rem;margin:.75rem 0}
@media (max-width:480px){body{padding:1rem .75rem 3rem;font-size:15px}figure{padding:.6rem}th,td{padding:.4rem .6rem}}
"""
_METHOD = (
    "Means and sds are over the runs that count: those that are done, and those that a rule stopped early, with the "
    "last evaluation they had. Runs that diverged or failed are left out and listed. Differences have Welch's t "
    "interval at 95 %. Power laws and the critical batch size are least-squares fits to logarithms. The documentation "
    "(docs/studies.md, “What a report says”) has every formula in words."
)


def render(analysis: Analysis, sentences: list[str], tables: dict[str, Table], plots: list[Plot]) -> str:
    file = analysis.file
    sections = [_section(section, tables, plots) for section in _SECTIONS]
    shown = [section for section, html in zip(_SECTIONS, sections, strict=True) if html]
    links = "".join(f'<a href="#{section.anchor}">{escape(section.title)}</a>' for section in shown)
    goal = "higher is better" if file.direction == "max" else "lower is better"
    about = f"Study of {file.base}, by {file.metric_label} ({file.metric}; {goal})"
    if file.target is not None:
        about += f", target {analysis.numbers.value(file.target)}"
    bullets = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    no_target = "" if file.target is not None else _note("No target is set, so time to a target is not reported.")
    every = f"<details><summary>All {len(analysis.runs)} runs</summary>{_table(tables['states'])}</details>"
    return (
        "<!doctype html>\n"
        '<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(file.name)}: report</title><style>{_colors()}{_STYLE}</style></head><body>\n"
        f'<header><h1>{escape(file.name)}</h1><p class="about">{escape(about)}.</p></header>\n'
        f'<ul class="short">{bullets}</ul>\n<nav>{links}</nav>\n'
        f"<main>{''.join(sections)}{every}</main>\n"
        f"<footer><h2>How this is computed</h2>{_note(_METHOD)}{no_target}"
        f"{_note_html(_links('runs', ('.csv',)) + ' has every run in numbers.')}</footer>\n</body></html>\n"
    )


def _section(section: _Section, tables: dict[str, Table], plots: list[Plot]) -> str:
    """Empty where the study has nothing of it."""
    found = [tables[name] for name in section.tables if name in tables]
    parts = [_table(table) for table in found]
    if figures := "".join(_figure(plot) for plot in plots if plot.name.startswith(section.figures)):
        parts.append(f'<div class="figures">{figures}</div>')
    heading = found[0].title if found else section.title
    return f'<section id="{section.anchor}"><h2>{escape(heading)}</h2>{"".join(parts)}</section>\n' if parts else ""


def _table(table: Table) -> str:

    def cell(tag: str, column: int, text: str) -> str:
        kind = "name" if column == 0 else "words" if table.columns[column] in table.words else "number"
        long = " long" if kind == "words" and len(text) > 24 else ""  # may break; short ones stay whole
        return f'<{tag} class="{kind}{long}">{escape(text)}</{tag}>'

    head = "".join(cell("th", column, text) for column, text in enumerate(table.columns))
    rows = "".join(
        "<tr>" + "".join(cell("td", column, text) for column, text in enumerate(row)) + "</tr>" for row in table.rows
    )
    notes = "".join(_note(note) for note in table.notes)
    body = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return f'<div class="scroll" tabindex="0">{body}</div>{notes}'


def _figure(plot: Plot) -> str:
    links = _links(plot.name, (".png", ".csv"))
    return (
        f'<figure id="figure-{plot.name}"><h3>{escape(plot.title)}</h3>{plot.svg()}'
        f"<figcaption>{escape(plot.caption)} {links}</figcaption></figure>"
    )


def _links(name: str, endings: tuple[str, ...]) -> str:
    return " · ".join(f'<a href="{escape(name + end)}">{escape(name + end)}</a>' for end in endings)


def _note(text: str) -> str:
    return _note_html(re.sub("`([^`]+)`", r"<code>\1</code>", escape(text)))


def _note_html(text: str) -> str:
    return f'<p class="note">{text}</p>'


def _colors() -> str:
    light = {variable: color for color, variable in VARIABLES.items()}
    dark = _DARK | {f"series-{number}": color for number, color in enumerate(_DARK_SERIES)}
    light |= {"page": "#ffffff", "card": "#fafbfc", "line": "#e1e5ea", "text": "#1f252b", "soft": "#59636e"}
    dark |= {"page": "#14181c", "card": "#1b2026", "line": "#2f363d", "text": "#e3e8ed", "soft": "#9aa5b1"}
    assert light.keys() == dark.keys()
    write = [";".join(f"--{name}:{color}" for name, color in colors.items()) for colors in (light, dark)]
    return f":root{{color-scheme:light dark;{write[0]}}}@media (prefers-color-scheme:dark){{:root{{{write[1]}}}}}"
