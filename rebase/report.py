"""How a run looks: on a terminal, as JSON, and as Markdown for a CI job's summary. Knows no git.

Words from elsewhere (messages, paths, code, what git said) never reach a reader raw. `visible`
makes control bytes, escape sequences, bidirectional controls and bytes that are no UTF-8 visible;
on a terminal the result goes through rich's `Text`, never its markup; in Markdown it is escaped
whole. A sentence therefore keeps this module's own words (`str`) apart from the others' (`_Code`
for names, paths and commits, `_Prose` for sentences), and is written once for both.

The JSON is one object of ASCII characters, keys in the order below. Bytes are text where they are
UTF-8; where they are not, U+FFFD stands for each bad byte and a second key, the name followed by
`_base64`, has them exactly. Text with lone surrogates has U+FFFD in their place.

    version    1; raised when a key goes or means something else, not when one is added
    command    the words the run was asked with
    forks      for each fork
        fork, source
        old, new    the pin before and after: commit, tag (null where there is none)
        how
        outcomes    for each change, in the queue's order
            change, subject
            status       applied | already upstream | not needed | conflict | skipped
            tree         the tree the branch has after it
            commit       the commit made, or null
            taken        what upstream already has of it: path, hunks, total, by
            conflicts    for each path
                path
                kind     content | add/add | modify/delete | rename | mode | anchor lost | other
                hunks    line (in upstream's file, from 1), base, upstream, ours
                who, rewritten, detail
            places, new_places, by, remembered, note
        problem, todo, unreachable, notes
        audit       what the audit found, or null where there was none
            fork, at
            residue      path, line, scope, kind, code
            contracts    contract, why, detail, by
            unparsed     path, line, detail, changes
            accepted, kept, before
            stale        what, reason
            notes
    landed     true: pins, queues and exports were written
    dry        true: they would have been
    written    paths, relative to the project; removed: those that went
    notes      sentences

`by`, `who` and `rewritten` list upstream commits: id, subject, author, date (YYYY-MM-DD),
pull_request (a number, or null). `rebase.outcome` says what each of these means.
"""

import base64
import dataclasses
import enum
import json
import re
import shlex
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, repeat, zip_longest
from typing import Any, NamedTuple, TypeVar

from rich.cells import chop_cells
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from rebase.errors import ForkmanError
from rebase.outcome import (
    Audit,
    Conflict,
    ForkReport,
    Hunk,
    Kind,
    Outcome,
    Report,
    Status,
    Taken,
    UpstreamCommit,
)
from rebase.words import visible

_TWO_COLUMNS = 90  # cells: below, the sides of a hunk are stacked
_THREE_COLUMNS = 140
_MOST_LINES = 24  # of one side of a hunk
_MOST_CHARACTERS = 400  # of one line
_MOST_HUNKS = 12  # of one conflict
_MOST_COMMITS = 3
_MOST_WORDS = 2000  # of a sentence: it may hold commands, which help only whole
_MOST_PATHS = 20  # of those written
_MOST_SITES = 40  # of one fork's residue
_SUMMARY_LIMIT = 1_000_000  # bytes; GitHub shows no step summary above 1 MiB
_SECONDS_BETWEEN_LINES = 5.0

_LANGUAGES = frozenset({"c", "cpp", "cu", "h", "json", "py", "sh", "toml", "yaml", "yml"})
_ASCII = str.maketrans({"→": "->", "✓": "+", "✗": "x", "…": "...", "│": "|"})
_MARKS = {
    Status.APPLIED: ("✓", "green"),
    Status.ALREADY_UPSTREAM: ("=", "cyan"),
    Status.NOT_NEEDED: ("-", "dim"),
    Status.SKIPPED: ("-", "yellow"),
    Status.CONFLICT: ("✗", "red"),
}


class _Code(NamedTuple):
    """A name, a path, a commit's words: shown as it is, in a code span where there is one."""

    text: str | bytes


class _Prose(NamedTuple):
    """A sentence that may quote anybody."""

    text: str


_Sentence = tuple[str | _Code | _Prose, ...]


# JSON


def to_json(report: Report) -> str:
    """`report` as JSON, in the format this module's docstring describes."""
    return json.dumps({"version": 1, **_object(report)}, indent=2)


def _object(data: Any) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for field in dataclasses.fields(data):
        value = getattr(data, field.name)
        made[field.name] = _value(value)
        if isinstance(value, bytes) and value != made[field.name].encode():
            made[f"{field.name}_base64"] = base64.b64encode(value).decode("ascii")
    return made


def _value(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return _object(value)
    if isinstance(value, tuple):
        return [_value(item) for item in value]
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, str):
        return re.sub("[\ud800-\udfff]", "\ufffd", value)
    return value


# What is said, wherever it is shown


def _pins(fork: ForkReport) -> _Sentence:
    old, new = str(fork.old), str(fork.new)
    if not fork.moved:
        return (_Code(new),)
    if old == new:  # a tag that moved
        old, new = f"{old} ({fork.old.commit[:9]})", f"{new} ({fork.new.commit[:9]})"
    return (_Code(old), " → ", _Code(new))


def _problem(fork: ForkReport) -> str:
    """Why a fork could not be carried; empty where it could."""
    return fork.problem or ("Its upstream could not be reached." if fork.unreachable else "")


def _how(fork: ForkReport) -> _Sentence:
    return (_Prose(fork.how), " (archives)" if fork.source == "archives" else "")


def _mark(fork: ForkReport) -> tuple[str, str]:
    """What a fork's line begins with, and its style."""
    if fork.conflicts or fork.findings:
        return _MARKS[Status.CONFLICT]
    if _problem(fork):
        return "!", "yellow"
    return _MARKS[Status.APPLIED] if fork.moved or fork.outcomes else ("=", "dim")


def _counts(fork: ForkReport) -> list[tuple[str, str]]:
    """How many changes ended how, with the style of each."""
    counts = [
        (_count(n, "conflict") if status is Status.CONFLICT else f"{n} {status.value}", style)
        for status, (_, style) in _MARKS.items()
        if (n := sum(o.status is status for o in fork.outcomes))
    ]
    if fork.findings:
        counts.append((_count(fork.findings, "finding"), "red"))
    if _problem(fork):
        counts.append(("out of reach" if fork.unreachable else "not carried", "yellow"))
    return counts or [("nothing to replay", "dim")]


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def _plain(outcome: Outcome) -> bool:
    """Whether there is nothing to say but that the change was applied."""
    return outcome.status is Status.APPLIED and next(_reasons(outcome), None) is None


def _reasons(outcome: Outcome) -> Iterator[tuple[int, _Sentence]]:
    """Why a change ended as it did, each sentence with its depth."""
    for taken in outcome.taken:
        yield from _taken(taken)
    if outcome.status is Status.ALREADY_UPSTREAM and not outcome.taken and not outcome.note:
        yield 0, ("upstream already has all of it",)
    if outcome.remembered:
        yield 0, ("conflict resolved as a person did before (git rerere remembered)",)
    if outcome.new_places:
        yield 0, (f"also edited in {_count(len(outcome.new_places), 'new place')}:",)
        yield from ((1, (_Code(place),)) for place in outcome.new_places)
    if outcome.note:
        yield 0, (_Prose(outcome.note),)
    if outcome.by:
        yield from _commits(("since ",), outcome.by)


def _taken(taken: Taken) -> Iterator[tuple[int, _Sentence]]:
    part = f"{taken.hunks} of {_count(taken.total, 'hunk')} " if taken.hunks < taken.total else ""
    said: _Sentence = (_Code(taken.path), f": {part}already upstream")
    if taken.by:
        yield from _commits((*said, " in "), taken.by)
    else:
        yield 0, (*said, "; the history names no commit")


def _audited(audit: Audit, most: int | None = _MOST_SITES) -> Iterator[tuple[int, _Sentence]]:
    """What an audit found, each sentence with its depth. most: how many sites, None for all."""
    if audit.residue:
        yield 0, (f"{_count(len(audit.residue), 'site')} of CUDA-only code, accepted by nobody:",)
    for site in audit.residue[:most]:
        where: _Sentence = (" in ", _Code(site.scope)) if site.scope else ()
        yield (
            1,
            (
                _Code(f"{site.path}:{site.line}"),
                "  ",
                _Code(_short(site.code, _MOST_CHARACTERS)),
                *where,
            ),
        )
    if most is not None and (more := audit.residue[most:]):
        yield 1, (f"and {len(more)} more",)
    for broken in audit.contracts:
        yield 0, ("broken contract ", _Code(broken.contract), ": ", _Prose(broken.detail))
        if broken.by:
            yield from ((at + 1, said) for at, said in _commits(("since ",), broken.by))
        yield 1, ("relied on: ", _Prose(_short(broken.why, _MOST_CHARACTERS)))
    for file in audit.unparsed:
        changes = _Code(", ".join(file.changes))
        place = _Code(f"{file.path}:{file.line}")
        yield 0, (place, " does not parse after ", changes, ": ", _Prose(file.detail))
    if audit.before:
        yield 0, (f"{_count(audit.before, 'finding')} not new, for the old pin has them too",)
    if most is None:
        if audit.stale:
            # one file accepts for every revision we follow, so most of these are for another one
            gone = _count(len(audit.stale), "acceptance")
            yield 0, (f"{gone} of code that is not there; --json names them",)
        yield from ((0, sentence) for note in audit.notes for sentence in _paragraph(note))
        sites, held = _count(audit.accepted, "site"), _count(audit.kept, "contract")
        yield 0, (f"{sites} accepted, {held} kept",)
    elif audit.notes:
        yield from ((0, sentence) for note in audit.notes for sentence in _paragraph(note))


def _about(fork: ForkReport, conflict: Conflict) -> Iterator[tuple[int, _Sentence]]:
    """What upstream did to the lines of a conflict."""
    if conflict.who:
        yield from _commits(("since ",), conflict.who)
    if conflict.rewritten:
        yield from _commits(("upstream made this itself in ",), conflict.rewritten)
        yield 0, ("and rewrote it since; if nothing is missing: ", _Code(_forkman("skip", fork)))


def _commits(lead: _Sentence, commits: Sequence[UpstreamCommit]) -> Iterator[tuple[int, _Sentence]]:
    first, *more = commits[:_MOST_COMMITS]
    yield 0, lead + _commit(first)
    yield from ((1, _commit(commit)) for commit in more)
    if len(commits) > _MOST_COMMITS:
        yield 1, (f"and {len(commits) - _MOST_COMMITS} more",)


def _commit(commit: UpstreamCommit) -> _Sentence:
    number = f"(#{commit.pull_request})"
    subject = _short(commit.subject.removesuffix(number).rstrip(), _MOST_CHARACTERS)
    said: _Sentence = (_Code(commit.id[:9]), ' "', _Prose(subject), '"')
    if commit.pull_request is not None:
        said += (" ", _Code(number))
    return (*said, ", ", _Prose(_short(commit.author, _MOST_CHARACTERS)), ", ", _Prose(commit.date))


def _place(conflict: Conflict) -> bytes:
    return conflict.path + (b":%d" % conflict.hunks[0].line if conflict.hunks else b"")


def _more_hunks(hunks: Sequence[Hunk]) -> str:
    return f"and {len(hunks)} more, from lines {', '.join(str(hunk.line) for hunk in hunks)}"


def _forkman(command: str, fork: ForkReport) -> str:
    return f"forkman {command} {shlex.quote(visible(fork.fork))}"


def _verdict(report: Report) -> _Sentence:
    moved = sum(fork.moved for fork in report.forks)
    conflicts = sum(len(fork.conflicts) for fork in report.forks)
    stuck: list[str | _Code | _Prose] = []
    for fork in report.forks:
        if _problem(fork):
            stuck += [", " if stuck else "", _Code(fork.fork)]
    if stuck:
        stuck.append(" could not be carried.")
    if report.landed and (moved or report.written or report.removed):
        files = _count(len(report.written), "file")
        said = f"Landed: {_count(moved, 'fork')} moved, {files} written"
        return (f"{said}; ", *stuck) if stuck else (f"{said}.",)
    findings = sum(fork.findings for fork in report.forks)
    if conflicts or findings:
        parts = [_count(conflicts, "conflict")] if conflicts else []
        parts += [_count(findings, "finding")] if findings else []
        verb = "resolve" if conflicts else "look at"
        said = f"Nothing was written: {' and '.join(parts)} to {verb}"
        return (f"{said}; ", *stuck) if stuck else (f"{said}.",)
    if not (moved or report.written or report.removed):
        return ("Nothing moved: ", *(stuck or ["every fork stands where it should."]))
    if stuck:
        return ("Nothing was written: ", *stuck)
    return ("Nothing was written: this was a dry run." if report.dry else "Nothing was written.",)


def _next(report: Report) -> tuple[str, list[list[str]]]:
    """What the commands to run now are for, and the commands: those of one line in their order."""
    conflicts = [fork for fork in report.forks if any(map(_for_a_worktree, fork.conflicts))]
    if not conflicts and (accept := list(_accept(report))):
        return "To accept residue that you looked at, and go on:", [*accept, [_again(report)]]
    resolve = [[_forkman("edit", fork), _forkman("continue", fork)] for fork in conflicts]
    if not report.dry:
        return "To resolve:", resolve
    again = _again(report)
    if resolve:
        return "To resolve:", [[again], *resolve]
    moves = report.written or any(fork.moved for fork in report.forks)
    return "To land it:", [[again]] if moves else []


def _for_a_worktree(outcome: Outcome) -> bool:
    """Whether a worktree helps with a conflict: a recipe has to be corrected itself."""
    kinds = {conflict.kind for conflict in outcome.conflicts}
    return kinds != {Kind.ANCHOR_LOST}


def _again(report: Report) -> str:
    words = [word for word in visible(report.command).split() if word != "--dry-run"]
    return " ".join(["forkman", *words])


def _accept(report: Report) -> Iterator[list[str]]:
    """The commands that accept residue."""
    for fork in report.forks:
        if fork.audit and fork.audit.residue:
            command = _forkman("audit", fork)
            yield [f"{command} --at {shlex.quote(visible(str(fork.new)))} --accept REASON"]


def _changed(report: Report) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The files a run wrote and those it removed, each with its title; nothing where none."""
    if report.written:
        yield "Written:" if report.landed else "Would have been written:", report.written
    if report.removed:
        yield "Removed:" if report.landed else "Would have been removed:", report.removed


def _paragraph(text: str) -> list[_Sentence]:
    """What may be several lines, as what git says often is."""
    head, left_out, tail = _cut([line for line in text.split("\n") if line.strip()])
    said: list[_Sentence] = [(_Prose(_short(line, _MOST_WORDS)),) for line in head]
    if left_out:
        said.append((f"… {_count(left_out, 'line')} left out …",))
    return said + [(_Prose(_short(line, _MOST_WORDS)),) for line in tail]


def _short(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    return f"{text[:most]}… ({len(text) - most} more characters)"


class _Line(NamedTuple):
    """A line of code. number: in its file, or None; new: the base does not have it."""

    text: str
    number: int | None = None
    new: bool = False


class _Side(NamedTuple):
    title: str
    lines: list[_Line]


def _sides(hunk: Hunk) -> list[_Side]:
    """Upstream's lines, ours, and the base's where both have departed from them."""
    base = frozenset(_split(hunk.base))
    sides = [
        _Side("upstream now", _lines(hunk.upstream, base, hunk.line)),
        _Side("our change wants", _lines(hunk.ours, base)),
    ]
    if hunk.base and hunk.base not in (hunk.upstream, hunk.ours):
        sides.append(_Side("before both", _lines(hunk.base, base)))
    return sides


def _lines(content: bytes, base: frozenset[bytes], first: int | None = None) -> list[_Line]:
    if not content:
        return [_Line("(no lines)")]
    lines = [
        _Line(
            _short(line.decode("utf-8", "surrogateescape"), _MOST_CHARACTERS),
            first and first + n,
            line not in base,
        )
        for n, line in enumerate(_split(content))
    ]
    head, left_out, tail = _cut(lines)
    if left_out:
        head.append(_Line(f"… {_count(left_out, 'line')} left out …"))
    if not content.endswith(b"\n"):
        tail.append(_Line("\\ No newline at end of file"))
    return head + tail


def _split(content: bytes) -> list[bytes]:
    return content.removesuffix(b"\n").split(b"\n") if content else []


_Item = TypeVar("_Item")


def _cut(items: Sequence[_Item]) -> tuple[list[_Item], int, list[_Item]]:
    """The first and the last of many lines, and how many between them are left out."""
    if len(items) <= _MOST_LINES:
        return list(items), 0, []
    tail = _MOST_LINES // 3
    head = _MOST_LINES - tail
    return list(items[:head]), len(items) - _MOST_LINES, list(items[-tail:])


# The terminal


def show(report: Report, console: Console) -> None:
    """Print `report`: the forks, what is not plain, what audits found, conflicts, what to do now.

    Lines are wrapped on a terminal only: what is piped keeps its paths and commands whole.
    """
    screen = _Screen(console)
    screen.summary(report.forks)
    for fork in report.forks:
        screen.fork(fork)
    for fork in report.forks:
        for outcome in fork.conflicts:
            screen.conflict(fork, outcome)
    screen.end(report)


def show_audit(audit: Audit, console: Console, *, most: int | None) -> None:
    """Print what an audit found; of its sites, so many at most, or all."""
    _Screen(console).reasons(_audited(audit, most), 2)


def show_outcome(outcome: Outcome, console: Console) -> None:
    """Print how one change ended, whatever there is to say of it."""
    screen = _Screen(console)
    mark, style = _MARKS[outcome.status]
    screen.line(
        screen.text(f"{mark} ", style=style),
        screen.text(_Code(outcome.change), style="bold"),
        screen.text(f"  {outcome.status.value}  ", style=style),
        screen.text(_Code(outcome.subject), style="dim"),
    )
    for conflict in outcome.conflicts:
        place = screen.text(_Code(_place(conflict)), style="bold")
        screen.line(place, screen.text(f"  {conflict.kind.value}", style="red"), indent=2)
        screen.paragraph(conflict.detail, 4)
        for hunk in conflict.hunks[:_MOST_HUNKS]:
            screen.hunk(hunk)
    screen.reasons(_reasons(outcome), 2)


def error_json(error: ForkmanError) -> str:
    """An error as JSON: what, kept, todo, and the exit code."""
    fields = {"what": error.what, "kept": error.kept, "todo": error.todo}
    return json.dumps({"version": 1, "error": {**fields, "exit_code": int(error.exit_code)}})


def error_markdown(error: ForkmanError) -> str:
    """An error for a CI job's summary."""
    words = (error.what, error.kept, error.todo)
    return "\n\n".join(_html(_Prose(text)) for text in words if text) + "\n"


def show_error(error: ForkmanError, console: Console) -> None:
    """Print what happened, what is still as it was, and what to do now."""
    screen = _Screen(console)
    what, *more = _paragraph(error.what) or [("forkman failed.",)]
    screen.line(screen.text("✗ ", style="red"), screen.text(*what, style="bold"))
    for sentence in more:
        screen.line(screen.text(*sentence), indent=2)
    for paragraph in filter(None, (error.kept, error.todo)):
        console.print()
        screen.paragraph(paragraph, 2)


class _Screen:
    """A console, and how lines get onto it."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def text(self, *sentence: str | _Code | _Prose, style: str = "") -> Text:
        """A sentence in characters this console can show."""
        said = "".join(part if isinstance(part, str) else visible(part.text) for part in sentence)
        if not self.console.encoding.startswith("utf"):
            said = said.translate(_ASCII)
            said = said.encode(self.console.encoding, "backslashreplace").decode(
                self.console.encoding
            )
        return Text(said, style)

    def line(self, *texts: Text, indent: int = 0) -> None:
        """Print `texts` as a line; on a terminal, lines it is wrapped to are indented by 2 more."""
        text = Text.assemble(*texts)
        pieces: Iterable[Text] = (text,)
        if self.console.is_terminal:
            pieces = text.wrap(self.console, max(10, self.console.width - indent - 2))
        for number, piece in enumerate(pieces):
            start = " " * (indent + (2 if number else 0))
            self.console.print(Text.assemble(start, piece), soft_wrap=True)

    def summary(self, forks: Sequence[ForkReport]) -> None:
        rows = [self._cells(fork) for fork in forks]
        table = Table.grid(padding=(0, 2, 0, 0))
        for row in rows:
            table.add_row(*row)
        wide = self.console.options.update(width=10_000)
        if Measurement.get(self.console, wide, table).maximum <= self.console.width:
            self.console.print(table)
            return
        widest = max((name.cell_len for name, *_ in rows), default=0)
        for name, pins, how, counts in rows:
            name.pad_right(min(widest, 24) - name.cell_len)
            self.line(name, Text("  "), pins)
            self.line(how, Text("  "), counts, indent=4)

    def _cells(self, fork: ForkReport) -> tuple[Text, Text, Text, Text]:
        mark, style = _mark(fork)
        name = Text.assemble(
            self.text(f"{mark} ", style=style), self.text(_Code(fork.fork), style="bold")
        )
        counts = Text("  ").join(self.text(words, style=style) for words, style in _counts(fork))
        return name, self.text(*_pins(fork)), self.text(*_how(fork)), counts

    def fork(self, fork: ForkReport) -> None:
        """Print what else there is to know of a fork than its conflicts."""
        listed = [o for o in fork.outcomes if o.status is not Status.CONFLICT and not _plain(o)]
        found = list(_audited(fork.audit)) if fork.audit else []
        if not (listed or fork.notes or _problem(fork) or found):
            return
        self.console.print()
        self.console.print(self.text(_Code(fork.fork), style="bold"), soft_wrap=True)
        names = [self.text(_Code(outcome.change)) for outcome in listed]
        widest = min(40, max((name.cell_len for name in names), default=0))
        for outcome, name in zip(listed, names, strict=True):
            mark, style = _MARKS[outcome.status]
            name.pad_right(widest - name.cell_len)
            status = self.text(f"  {outcome.status.value}  ", style=style)
            subject = self.text(_Code(outcome.subject), style="dim")
            self.line(self.text(f"{mark} ", style=style), name, status, subject, indent=2)
            self.reasons(_reasons(outcome), 6)
        self.reasons(found, 2)
        for note in fork.notes:
            self.paragraph(note, 2)
        if _problem(fork):
            self.paragraph(_problem(fork), 2, "yellow")
            self.paragraph(fork.todo, 2)

    def conflict(self, fork: ForkReport, outcome: Outcome) -> None:
        head = [
            self.text("✗ ", style="red"),
            self.text(_Code(fork.fork), style="bold"),
            self.text("  ", _Code(outcome.change)),
        ]
        subject = self.text(_Code(outcome.subject), style="dim")
        if not outcome.conflicts:
            self.console.print()
            self.line(*head, self.text("  conflict", style="red"))
            self.line(subject, indent=4)
        for number, conflict in enumerate(outcome.conflicts):
            self.console.print()
            place = self.text("  ", _Code(_place(conflict)), style="bold")
            self.line(*head, place, self.text(f"  {conflict.kind.value}", style="red"))
            if not number:
                self.line(subject, indent=4)
            for hunk in conflict.hunks[:_MOST_HUNKS]:
                if hunk is not conflict.hunks[0]:
                    self.console.print()
                self.hunk(hunk)
            if more := conflict.hunks[_MOST_HUNKS:]:
                self.line(self.text(_more_hunks(more)), indent=4)
            if not conflict.hunks:
                self.paragraph(conflict.detail, 4)
            self.reasons(_about(fork, conflict), 4)
        self.reasons(_reasons(outcome), 4)

    def hunk(self, hunk: Hunk) -> None:
        """Print the sides of a conflict beside each other where there is room, else stacked."""
        sides = _sides(hunk)
        width = self.console.width
        beside = 1 if width < _TWO_COLUMNS else 2 if width < _THREE_COLUMNS else len(sides)
        digits = len(str(max(line.number or 0 for line in sides[0].lines)))
        for group in (sides[:beside], *([side] for side in sides[beside:])):
            self._columns(group, digits)

    def _columns(self, sides: Sequence[_Side], digits: int) -> None:
        bar = self.text(" │ ", style="dim")
        room = max(10, (self.console.width - 4 - digits) // len(sides) - bar.cell_len)
        numbers: list[str] = []
        columns: list[list[Text]] = []
        for side in sides:
            column = [self.text(side.title, style="bold")]
            numbered = [""]
            for line in side.lines:
                code = self.text(_Code(line.text), style="" if line.new else "dim")
                pieces = [code]
                if self.console.is_terminal or len(sides) > 1:
                    pieces = [Text(piece, code.style) for piece in chop_cells(code.plain, room)]
                column += pieces
                numbered += [str(line.number or ""), *[""] * (len(pieces) - 1)]
            columns.append(column)
            numbers = numbers or numbered
        widths = [max(cell.cell_len for cell in column) for column in columns[:-1]] + [0]
        rows = zip_longest(*columns, fillvalue=Text())
        for number, cells in zip(chain(numbers, repeat("")), rows):  # noqa: B905 - endless
            row = Text.assemble((f"    {number:>{digits}}", "dim"))
            for cell, width in zip(cells, widths, strict=True):
                row.append_text(bar).append_text(cell)
                row.pad_right(width - cell.cell_len)
            self.console.print(row, soft_wrap=True)

    def reasons(self, reasons: Iterable[tuple[int, _Sentence]], indent: int) -> None:
        for depth, sentence in reasons:
            self.line(self.text(*sentence), indent=indent + 2 * depth)

    def paragraph(self, text: str, indent: int, style: str = "") -> None:
        for sentence in _paragraph(text):
            self.line(self.text(*sentence, style=style), indent=indent)

    def end(self, report: Report) -> None:
        """Print what became of it all, and last what to do now."""
        self.console.print()
        for note in report.notes:
            self.paragraph(note, 0)
        self.line(self.text(*_verdict(report), style="bold"))
        for title, paths in _changed(report):
            self.line(self.text(title))
            for path in paths[:_MOST_PATHS]:
                self.console.print(self.text("  ", _Code(path)), soft_wrap=True)
            if more := paths[_MOST_PATHS:]:
                self.line(self.text(f"and {len(more)} more"), indent=2)
        why, commands = _next(report)
        if commands:
            self.line(self.text(why))
        for line in commands:
            words = "  then  ".join(line)
            self.console.print(self.text("  ", _Code(words), style="bold"), soft_wrap=True)


# Markdown


def markdown(report: Report) -> str:
    """`report` for a step summary of GitHub Actions: a table of the forks, then the details.

    Where it would grow above what GitHub shows, it says how many parts are left out.
    """
    made, size = [], 0
    parts = [part for part in _parts(report) if part]
    for part in parts:
        size += len(part.encode()) + 1
        if size > _SUMMARY_LIMIT:
            break
        made.append(part)
    if len(made) < len(parts):
        made.append(
            f"**{len(parts) - len(made)} of {len(parts)} parts of this report are left out:** "
            "GitHub shows 1 MiB at most. `--json` has everything.\n"
        )
    return "\n".join(made)


def _parts(report: Report) -> Iterator[str]:
    """The blocks of the summary, each complete in itself, the most important ones first."""
    yield f"## {_html('forkman ', _Code(report.command))}\n"
    yield f"**{_html(*_verdict(report))}**\n"
    yield from (_items(_paragraph(note)) for note in report.notes)
    rows = ["| | fork | pin | why | changes |", "| --- | --- | --- | --- | --- |"]
    for fork in report.forks:
        counts = ", ".join(words for words, _ in _counts(fork))
        cells = (_mark(fork)[0], _html(_Code(fork.fork)), _html(*_pins(fork)), _html(*_how(fork)))
        rows.append(f"| {' | '.join((*cells, counts))} |")
    yield "\n".join(rows) + "\n"
    why, commands = _next(report)
    if commands:
        yield f"{why}\n\n{_fence([command for line in commands for command in line], 'sh')}"
    for fork in report.forks:
        if _problem(fork):
            said = _paragraph(_problem(fork)) + _paragraph(fork.todo)
            yield f"### ! {_html(_Code(fork.fork))}\n\n{_items(said)}"
    for fork in report.forks:
        for outcome in fork.conflicts:
            yield from _conflict_parts(fork, outcome)
    for fork in report.forks:
        if fork.audit and (found := _tree(_audited(fork.audit))):
            mark = "✗ " if fork.findings else ""
            yield f"### {mark}{_html(_Code(fork.fork), ' audit')}\n\n{found}"
    for fork in report.forks:
        yield from _fork_parts(fork)
    for title, paths in _changed(report):
        items = _items([(_Code(path),) for path in paths])
        yield _details(f"{title} {_count(len(paths), 'file')}", items)


def _conflict_parts(fork: ForkReport, outcome: Outcome) -> Iterator[str]:
    yield f"### ✗ {_html(_Code(fork.fork), ' ', _Code(outcome.change))}\n"
    yield f"{_html(_Code(outcome.subject))}\n"
    for conflict in outcome.conflicts:
        yield f"{_html(_Code(_place(conflict)), ' ', conflict.kind.value)}\n"
        suffix = visible(conflict.path).rpartition(".")[2]
        language = suffix if suffix in _LANGUAGES else ""  # others may be drawn: mermaid, stl
        for hunk in conflict.hunks[:_MOST_HUNKS]:
            for side in _sides(hunk):
                where = f", from line {hunk.line}" if side.title == "upstream now" else ""
                code = _fence([visible(line.text) for line in side.lines], language)
                yield f"{side.title}{where}\n\n{code}"
        if more := conflict.hunks[_MOST_HUNKS:]:
            yield f"{_more_hunks(more)}\n"
        if conflict.detail and not conflict.hunks:
            yield _items(_paragraph(conflict.detail))
        yield _tree(_about(fork, conflict))
    yield _tree(_reasons(outcome))


def _fork_parts(fork: ForkReport) -> Iterator[str]:
    listed = [o for o in fork.outcomes if o.status is not Status.CONFLICT and not _plain(o)]
    items = ""
    for outcome in listed:
        said = _html(_Code(outcome.change), f" {outcome.status.value} ", _Code(outcome.subject))
        items += f"- {said}\n{_tree(_reasons(outcome), 1)}"
    items += "".join(_items(_paragraph(note)) for note in fork.notes)
    if items:
        about = _html(_Code(fork.fork)) + f": {_count(len(listed), 'change')} not plainly applied"
        yield _details(about if listed else _html(_Code(fork.fork), ": notes"), items)


def _html(*sentence: str | _Code | _Prose) -> str:
    """A sentence that means itself in Markdown, in a table's cell and in HTML alike."""
    made = ""
    for part in sentence:
        if isinstance(part, str):
            made += part
        elif isinstance(part, _Code):
            made += f"<code>{_escaped(visible(part.text))}</code>"
        else:
            # GitHub makes links of @name and #1 after Markdown is done, though not of a lone @
            said = _escaped(visible(part.text).strip())
            made += re.sub("&#(?:64|35);", r"<code>\g<0></code>", said)
    return made


def _escaped(text: str) -> str:
    # html.escape leaves Markdown's own characters; as references they are never markup (CommonMark)
    return re.sub(r"[!-.:-@\[-`{-~]", lambda found: f"&#{ord(found[0])};", text)


def _items(sentences: Iterable[_Sentence]) -> str:
    return _tree((0, sentence) for sentence in sentences)


def _tree(sentences: Iterable[tuple[int, _Sentence]], depth: int = 0) -> str:
    """A nested list, from its sentences and their depths."""
    return "".join(f"{'  ' * (depth + at)}- {_html(*said)}\n" for at, said in sentences)


def _fence(lines: Sequence[str], language: str = "") -> str:
    """Code in a fence longer than any it contains."""
    runs = (len(run) for line in lines for run in re.findall("`+", line))
    fence = "`" * max(3, 1 + max(runs, default=0))
    return "\n".join((fence + language, *lines, fence)) + "\n"


def _details(title: str, body: str) -> str:
    return f"<details><summary>{title}</summary>\n\n{body}\n</details>\n"


# Progress


@contextmanager
def progress(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    """Show how far long work is: bars on a terminal, now and then a line elsewhere.

    Yields `task(text, done, total)`, to be called whenever there is news, from any thread: `text`
    names the task, `done` of `total` is how far it is, in any unit; total 0: nobody knows.
    """
    with (_bars if console.is_interactive else _log)(console) as task:
        lock = threading.Lock()

        def locked(text: str, done: int, total: int) -> None:
            with lock:
                task(text, done, total)

        yield locked


@contextmanager
def _bars(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    from rich.progress import (  # 20 ms that a report without progress need not wait
        BarColumn,
        Progress,
        TaskID,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
    )
    from rich.table import Column

    screen = _Screen(console)
    ids: dict[str, TaskID] = {}
    with Progress(
        TextColumn("{task.description}", markup=False, table_column=Column(overflow="fold")),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    ) as bars:

        def task(text: str, done: int, total: int) -> None:
            if text not in ids:
                ids[text] = bars.add_task(screen.text(_Prose(text)).plain, total=None)
            ended = 0 < total <= done
            bars.update(ids[text], completed=done, total=total or None, visible=not ended)

        yield task


@contextmanager
def _log(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    screen = _Screen(console)
    going: dict[str, str] = {}  # tasks that have not ended: what there is to tell of each
    ended: set[str] = set()
    told = time.monotonic()

    def task(text: str, done: int, total: int) -> None:
        nonlocal told
        how_far = f": {done * 100 // total}%" if total else f": {done}" if done else ""
        if 0 < total <= done:
            going.pop(text, None)
            if text in ended:
                return
            ended.add(text)
        else:
            going[text] = how_far
            ended.discard(text)
            if time.monotonic() - told < _SECONDS_BETWEEN_LINES:
                return
        told = time.monotonic()
        screen.line(screen.text(_Prose(text), how_far))

    try:
        yield task
    finally:
        for text, how_far in going.items():
            screen.line(screen.text(_Prose(text), how_far))
