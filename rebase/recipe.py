r'''Recipes: changes that say which *code* to change, and find it again after upstream moved it.

A recipe is a Python file in `forks/<fork>/` that sets `recipe`. It imports nothing but this module
and the standard library. This one is complete:

    """Answer the health check from our own runtime."""

    from rebase.recipe import Code, Recipe, Rule, add_import, insert_before

    recipe = Recipe(
        subject="Ask slime_npu for the device's health",
        by="NPU forks <npu-forks@example.com>",
        date="2026-08-01T00:00:00+00:00",
        why="On NPU upstream's check always answers that the device is healthy.",
        how="One conditional before the answer; without an NPU upstream's answer stands.",
        upstream="https://github.com/example/project/pull/12",
        until="The pull request is in the oldest release we follow.",
        rules=(
            Rule(
                find=Code("return HEALTHY", inside="Device.health"),
                edit=(
                    insert_before("if is_npu():\n    return slime_npu.health()"),
                    add_import("import slime_npu"),
                    add_import("from slime_npu.device import is_npu"),
                ),
                expect=("project/device.py",),
                upstream=Code("npu_health($$$)", inside="Device.health"),
                needed=Code({"kind": "class_definition"}, inside="Device"),
            ),
        ),
    )

**Find.** `Code` is an ast-grep pattern, or one of its rules as a mapping
(https://ast-grep.github.io/guide/rule-config.html); `$NAME` matches one node, `$$$NAME` several.
Layout, comments and trailing commas do not matter; the quotes of a string do. `inside` names a
definition, dotted. `where` is a file, a folder (it ends in a slash) or, left out, the whole tree.
`Text` finds an anchor in shell and other files; white space in it matches any white space.

**Edit.** `insert_before`, `insert_after` (whole statements, or lines of text), `replace`,
`add_argument`, `add_parameter`, `add_entry`, `add_import`, `remove_decorator`. What they write is
given with four spaces a level and gets the indentation and line ends of its new place; `$NAME`
stands for what the pattern caught. An edit is a function from a `Place` to `Splice`s, so where
these do not do, a recipe defines its own, calls these in it, looks at `place.node` (an ast-grep
`SgNode`), and raises `Lost` where the code is not what it was written for. `AddFile` adds a file.

**Expect.** Each place has a name, `path:Outer.inner`, after the definitions around it. `expect` has
one glob for each place that must be there (`path` alone stands for `path:*`), `known` those that
only some revisions have. A rule then ends as one of:
- *applied*: as many places as expected were changed. Matches under other names are changed too and
  reported as new; one for each expected name that is gone counts as moved.
- *already upstream*: the edit is there, or in the same definition something matches `upstream`.
- *not needed*: nothing in the tree matches `needed`, the rule's own guard.
- *conflict*: there are fewer places than expected. The nearest code in the whole tree is named.
A report names the upstream commits that left nothing to do, where they came since the old pin.
A recipe with several rules is in conflict if one is, else applied if one is, and so on. Rules all
see upstream's tree, not each other's work. What an edit leaves alone stays byte for byte.

**Why ast-grep.** On SGLang 0.5.9 (1,404 Python files, 19.8 MB, read in 0.03 s) ast-grep parses and
matches everything in 1.9 s, and in 0.03 s once files without the pattern's words are passed over.
LibCST needs 3.5 s for 60 of them, and 0.5 s for the one of 141 kB that ast-grep does in 0.02 s; its
patterns are matcher trees written in Python instead of the code itself, and it refuses a file whose
syntax is newer than its release. Both keep every byte.
'''

import ast
import re
import sys
import textwrap
import traceback
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from dataclasses import replace as _with
from datetime import datetime
from difflib import SequenceMatcher
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from rebase.errors import ForkmanError, UsageError
from rebase.outcome import Conflict, Hunk, Kind, Status

if TYPE_CHECKING:
    from ast_grep_py import SgNode

__all__ = [
    "AddFile", "Code", "Edit", "Lost", "NewFile", "Place", "Recipe", "Result", "Rule", "Splice",
    "Text", "Tree", "add_argument", "add_entry", "add_import", "add_parameter", "holders",
    "insert_after", "insert_before", "load", "remove_decorator", "replace",
]  # fmt: skip


# -- what a recipe is run on, and what comes of it -------------------------------------------------


class Tree(Protocol):
    """The regular files of an upstream tree, without symbolic links and submodules."""

    def paths(self, under: bytes = b"") -> Iterable[bytes]:
        """Every path that starts with `under`."""

    def read(self, path: bytes) -> bytes | None:
        """A file's content, None where there is no such file."""

    def grep(self, literal: bytes, paths: Iterable[bytes]) -> Iterable[bytes]:
        """Of `paths`, those whose content holds `literal`; only they are read."""


@dataclass(frozen=True)
class NewFile:
    """A file that upstream does not have."""

    content: bytes
    executable: bool = False


@dataclass(frozen=True)
class Result:
    """What a recipe did to a tree.

    edits: path → its new content (the mode stays), or a file to add. In a conflict they are the
    edits that could be made: what a person resolving it starts from.
    places: where it edits, `path:line` in upstream's file; new_places: those nobody had expected.
    already: where upstream has it: path, first line, last line.
    unneeded: the guards that found nothing.
    note: what a maintainer must know besides: what upstream has, or the guard that found nothing.
    """

    status: Status
    edits: Mapping[bytes, bytes | NewFile] = field(default_factory=dict)
    places: tuple[str, ...] = ()
    new_places: tuple[str, ...] = ()
    already: tuple[tuple[bytes, int, int], ...] = ()
    unneeded: tuple["Find", ...] = ()
    conflicts: tuple[Conflict, ...] = ()
    note: str = ""


# -- what to look for ------------------------------------------------------------------------------

_METAVARIABLE = re.compile(r"\$\$\$[A-Z0-9_]*|\$[A-Z_][A-Z0-9_]*")
_WORD = re.compile(r"[^\W\d]\w{2,}")
_DOTTED = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)+")
_BETWEEN = rb"(?:\s|\\|#[^\n]*)*\.(?:\s|\\|#[^\n]*)*"  # what may stand around a dot


@dataclass(frozen=True)
class Code:
    """Python code to look for.

    match: an ast-grep pattern, or a mapping that is an ast-grep rule.
    inside: the definition it must be in (or be), by its dotted name or the end of it.
    where: a file, a folder with its slash, or "" for the whole tree.
    """

    match: str | Mapping[str, Any]
    inside: str = ""
    where: str = ""

    def __str__(self) -> str:
        shown = " ".join(_patterns(self.match))
        if not shown and isinstance(self.match, Mapping):
            shown = ", ".join(f"{key}: {value}" for key, value in self.match.items())
        return f"`{' '.join(shown.split())}`" + (f" in {self.inside}" if self.inside else "")

    def may_be_in(self, path: bytes) -> bool:
        """Whether a file of this name can have a match."""
        return path.endswith((b".py", b".pyi"))

    @property
    def probe(self) -> str:
        """Text that looks like what is sought."""
        return _METAVARIABLE.sub("", " ".join(_patterns(self.match)))

    @property
    def words(self) -> list[str]:
        """Words that every file with a match must hold, the longest first."""
        return _words(f"{self.probe} {self.inside}")

    def may_match(self, content: bytes) -> bool:
        """Whether a file of this content can have a match: it holds the words and dotted names."""
        return all(word.encode() in content for word in self.words) and all(
            re.search(_BETWEEN.join(name.encode().split(b".")), content)
            for name in _DOTTED.findall(self.probe)
        )

    def places(self, source: "Source") -> Iterator["Place"]:
        """Every match in a file, in order. Raises ValueError where ast-grep refuses `match`."""
        rule: Any = {"pattern": self.match} if isinstance(self.match, str) else dict(self.match)
        try:
            nodes = source.root.find_all({"rule": rule})
        except Exception as error:
            said = str(error).partition("\n\nStack backtrace")[0].split("\n")[-1]
            raise _Unusable(f"ast-grep cannot use {self}: {said.strip()}") from None
        for node in nodes:
            place = source.place(node)
            if not self.inside or f".{self.inside}." in f".{place.scope}.":
                yield place


@dataclass(frozen=True)
class Text:
    """Text to look for in a file of any kind; white space in `anchor` stands for any white space.

    where: as in `Code`.
    """

    anchor: str
    where: str = ""

    def __str__(self) -> str:
        return f"`{' '.join(self.anchor.split())}`"

    def may_be_in(self, path: bytes) -> bool:
        """Whether a file of this name can have a match: any can."""
        return True

    @property
    def probe(self) -> str:
        return self.anchor

    @property
    def words(self) -> list[str]:
        return _words(self.anchor)

    def may_match(self, content: bytes) -> bool:
        """Whether a file of this content can have a match: it holds the words."""
        return all(word.encode() in content for word in self.words)

    def places(self, source: "Source") -> Iterator["Place"]:
        """Every match in a file, in order."""
        pattern = r"\s+".join(map(re.escape, self.anchor.split()))
        for match in re.finditer(pattern, source.text):
            yield Place(source, match.start(), match.end())


Find = Code | Text


def _patterns(rule: object) -> Iterator[str]:
    """The patterns that a match of an ast-grep rule must hold (so none below `any` or `not`)."""
    if isinstance(rule, str):
        yield rule
    elif isinstance(rule, Mapping):
        for key in ("pattern", "context", "has", "inside", "follows", "precedes", "all"):
            # a bare string below one of the others is no pattern
            if key in rule and (key in ("pattern", "context") or not isinstance(rule[key], str)):
                yield from _patterns(rule[key])
    elif isinstance(rule, Iterable):
        for part in rule:
            yield from _patterns(part)


def _words(text: str) -> list[str]:
    return sorted(set(_WORD.findall(text)), key=lambda word: (-len(word), word))


# -- places and edits ------------------------------------------------------------------------------


class Lost(Exception):
    """Raised by an edit where the code is not what it was written for; becomes a conflict."""


class _Unusable(ValueError):
    """What a recipe declares cannot be used; nothing of its own code need be running."""


class Splice(NamedTuple):
    """One edit of a file's text: `text[start:end]` becomes `new`."""

    start: int
    end: int
    new: str


class Source:
    """One file as it is read: its bytes, their text, and where definitions begin."""

    def __init__(self, path: bytes, content: bytes) -> None:
        self.path = path
        self.content = content
        # Latin-1 keeps any bytes, so a file in another encoding comes back as it was.
        try:
            self.encoding, self.text = "utf-8", content.decode("utf-8")
        except UnicodeDecodeError:
            self.encoding, self.text = "latin-1", content.decode("latin-1")

    @cached_property
    def root(self) -> "SgNode":
        from ast_grep_py import SgRoot  # 20 ms, and most runs of forkman parse nothing

        return SgRoot(self.text, "python").root()

    @cached_property
    def indent(self) -> str:
        """One level of indentation."""
        if self.path.endswith((b".py", b".pyi")):
            for block in self.root.find_all(kind="block"):
                at, parent = _span(block)[0], block.parent()
                inner = self.margin(at)
                outer = self.margin(_span(parent)[0]) if parent else ""
                if inner.startswith(outer) and inner != outer:
                    return inner[len(outer) :]
        elif re.search(r"^\t", self.text, re.M) and not re.search(r"^    ", self.text, re.M):
            return "\t"
        return "    "

    def margin(self, at: int) -> str:
        """The white space that the line of position `at` begins with."""
        found = re.match(r"\ufeff?([ \t\f]*)", self.text[self.line_start(at) :][:1000])
        return found[1] if found else ""

    def place(self, node: "SgNode") -> "Place":
        """The place that a node of this file is."""
        names = [
            name.text()
            for around in (node, *node.ancestors())
            if around.kind() in ("function_definition", "class_definition")
            and (name := around.field("name"))
        ]
        if node.kind() == "decorated_definition" and (inner := node.field("definition")):
            names[:0] = [name.text()] if (name := inner.field("name")) else []
        span = node.range()
        return Place(self, span.start.index, span.end.index, node, ".".join(reversed(names)))

    def line(self, at: int) -> int:
        """The number of the line that holds position `at`, from 1."""
        return self.text.count("\n", 0, at) + 1

    def line_start(self, at: int) -> int:
        """Where the line of position `at` begins."""
        return self.text.rfind("\n", 0, at) + 1

    def line_end(self, at: int) -> int:
        """Where the line of position `at` ends, before its line end."""
        end = self.text.find("\n", at)
        if end < 0:
            return len(self.text)
        return end - 1 if end > at and self.text[end - 1] == "\r" else end

    def newline(self, at: int) -> str:
        """The line end used at position `at`; on a last line without one, the file's first."""
        end = self.text.find("\n", at)
        if end < 0:
            end = self.text.find("\n")
        return "\r\n" if end > 0 and self.text[end - 1] == "\r" else "\n"

    def spliced(self, splices: Iterable[Splice]) -> bytes:
        """The file's bytes with the splices made. Raises Lost where they overlap."""
        parts, at = [], 0
        for start, end, new in sorted(dict.fromkeys(splices), key=lambda splice: splice[:2]):
            if start < at:
                raise Lost(f"two edits overlap in line {self.line(start)}")
            new = new.replace("\r\n", "\n").replace("\n", self.newline(start))
            parts += [self.text[at:start], new]
            at = end
        text = "".join((*parts, self.text[at:]))
        try:
            return text.encode(self.encoding)
        except UnicodeEncodeError as error:
            what = error.object[error.start : error.end]
            raise Lost(f"the file is not UTF-8 and cannot hold {what!r}") from None


@dataclass(frozen=True, eq=False)
class Place:
    """A match.

    start, end: where it is in `source.text`. node: its node, None for `Text`.
    scope: the dotted names of the definitions it is in, itself among them; "" at module level.
    """

    source: Source
    start: int
    end: int
    node: "SgNode | None" = None
    scope: str = ""

    def __str__(self) -> str:
        return f"{_shown(self.source.path)}:{self.source.line(self.start)}"

    @property
    def name(self) -> str:
        return f"{_shown(self.source.path)}:{self.scope}"

    @property
    def text(self) -> str:
        return self.source.text[self.start : self.end]

    @property
    def code(self) -> "SgNode":
        """The node. Raises Lost where the place was found as text."""
        if self.node is None:
            raise Lost("this edit needs a place found as Code")
        return self.node

    def lines(self) -> tuple[int, int]:
        """Where the lines of the statement, or of the text, begin and end (before the line end).

        Raises Lost where another statement shares one of these lines.
        """
        source, start, end = self.source, self.start, self.end
        if self.node is not None:
            start, end = _span(_statement(self.node))
        first, last = source.line_start(start), source.line_end(end)
        if self.node is not None:
            before = source.text[first:start].strip("\ufeff \t\f")
            after = source.text[end:last].strip()
            if before or (after and not after.startswith("#")):
                raise Lost(f"the statement in line {source.line(start)} shares its line")
        return first, last

    def fit(self, code: str) -> str:
        """`code` with `$NAME` filled in, indented as the statement here is."""
        first, _ = self.lines()
        return _indented(self.fill(code), self.source.margin(first), self.source.indent)

    def fill(self, template: str) -> str:
        """`template` with what the pattern caught in place of `$NAME` and `$$$NAME`."""
        if self.node is None:
            return template
        return _METAVARIABLE.sub(self._caught, template)

    def _caught(self, variable: re.Match[str]) -> str:
        name = variable[0].lstrip("$")
        if variable[0].startswith("$$$"):
            nodes = self.code.get_multiple_matches(name)
        else:
            nodes = [node] if (node := self.code.get_match(name)) else []
        if not nodes and not variable[0].startswith("$$$"):
            raise _Unusable(f"the pattern has no {variable[0]} to fill in")
        if not nodes:
            return ""
        return self.source.text[_span(nodes[0])[0] : _span(nodes[-1])[1]]


Edit = Callable[[Place], Iterable[Splice]]


def insert_before(code: str) -> Edit:
    """Lines of `code` before the statement (or the lines of text) found."""

    def edit(place: Place) -> Iterator[Splice]:
        start, _ = place.lines()
        start += place.source.text.startswith("\ufeff", start)
        block = place.fit(code)
        if not _adjoins(place.source.text[:start].split("\n")[::-1], _lines(block)[::-1]):
            yield Splice(start, start, block + "\n")

    return edit


def insert_after(code: str) -> Edit:
    """Lines of `code` after the statement (or the lines of text) found."""

    def edit(place: Place) -> Iterator[Splice]:
        _, end = place.lines()
        block = place.fit(code)
        if not _adjoins(place.source.text[end:].split("\n"), _lines(block)):
            yield Splice(end, end, "\n" + block)

    return edit


def replace(code: str) -> Edit:
    """`code` instead of what was found."""

    def edit(place: Place) -> Iterator[Splice]:
        source = place.source
        new = _indented(place.fill(code), source.margin(place.start), source.indent).lstrip()
        old, around = place.text, [place.text]
        if old in new:  # then it is found again in what was written
            lead = new.index(old)
            start = place.start - lead
            around.append(source.text[max(start, 0) : start + len(new)])
        if place.node is not None:
            around += [node.text() for node in place.node.ancestors()[:8]]
        if _squeezed(new) not in map(_squeezed, around):
            yield Splice(place.start, place.end, new)

    return edit


def add_argument(argument: str) -> Edit:
    """One more argument, positional or `name=value`, for the call found."""

    def edit(place: Place) -> Iterator[Splice]:
        call = place.code
        if call.kind() == "decorator":
            call = call.named_children()[0]
        arguments = call.field("arguments")
        if arguments is None or arguments.kind() != "argument_list":
            raise Lost(f"`{_squeezed(call.text())}` is no call that takes another argument")
        yield from _append(place.source, arguments, place.fill(argument))

    return edit


def add_parameter(parameter: str) -> Edit:
    """One more parameter for the function found, before its `**kwargs` if it has them."""

    def edit(place: Place) -> Iterator[Splice]:
        function = _definition(place.code)
        parameters = function.field("parameters")
        if parameters is None:
            raise Lost(f"`{_squeezed(function.text())[:60]}` takes no parameters")
        new = place.fill(parameter)
        name = re.split(r"[:=\s]", new, maxsplit=1)[0]
        for old in parameters.named_children():
            if re.split(r"[:=\s]", old.text(), maxsplit=1)[0] == name:
                if _squeezed(old.text()) == _squeezed(new):
                    return
                raise Lost(f"there is a parameter `{_squeezed(old.text())}` already")
            if old.kind() == "dictionary_splat_pattern":
                start = _span(old)[0]
                yield Splice(start, start, f"{new}, ")
                return
        yield from _append(place.source, parameters, new)

    return edit


def add_entry(entry: str) -> Edit:
    """One more entry for the set, dict, list or tuple found; for a dict, `key: value`."""

    def edit(place: Place) -> Iterator[Splice]:
        node = place.code
        kinds = ("set", "dictionary", "list", "tuple")
        if node.kind() == "assignment" and (right := node.field("right")):
            node = right
        if node.kind() not in kinds:
            raise Lost(f"`{_squeezed(node.text())[:60]}` is none of {', '.join(kinds)}")
        yield from _append(place.source, node, place.fill(entry))

    return edit


def remove_decorator(name: str) -> Edit:
    """Without the decorator `@name` or `@name(…)` on the definition found."""

    def edit(place: Place) -> Iterator[Splice]:
        around = _definition(place.code).parent()
        for node in around.children() if around else ():
            if node.kind() != "decorator":
                continue
            what = node.named_children()[0]
            function = what.field("function") if what.kind() == "call" else what
            if function and function.text() == name:
                start, end = _span(node)
                end = place.source.line_end(end)
                yield Splice(place.source.line_start(start), _next_line(place.source, end), "")

    return edit


def add_import(statement: str, otherwise: str = "") -> Edit:
    """An import at module level, after the imports before the place found.

    otherwise: statements for a host without that module; the import then stands in a `try`.
    """
    wanted = _imported(statement)

    def edit(place: Place) -> Iterator[Splice]:
        source = place.source
        clash, missing = "", set(wanted)
        for node in _top_level(source.root):
            for bound, origin in _bound(node).items():
                if wanted.get(bound) == origin:
                    missing.discard(bound)
                elif bound in wanted:
                    clash = f"`{bound}` is another thing in line {source.line(_span(node)[0])}"
        if not missing:
            return
        if clash:
            raise Lost(clash)
        at, lead, tail = _import_point(source, place.start)
        block = statement
        if otherwise:
            body = _indented(otherwise, source.indent, source.indent)
            block = f"try:\n{source.indent}{statement}\nexcept ModuleNotFoundError:\n{body}"
            lead = lead and "\n\n"
            if lead and source.text[_next_line(source, at) :].lstrip(" \t\r")[:1] not in ("\n", ""):
                tail = "\n"
        yield Splice(at, at, f"{lead}{block}{tail}")

    return edit


# -- rules -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """One kind of place, and what to do there.

    edit: an edit, or several to make together.
    expect: a glob over `path:scope` for each place that must be there; known: for those that only
    some revisions have.
    upstream: what upstream's own answer looks like; a place is done where its definition holds it.
    needed: the guard: without a match of it anywhere, there is nothing to do.
    """

    find: Find
    edit: Edit | tuple[Edit, ...]
    expect: tuple[str, ...]
    known: tuple[str, ...] = ()
    upstream: Find | None = None
    needed: Find | None = None

    def __post_init__(self) -> None:
        if isinstance(self.expect, str) or not self.expect:
            raise ValueError("expect is a tuple with at least one place, as ('path', )")
        if isinstance(self.known, str):
            raise ValueError("known is a tuple of places, as ('path', )")
        if self.edit == ():
            raise ValueError("edit is empty")
        for find in (self.find, self.upstream, self.needed):
            if find and not (find.match if isinstance(find, Code) else find.anchor.strip()):
                raise ValueError(f"{type(find).__name__} has nothing to look for")

    def splices(self, place: Place) -> Iterator[Splice]:
        """What the edits make of a place. Raises Lost where one of them cannot."""
        for edit in self.edit if isinstance(self.edit, tuple) else (self.edit,):
            made = edit(place)
            if made is None:
                raise _Unusable(f"the edit {getattr(edit, '__name__', edit)} returns no splices")
            yield from made

    def knows(self, place: Place) -> bool:
        """Whether `place` is one that only some revisions have."""
        return any(_names(glob, place) for glob in self.known)


@dataclass(frozen=True)
class AddFile:
    """A file to add. `needed` is a guard as in `Rule`."""

    path: str
    content: str
    executable: bool = False
    needed: Find | None = None

    def __post_init__(self) -> None:
        parts = self.path.split("/")
        if any(part in ("", ".", "..") or part.lower() == ".git" for part in parts) or re.search(
            r"[\\\x00-\x1f\x7f]", self.path
        ):
            raise ValueError(f"{self.path!r} is no path below the top of a repository")


@dataclass(frozen=True)
class Recipe:
    """One change: one commit, the same on every machine.

    subject, why, how, upstream, until: its message; `upstream` is the pull request there if there
    is one, `until` says when the recipe can go.
    by: `Name <email>`; date: ISO 8601 with its offset.
    rules: what it does, in order.
    Raises ValueError where one of them is no such thing.
    """

    subject: str
    by: str
    date: str
    why: str
    how: str
    until: str
    rules: tuple[Rule | AddFile, ...]
    upstream: str = ""
    file: str = field(default="", repr=False, compare=False)  # set by load

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[^\x00-\x1f\x7f]+", self.subject) or not self.subject.strip():
            raise ValueError("subject is one line of text")
        if not re.fullmatch(r"[^<>\x00-\x1f]*[^<>\x00-\x20] <[^<>\x00-\x20]*>", self.by):
            raise ValueError(f"by is `Name <email>`, not {self.by!r}")
        if datetime.fromisoformat(self.date).utcoffset() is None:
            raise ValueError(f"date needs its offset from UTC, as in {self.date}+00:00")
        for name in ("why", "how", "until"):
            if not getattr(self, name).strip():
                raise ValueError(f"{name} is empty")
        if not isinstance(self.rules, tuple) or not self.rules:
            raise ValueError("rules is a tuple of at least one Rule or AddFile")

    @property
    def author(self) -> bytes:
        """Author and date, `Name <email> seconds zone`, as git writes them in a commit."""
        date = datetime.fromisoformat(self.date)
        return f"{self.by} {int(date.timestamp())} {date:%z}".encode()

    def message(self) -> bytes:
        """The commit's message."""
        paragraphs = [self.why, f"How: {self.how}"]
        if self.upstream.strip():
            paragraphs.append(f"Upstream: {self.upstream}")
        paragraphs.append(f"Until: {self.until}")
        wrapped = (
            textwrap.fill(_squeezed(text), 72, break_long_words=False, break_on_hyphens=False)
            for text in paragraphs
        )
        return ("\n\n".join((self.subject.strip(), *wrapped)) + "\n").encode()

    def run(self, tree: Tree) -> Result:
        """What this recipe does to `tree`.

        Raises UsageError, with the recipe's file and line, where the recipe itself is wrong.
        """
        try:
            return _Run(tree).result(self.rules)
        except ForkmanError:
            raise
        except Exception as error:
            lines = [
                frame.lineno
                for frame in traceback.extract_tb(error.__traceback__)
                if frame.filename == self.file
            ]
            if not lines and not isinstance(error, _Unusable):
                raise  # nothing of the recipe was running: the fault is ours
            where = ":".join((self.file or self.subject, *map(str, lines[-1:])))
            said = "" if isinstance(error, _Unusable) else f"{type(error).__name__}: "
            raise UsageError(f"{where}: {said}{error}", todo="Correct the recipe.") from error


def holders(find: Find, tree: Tree) -> set[bytes]:
    """The files of `tree` that hold a match."""
    return {place.source.path for place in _Run(tree).search(find)}


def load(path: Path, source: bytes) -> Recipe:
    """The recipe that the file `path`, whose content is `source`, defines.

    Runs the file. That it imports nothing but this module and the standard library keeps recipes
    plain; it is no protection from a hostile one. Raises UsageError with file and line.
    """

    def wrong(what: str, line: int | None = None) -> UsageError:
        return UsageError(f"{path}{f':{line}' if line else ''}: {what}", todo="Correct the recipe.")

    try:
        with warnings.catch_warnings(action="ignore"):
            parsed = ast.parse(source, str(path))
            code = compile(parsed, str(path), "exec", dont_inherit=True)
    except SyntaxError as error:
        raise wrong(f"this is not Python: {error.msg}", error.lineno) from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise wrong(f"this is not Python: {error}") from None
    for node in ast.walk(parsed):
        match node:
            case ast.Import(names=names):
                imported = [alias.name for alias in names]
            case ast.ImportFrom(module=name, level=level):
                imported = ["." * level + (name or "")]
            case _:
                continue
        for name in imported:
            if name != "rebase.recipe" and name.split(".")[0] not in sys.stdlib_module_names:
                raise wrong(
                    f"imports {name}; a recipe imports rebase.recipe and the standard library only",
                    node.lineno,
                )
    module = types.ModuleType(path.stem)
    module.__file__ = str(path)
    try:
        exec(code, module.__dict__)
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(path)]
        raise wrong(f"{type(error).__name__}: {error}", lines[-1] if lines else None) from error
    recipe = getattr(module, "recipe", None)
    if not isinstance(recipe, Recipe):
        raise wrong("does not set `recipe` to a Recipe")
    return _with(recipe, file=str(path))


# -- running them ----------------------------------------------------------------------------------


class _Run:
    """One run of a recipe on one tree."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.sources: dict[bytes, Source] = {}
        self.splices: dict[bytes, list[Splice]] = {}
        self.added: dict[bytes, NewFile] = {}
        self.places: list[str] = []
        self.new_places: list[str] = []
        self.already: list[tuple[bytes, int, int]] = []
        self.unneeded: list[Find] = []
        self.conflicts: list[Conflict] = []
        self.notes: list[str] = []

    def result(self, rules: Iterable[Rule | AddFile]) -> Result:
        for rule in rules:
            if rule.needed and not next(self.search(rule.needed), None):
                self.unneeded.append(rule.needed)
                where = f" under {rule.needed.where}" if rule.needed.where else ""
                self.notes.append(f"Not needed: nothing{where} matches {rule.needed}.")
            elif isinstance(rule, AddFile):
                self.add(rule)
            else:
                self.follow(rule)
        edits: dict[bytes, bytes | NewFile] = dict(self.added)
        for path, splices in self.splices.items():
            source = self.sources[path]
            try:
                new = source.spliced(splices)
                _check_python(path, source.content, new)
            except Lost as lost:
                self.conflicts.append(Conflict(path, Kind.ANCHOR_LOST, detail=f"{lost}."))
            else:
                edits[path] = new
        if self.conflicts:
            status = Status.CONFLICT
        elif edits:
            status = Status.APPLIED
        else:
            status = Status.ALREADY_UPSTREAM if self.already else Status.NOT_NEEDED
        return Result(
            status,
            edits,
            tuple(self.places),
            tuple(self.new_places),
            tuple(self.already),
            tuple(self.unneeded),
            tuple(self.conflicts),
            " ".join(self.notes),
        )

    def add(self, file: AddFile) -> None:
        path, content = file.path.encode(), file.content.encode()
        existing = self.tree.read(path)
        if existing is None:
            self.added[path] = NewFile(content, file.executable)
            self.places.append(f"{file.path}:1")
        elif existing == content:
            self.already.append((path, 1, max(1, content.count(b"\n"))))
            self.notes.append(f"Already upstream: {file.path}.")
        else:
            self.conflicts.append(
                Conflict(
                    path,
                    Kind.ADD_ADD,
                    hunks=(Hunk(1, b"", existing, content),),
                    detail="upstream has another file of this name.",
                )
            )

    def follow(self, rule: Rule) -> None:
        waiting = list(rule.expect)
        theirs = list(self.search(rule.upstream)) if rule.upstream else []
        done = {place.name for place in theirs}
        new: list[str] = []
        for place in self.search(rule.find):
            if place.name in done:
                continue
            try:
                splices = list(rule.splices(place))
            except Lost as lost:
                _claim(waiting, place)
                self.conflicts.append(
                    Conflict(
                        place.source.path,
                        Kind.ANCHOR_LOST,
                        detail=f"line {place.source.line(place.start)}: {lost}.",
                    )
                )
                continue
            if not splices:
                theirs.append(place)
                continue
            self.splices.setdefault(place.source.path, []).extend(splices)
            self.places.append(str(place))
            if not _claim(waiting, place) and not rule.knows(place):
                new.append(str(place))
        for place in theirs:
            if _claim(waiting, place) or rule.knows(place):
                first, last = map(place.source.line, (place.start, place.end))
                self.already.append((place.source.path, first, last))
                self.notes.append(f"Already upstream: {place} `{_squeezed(place.text)[:80]}`.")
        self.new_places += new
        for glob, moved in zip(waiting, new, strict=False):
            self.notes.append(f"Moved: what was expected at {glob} is at {moved}.")
        for glob in waiting[len(new) :]:
            self.conflicts.append(self.lost(rule.find, glob))

    def search(self, find: Find) -> Iterator[Place]:
        where, word = find.where.encode(), next(iter(find.words), "").encode()
        if where and not where.endswith(b"/"):
            among: Iterable[bytes] = [where]
        else:
            among = self.tree.paths(where)
        paths = filter(find.may_be_in, among)
        for path in sorted(self.tree.grep(word, paths)):
            content = self.tree.read(path) or b""
            if find.may_match(content) and (source := self.source(path)):
                yield from find.places(source)

    def source(self, path: bytes) -> Source | None:
        if path not in self.sources:
            content = self.tree.read(path)
            if content is None:
                return None
            self.sources[path] = Source(path, content)
        return self.sources[path]

    def lost(self, find: Find, glob: str) -> Conflict:
        """The conflict for an expected place that is gone."""
        path, _, scope = glob.partition(":")
        concrete = path.encode() if path and not set(path) & set("*?[") else find.where.encode()
        gone = ""
        if concrete and not concrete.endswith(b"/") and self.tree.read(concrete) is None:
            gone = f" {_shown(concrete)} is not in the tree."
        near = self.nearest(find)
        expected = f"{path} in {scope}" if scope.strip("*") else path
        return Conflict(
            concrete.rstrip(b"/"),
            Kind.ANCHOR_LOST,
            detail=f"{find} is not where the recipe expects it ({expected}).{gone} "
            + (f"Nearest: {'; '.join(near)}." if near else "Nothing in the tree resembles it."),
        )

    def nearest(self, find: Find, most: int = 3) -> list[str]:
        """What in the whole tree is most like what was sought, each with its place."""
        anywhere = _with(find, where="")
        if isinstance(anywhere, Code) and anywhere.probe.strip():
            anywhere = _with(anywhere, inside="")
        exact = [
            f"{place}{f' in {place.scope}' if place.scope else ''} `{_squeezed(place.text)[:80]}`"
            for place in self.search(anywhere)
            if str(place) not in self.places
        ]
        if exact:
            return exact[:most]
        probe = _squeezed(find.probe) or " ".join(find.words)
        likely = list(filter(find.may_be_in, self.tree.paths()))
        holders = {word: set(self.tree.grep(word.encode(), likely)) for word in find.words}
        words = sorted((word for word in holders if holders[word]), key=lambda w: len(holders[w]))
        paths = list(dict.fromkeys(path for word in words for path in sorted(holders[word])))[:300]
        scored = []
        for path in paths:
            source = self.source(path)
            for number, line in enumerate(source.text.split("\n") if source else (), 1):
                if any(word in line for word in words):
                    text = _squeezed(line)[:200]
                    like = SequenceMatcher(None, probe, text, autojunk=False)
                    held = sum(same.size for same in like.get_matching_blocks() if same.size > 2)
                    if held > len(probe) / 2:
                        scored.append((-held, -like.ratio(), path, number, text[:80]))
        return [f"{_shown(path)}:{line} `{text}`" for *_, path, line, text in sorted(scored)[:most]]


def _names(glob: str, place: Place) -> bool:
    return fnmatchcase(place.name, glob if ":" in glob else f"{glob}:*")


def _claim(waiting: list[str], place: Place) -> bool:
    """Whether `place` is one that is waited for; if so it no longer is."""
    for glob in waiting:
        if _names(glob, place):
            waiting.remove(glob)
            return True
    return False


def _check_python(path: bytes, old: bytes, new: bytes) -> None:
    """Raise Lost where a file that parsed does not any more."""
    if not path.endswith((b".py", b".pyi")) or not (wrong := _syntax_error(new)):
        return
    if not _syntax_error(old):  # else it is for a newer Python, or none: not ours to judge
        raise Lost(f"the edit would break line {wrong.lineno}: {wrong.msg}")


def _syntax_error(content: bytes) -> SyntaxError | None:
    with warnings.catch_warnings(action="ignore"):
        try:
            ast.parse(content)
        except SyntaxError as error:
            return error
        except (ValueError, RecursionError, MemoryError) as error:
            return SyntaxError(str(error))
    return None


# -- text and nodes --------------------------------------------------------------------------------


def _shown(path: bytes) -> str:
    return path.decode("utf-8", "backslashreplace")


def _squeezed(text: str) -> str:
    return " ".join(text.split())


def _lines(text: str) -> list[str]:
    return [line for line in text.split("\n") if line.strip()]


def _adjoins(lines: list[str], block: list[str]) -> bool:
    """Whether `block` is what `lines` begin with, blank lines and indentation aside."""
    there = [stripped for line in lines[: 3 * len(block) + 3] if (stripped := line.strip())]
    return there[: len(block)] == [line.strip() for line in block]


def _indented(code: str, margin: str, unit: str) -> str:
    """`code`, given with four spaces a level, at `margin` with `unit` a level."""
    lines = []
    for line in textwrap.dedent(code).strip("\n").split("\n"):
        text = line.lstrip(" ")
        levels, rest = divmod(len(line) - len(text), 4)
        lines.append(f"{margin}{unit * levels}{' ' * rest}{text}".rstrip())
    return "\n".join(lines)


def _span(node: "SgNode") -> tuple[int, int]:
    span = node.range()
    return span.start.index, span.end.index


def _statement(node: "SgNode") -> "SgNode":
    """The statement a node is in, or is."""
    for around in (node, *node.ancestors()):
        parent = around.parent()
        if parent is None or parent.kind() in ("block", "module"):
            return around
    return node


def _definition(node: "SgNode") -> "SgNode":
    """The function or class that a node is, or decorates."""
    for around in (node, *node.ancestors()[:1]):
        if around.kind() == "decorated_definition" and (inner := around.field("definition")):
            return inner
        if around.kind() in ("function_definition", "class_definition"):
            return around
    raise Lost(f"`{_squeezed(node.text())[:60]}` is no definition")


def _next_line(source: Source, at: int) -> int:
    """Where the line after the one of position `at` begins; the end of the text after the last."""
    return source.text.find("\n", at) + 1 or len(source.text)


def _append(source: Source, brackets: "SgNode", new: str) -> Iterator[Splice]:
    """One more element between brackets, in their own layout, unless it is there already."""
    elements = [node for node in brackets.named_children() if node.kind() != "comment"]
    key = _new_key(brackets.kind(), new)
    for old in elements:
        if _squeezed(old.text()) == _squeezed(new):
            return
        name = old.field("name") or old.field("key")
        if key is not None and name and _squeezed(name.text()) == key:
            raise Lost(f"there is `{_squeezed(old.text())[:60]}` already")
    start, close = _span(brackets)[0], _span(brackets)[1] - 1
    if not elements:
        yield Splice(close, close, f"{new},")
        return
    first, last = _span(elements[-1])
    commas = [_span(node)[1] for node in brackets.children() if node.kind() == ","]
    comma = commas[-1] if commas and commas[-1] > last else None
    if source.line(last) == source.line(close) or source.line(start) == source.line(first):
        yield Splice(comma or last, comma or last, f" {new}," if comma else f", {new}")
        return
    if comma is None:
        yield Splice(last, last, ",")
    end = source.line_end(comma or last)
    yield Splice(end, end, f"\n{source.margin(first)}{new},")


def _new_key(kind: str, element: str) -> str | None:
    """The name of a `name=value`, or the key of a `key: value`, that is to be added."""
    if kind == "argument_list":
        found = re.match(r"(\w+)\s*=(?!=)", element)
        return found[1] if found else None
    if kind == "dictionary":
        match ast.parse(f"{{{element}}}", mode="eval").body:
            case ast.Dict(keys=[ast.expr() as key]):
                return _squeezed(ast.get_source_segment(f"{{{element}}}", key) or "")
    return None


_DEFINITIONS = ("function_definition", "class_definition", "decorated_definition")
_IMPORTS = ("import_statement", "import_from_statement", "future_import_statement")
_TRANSPARENT = (
    "block", "if_statement", "elif_clause", "else_clause", "try_statement", "except_clause",
    "finally_clause", "with_statement", "expression_statement",
)  # fmt: skip


def _imported(statement: str) -> dict[str, str]:
    """What an import statement binds, and to what. Raises ValueError where it is none."""
    try:
        body = ast.parse(textwrap.dedent(statement)).body
    except SyntaxError:
        body = []
    match body:
        case [ast.Import(names=names)]:
            whole = {alias.asname: alias.name for alias in names if alias.asname}
            tops = (alias.name.partition(".")[0] for alias in names if not alias.asname)
            return whole | {top: top for top in tops}
        case [ast.ImportFrom(module=module, level=level, names=names)]:
            origin = "." * level + (module or "")
            return {alias.asname or alias.name: f"{origin}:{alias.name}" for alias in names}
    raise ValueError(f"{statement!r} is not one import statement")


def _top_level(node: "SgNode") -> Iterator["SgNode"]:
    """What binds names at module level, also inside `if` and `try`."""
    for child in node.named_children():
        if child.kind() in _TRANSPARENT:
            yield from _top_level(child)
        else:
            yield child


def _bound(node: "SgNode") -> dict[str, str]:
    """The names that such a node binds, each with what it is bound to (imports only)."""
    if node.kind() in _IMPORTS:
        try:
            return _imported(node.text())
        except ValueError:
            return {}
    if node.kind() in _DEFINITIONS:
        name = _definition(node).field("name")
    else:
        name = node.field("left") if node.kind() == "assignment" else None
    return {name.text(): ""} if name else {}


def _import_point(source: Source, before: int) -> tuple[int, str, str]:
    """Where an import goes that code at `before` uses: position, what leads it, what follows it."""
    imports: int | None = None
    head = int(source.text.startswith("\ufeff"))  # where the comments and the docstring end
    headed = False
    for node in source.root.named_children():
        start, end = _span(node)
        if start >= before:
            break
        if node.kind() in _IMPORTS:
            imports = end
        elif not source.text[head:start].strip():
            docstring = [inner.kind() for inner in node.named_children()] == ["string"]
            if node.kind() == "comment" or (node.kind() == "expression_statement" and docstring):
                head, headed = end, True
    if imports is not None:
        return source.line_end(imports), "\n", ""
    return (source.line_end(head), "\n\n", "") if headed else (head, "", "\n")
