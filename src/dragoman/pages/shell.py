"""What all pages share: one file without external resources, light and dark mode, sortable tables."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape


def page_of(title: str, body: Iterable[str], *, style: str = "", script: str = "") -> str:
    """Return a page; `style` and `script` are added to what all pages share."""
    parts = "\n".join(part for part in body if part)
    return PAGE.format(title=escape(title), style=STYLE + style, script=SCRIPT + script, body=parts)


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title><style>{style}</style></head>
<body><main>
{body}
</main><script>{script}</script></body></html>
"""
STYLE = """
:root { color-scheme: light dark; --ink: #1c1e21; --paper: #ffffff; --faint: #d9dce1; --soft: #667080; --bar: #7fb2df;
  --heat: 76, 154, 92;
  --line0: #0068a8; --line1: #cf5200; --line2: #008a62; --line3: #b0508a; --line4: #a87400; --line5: #6f4bb8;
  --line6: #2a97d4; --line7: #7d5f2a; --behind: #c4cad2; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --paper: #15181c; --faint: #333a43; --soft: #98a2b0;
  --bar: #3f78ab; --heat: 76, 154, 92;
  --line0: #4aa8e8; --line1: #ff8a4a; --line2: #3ecf9f; --line3: #e58cc0; --line4: #e6b84a; --line5: #b39bf0;
  --line6: #8fd0f5; --line7: #cbaa72; --behind: #565f6b; } }
body { background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; margin: 0; }
main { max-width: 1440px; margin: 0 auto; padding: 1.5rem; }
h1 { font-size: 1.7rem; margin: 0 0 .3rem; } h2 { font-size: 1.2rem; margin: 2.2rem 0 .2rem; } p { margin: .3rem 0; }
.warning { border-left: 4px solid var(--line1); padding: .2rem .7rem; max-width: 60rem; }
.small { color: var(--soft); font-size: .85rem; } .answer { font-weight: 600; max-width: 60rem; }
.wide { overflow-x: auto; margin: 1rem 0 0; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .45rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--faint); }
th:first-child, .family { text-align: left; } .family { color: var(--soft); }
td.family { white-space: normal; min-width: 11rem; } thead th { cursor: pointer; }
thead th { vertical-align: bottom; white-space: normal; } th[aria-sort] { text-decoration: underline; }
.bar { background: linear-gradient(to right, var(--bar) var(--share), transparent var(--share)) no-repeat;
  background-size: calc(100% - .9rem) 4px; background-position: center bottom; padding-bottom: .35rem; }
.heat { background: rgba(var(--heat), calc((var(--share) - 20%) / 130%)); }
.spread { color: var(--soft); font-size: .75rem; }
figure { margin: .6rem 0; } figcaption { font-weight: 600; }
.panels { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 560px), 1fr)); gap: 0 1.5rem; }
svg { width: 100%; max-width: 920px; height: auto; } svg text { fill: var(--soft); font-size: 11px; }
svg text.title { fill: var(--ink); }
svg text.name { fill: var(--c); font-weight: 600; paint-order: stroke; stroke: var(--paper); stroke-width: 3px; }
.grid { stroke: var(--faint); stroke-width: .7; } .axis { fill: none; stroke: var(--soft); }
.line { fill: none; stroke: var(--c); stroke-width: 2; } .leader { stroke: var(--c); stroke-width: .8; }
.behind { fill: none; stroke: var(--behind); stroke-width: 1.2; }
.band { fill: var(--c); opacity: .16; } .dot { fill: var(--c); }
"""
SCRIPT = """
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => head.addEventListener("click", () => {
    const value = row => row.cells[column].dataset.value;
    const order = (a, b) => value(a) === undefined
      ? a.cells[column].textContent.localeCompare(b.cells[column].textContent) : value(b) - value(a);
    const turn = head.getAttribute("aria-sort") === "descending" ? -1 : 1;
    heads.forEach(other => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", turn === 1 ? "descending" : "ascending");
    table.tBodies[0].append(...[...table.tBodies[0].rows].sort((a, b) => turn * order(a, b)));
  }));
}
"""
