"""The demo's report on the terminal."""

from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from statecore.display import geometry_table

if TYPE_CHECKING:
    from statecore.cli._demo import Report


def print_report(report: "Report") -> None:
    """Prints geometry, text, futures, speculation, costs and checks."""
    console = Console()
    console.print(geometry_table(report.geometry, "the state, a row a plane"))
    console.print(Panel(escape(report.text), title="text", expand=False))
    for number, future in enumerate(report.futures, start=1):
        console.print(Panel(escape(future), title=f"future {number} of one capture", expand=False))
    if report.speculation:
        console.print(_speculation(report.speculation))
    console.print(_costs(report.costs))
    for name, holds in report.checks.items():
        console.print(f"[{'green' if holds else 'red'}]{'ok    ' if holds else 'FAILED'}[/] {name}")
        if not holds:
            console.print(f"       {escape(report.details[name])}", highlight=False)
    failed = [name for name, holds in report.checks.items() if not holds]
    if report.injected and failed:
        console.print(f"The planted fault {report.injected} was found by: {'; '.join(failed)}.")
    elif report.injected:
        console.print(f"[red]The planted fault {report.injected} was not found.[/]")


def _speculation(found: dict) -> Table:
    table = Table("", "tokens/s", "tokens a verify", title=f"greedy, {found['text_tokens']} tokens")
    table.add_row("plain", f"{found['plain_tokens_per_second']:.0f}", "1")
    table.add_row("speculative", f"{found['tokens_per_second']:.0f}", f"{found['tokens_per_verify']:.2f}")
    return table


def _costs(costs: dict) -> Table:
    table = Table("operation", "us", "ratio", "against", title=f"costs at a state of {costs['state_bytes']:,} bytes")
    for name in ("capture_into_slot", "exchange", "commit"):
        cost = costs[name]
        table.add_row(name.replace("_", " "), f"{cost['microseconds']:,.1f}", f"{cost['ratio']:.3f}", cost["against"])
    return table
