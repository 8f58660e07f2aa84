"""The page of a bench of verdicts: a confusion matrix and tables. Pure."""

import html
from collections.abc import Iterable, Mapping, Sequence

import plotly.graph_objects as go

from workbench.views import theme


def confusion(counts: Mapping[tuple[str, str], int]) -> go.Figure:
    """Return the confusion matrix of runs by (what is wrong, what was said)."""
    rows = list(dict.fromkeys(row for row, _ in counts))
    columns = list(dict.fromkeys(column for _, column in counts))
    values = [[counts.get((row, column), 0) for column in columns] for row in rows]
    colours = [[0, "white"], [1e-9, "#dbe9f6"], [1, "#08519c"]]
    heat = go.Heatmap(
        x=columns, y=rows, z=values, colorscale=colours, showscale=False, xgap=1, ygap=1,
        text=[[str(count or "") for count in row] for row in values], texttemplate="%{text}",
        hovertemplate="%{y}<br>verdict: %{x}<br>%{z} runs<extra></extra>",
    )  # fmt: skip
    drawn = theme.Figure(heat)
    drawn.update_xaxes(side="top", tickangle=-40, automargin=True)
    drawn.update_yaxes(autorange="reversed", automargin=True)
    drawn.update_layout(template="plotly_white", height=110 + 34 * (len(rows) + 3), margin={"t": 150, "r": 60})
    return drawn


def html_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table with escaped cells."""
    cells = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><tr>{''.join(f'<th>{html.escape(name)}</th>' for name in head)}</tr>{cells}</table>"


def html_page(title: str, intro: str, sections: Iterable[str]) -> str:
    """Return a page: a title, an escaped paragraph, and sections of HTML."""
    return "\n".join(
        [
            f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{html.escape(title)}</title>",
            "<style>body{font:15px system-ui,sans-serif;margin:2em auto;max-width:1200px;color:#222;background:#fff}"
            "table{border-collapse:collapse}td,th{text-align:left;padding:.3em .8em;border-bottom:1px solid #ddd;"
            "vertical-align:top}</style>",
            f"<h1>{html.escape(title)}</h1><p>{html.escape(intro)}</p>",
            *sections,
            "</html>",
        ]
    )
