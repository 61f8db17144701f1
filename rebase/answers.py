"""How the answers of the smaller commands look: one function each, named as `cli` asks for it.

The reports of replays are in `report`; as there, words from elsewhere reach a terminal only through
`visible` and rich's `Text`.
"""

import dataclasses
import enum
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rebase.words import visible

if TYPE_CHECKING:  # `forkman status` must not wait for what the other commands need
    from rebase.adopt import Adopted
    from rebase.audit import Accepted
    from rebase.export import Applied, Verification
    from rebase.inspect import ForkStatus, LogEntry
    from rebase.needs import Met
    from rebase.opened import Open
    from rebase.outcome import Audit
    from rebase.resolve import Saved
    from rebase.targets import Fetch
    from rebase.trial import Trial


def to_json(data: Any) -> str:
    """Any answer as JSON: its fields under their names; bytes and paths as text."""

    def plain(value: object) -> object:
        if isinstance(value, enum.Enum):
            return value.value
        if isinstance(value, bytes):
            return value.decode("utf-8", "replace")
        if isinstance(value, os.PathLike):
            return os.fspath(value)
        return str(value)

    def record(value: Any) -> Any:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return {f.name: record(getattr(value, f.name)) for f in dataclasses.fields(value)}
        if isinstance(value, list | tuple):
            return [record(each) for each in value]
        if isinstance(value, dict):
            return {str(key): record(each) for key, each in value.items()}
        return value

    return json.dumps(record(data), default=plain, indent=2)


def status(rows: "Sequence[ForkStatus]", console: Console) -> None:
    table = _table("fork", "stands on", "newest", "queue", "last replay", "open")
    for row in rows:
        newest = row.newest or ("none" if row.fetched else "not fetched")
        style = "" if row.newest in (None, row.pin.tag) else "bold yellow"
        table.add_row(
            Text(row.fork, "bold"),
            _text(str(row.pin)),
            Text(visible(newest), style),
            "a branch" if row.changes is None else str(row.changes),
            _text(row.last),
            Text(row.open, "red"),
        )
    console.print(table)
    for row in rows:
        if row.open:
            then = {
                "a conflict": "continue, skip or abort",
                "a resolved replay": "continue or abort",
            }.get(row.open, "save or abort")
            console.print(_text(f"{row.fork} has {row.open} open: forkman {then} {row.fork}"))


def fetch(rows: "Sequence[Fetch]", console: Console) -> None:
    for row in rows:
        how = {"git": "fetched", "archives": "from release archives", None: "out of reach"}
        said = "out of reach, as fetched before" if row.fault and row.source else how[row.source]
        console.print(Text(row.fork, "bold"), said)
        for note in row.notes:
            console.print(_text(f"  {note}"))
        if row.source is None and row.fault:
            console.print(_text(f"  {row.fault.todo}"))


def verified(rows: "Sequence[Verification]", console: Console) -> None:
    for row in rows:
        mark = (
            _mark(console, "✗", "x", "red") if row.findings else _mark(console, "✓", "v", "green")
        )
        holds = "holds with " + ", ".join(row.done)
        if not row.done:
            holds = "does not hold" if row.findings else "has nothing to apply"
        console.print(mark, Text(row.fork, "bold"), _text(holds))
        for how, why in row.skipped if row.done else ():
            console.print(_text(f"  not tried: {how}: {why}"))
        for finding in row.findings:
            console.print(_text(f"  {finding}"))
    if not rows:
        console.print("The index names no fork.")


def applied(row: "Applied", console: Console) -> None:
    _applied(row, console, "applied to")


def applies(row: "Applied", console: Console) -> None:
    _applied(row, console, "would change")


def taken_away(row: "Applied", console: Console) -> None:
    _applied(row, console, "taken away from")


def _applied(row: "Applied", console: Console, what: str) -> None:
    if not row.changed:
        console.print(_text(f"{row.fork}: nothing to do; it is so already."))
    for path in row.changed:
        note = "  (its other lines are not as at the pin)" if path in row.moved else ""
        console.print(_text(f"{row.fork}: {what} "), Text(visible(path)), Text(note), sep="")


def log(rows: "Sequence[LogEntry]", console: Console) -> None:
    table = _table("change", "subject", "author", "last outcome")
    for row in rows:
        outcome = " ".join(filter(None, (row.status, row.note)))
        table.add_row(*map(_text, (row.change, row.subject, row.author, outcome)))
    console.print(table if rows else "The queue is empty.")


def diff(text: str, console: Console) -> None:
    for line in text.splitlines():
        console.print(_text(line), soft_wrap=True)


def opened(state: "Open", console: Console) -> None:
    if state.run:
        console.print(
            _text(
                f"{state.fork}: {state.change}, change {len(state.outcomes) + 1} of {state.steps}"
                f" onto {state.target.new.pin}, is in conflict in"
            )
        )
        for file in state.files:
            console.print(_text(f"  {file}"))
        console.print(_text(f"The worktree is {state.worktree}"))
        console.print(_text(f"Resolve it there, then: forkman continue {state.fork}"))
        console.print(_text(f"Or: forkman skip {state.fork}, forkman abort {state.fork}"))
        return
    console.print(_text(f"{state.fork}: its branch is in {state.worktree}"))
    console.print(_text(f"Commit there, then: forkman save {state.fork}"))


def saved(row: "Saved", console: Console) -> None:
    for what, names in (
        ("changed", row.changed), ("added", row.added), ("removed", row.removed)
    ):  # fmt: skip
        for name in names:
            console.print(_text(f"{what}  {name}"))
    one = len(row.kept) == 1
    console.print(
        f"{len(row.kept)} change{' is as it was' if one else 's are as they were'}"
        + (", and the queue is in another order." if row.moved else ".")
    )
    if row.untracked:
        console.print(
            _text(
                "The worktree stays, for it has files that no commit holds: "
                + ", ".join(row.untracked)
            )
        )
    if row.changed or row.added or row.removed or row.moved:
        console.print("The exports are of the old queue now: forkman export")


def aborted(path: Path | None, console: Console) -> None:
    console.print(_text(f"Removed {path}." if path else "Nothing was open."))


def adopted(rows: "Sequence[Adopted]", console: Console) -> None:
    for row in rows:
        if not row.change:
            console.print(_text(f"Left out, a cover letter: {row.source}  {row.subject}"))
            continue
        merged = "" if row.exact else "  (merged: its context was not there as it says)"
        files = f"{row.files} file{'s' if row.files > 1 else ''}"
        console.print(_text(f"{row.change}  {files}  {row.subject}{merged}"))


def audited(rows: "Sequence[Audit]", console: Console) -> None:
    from rebase import report

    for row in rows:
        mark = Text("✗", "red") if row.findings else Text("✓", "green")
        what = f"{row.findings} finding{'' if row.findings == 1 else 's'} at {row.at}"
        console.print(mark, Text(row.fork, "bold"), _text(what))
        report.show_audit(row, console, most=None)
    if not rows:
        console.print(_text("No manifest has an [audit]."))


def accepted(row: "Accepted", console: Console) -> None:
    sites = f"{row.sites} site{'' if row.sites == 1 else 's'}"
    console.print(_text(f"Accepted {sites}: {row.path}" if row.sites else "There is nothing new."))
    audited([row.left], console)


def needs(rows: "Sequence[Met]", console: Console) -> None:
    """Targets at which a need is met in the same way share a line."""
    fork = need = ""
    grouped: dict[tuple[str, str, tuple[str, ...], tuple[str, ...]], list[Met]] = {}
    for row in rows:
        grouped.setdefault((row.fork, row.need, row.how, row.missing), []).append(row)
    for (its_fork, its_need, how, missing), same in grouped.items():
        if its_fork != fork:
            console.print(Text(its_fork, "bold"))
        if (its_fork, its_need) != (fork, need):
            what = " ".join(same[0].what.split())
            console.print(Text.assemble("  ", _text(f"{its_need}: {what}")), soft_wrap=True)
        fork, need = its_fork, its_need
        mark = Text("    ✓ ", "green") if how else Text("    ✗ ", "red")
        targets = ", ".join(row.target for row in same)
        said = "; ".join(how or missing)
        console.print(Text.assemble(mark, _text(f"{targets}: {said}")), soft_wrap=True)
    if not rows:
        console.print("No fork has a needs.toml.")


def tried(row: "Trial", console: Console) -> None:
    from rebase import report

    report.show_outcome(row.outcome, console)
    for note in row.notes:
        console.print(_text(note))
    places = ", ".join(row.outcome.places)
    console.print(_text(f"At {row.at}{': ' if places else ''}{places}"), soft_wrap=True)
    for line in row.diff.decode("utf-8", "surrogateescape").split("\n"):
        style = {"+": "green", "-": "red", "@": "cyan"}.get(line[:1], "")
        console.print(Text(visible(line), style), soft_wrap=True)


def _mark(console: Console, mark: str, plain: str, style: str) -> Text:
    return Text(mark if console.encoding.startswith("utf") else plain, style)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _text(words: str) -> Text:
    return Text(visible(words))
