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
    from rebase.export import Applied, Verification
    from rebase.inspect import ForkStatus, LogEntry
    from rebase.opened import Open
    from rebase.resolve import Saved
    from rebase.targets import Fetch


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
            then = "continue, skip or abort" if row.open == "a conflict" else "save or abort"
            console.print(_text(f"{row.fork} has {row.open} open: forkman {then} {row.fork}"))


def fetch(rows: "Sequence[Fetch]", console: Console) -> None:
    for row in rows:
        how = {"git": "fetched", "archives": "from release archives", None: "out of reach"}
        console.print(Text(row.fork, "bold"), how[row.source])
        for note in row.notes:
            console.print(_text(f"  {note}"))
        if row.source is None and row.fault:
            console.print(_text(f"  {row.fault.todo}"))


def verified(rows: "Sequence[Verification]", console: Console) -> None:
    for row in rows:
        mark = Text("✗", "red") if row.findings else Text("✓", "green")
        console.print(mark, Text(row.fork, "bold"), _text("holds with " + ", ".join(row.done)))
        for how, why in row.skipped:
            console.print(_text(f"  not tried: {how}: {why}"))
        for finding in row.findings:
            console.print(_text(f"  {finding}"))
    if not rows:
        console.print("The index names no fork.")


def applied(row: "Applied", console: Console) -> None:
    if not row.changed:
        console.print(_text(f"{row.fork}: nothing to do; it is so already."))
    for path in row.changed:
        note = "  (its other lines are not as at the pin)" if path in row.moved else ""
        console.print(_text(f"{row.fork}: "), Text(visible(path)), Text(note), sep="")


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
                f"{state.fork}: change {len(state.outcomes) + 1} onto {state.target.new.pin} is in"
                f" conflict in {state.worktree}"
            )
        )
        console.print(
            _text(
                f"Resolve it there, then: forkman continue {state.fork}"
                f"   (or forkman skip {state.fork}, forkman abort {state.fork})"
            )
        )
        return
    console.print(_text(f"{state.fork}: its branch is in {state.worktree}"))
    console.print(_text(f"Commit there, then: forkman save {state.fork}"))


def saved(row: "Saved", console: Console) -> None:
    for what, names in (
        ("changed", row.changed), ("added", row.added), ("removed", row.removed)
    ):  # fmt: skip
        for name in names:
            console.print(_text(f"{what}  {name}"))
    console.print(f"{len(row.kept)} changes are as they were.")
    if row.untracked:
        console.print(
            _text(
                "The worktree stays, for it has files that no commit holds: "
                + ", ".join(row.untracked)
            )
        )
    if row.changed or row.added or row.removed:
        console.print("The exports are of the old queue now: forkman export")


def aborted(path: Path | None, console: Console) -> None:
    console.print(_text(f"Removed {path}." if path else "Nothing was open."))


def adopted(rows: "Sequence[Adopted]", console: Console) -> None:
    for row in rows:
        merged = "" if row.exact else "  (merged: its context was not there as it says)"
        files = f"{row.files} file{'s' if row.files > 1 else ''}"
        console.print(_text(f"{row.change}  {files}  {row.subject}{merged}"))


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _text(words: str) -> Text:
    return Text(visible(words))
