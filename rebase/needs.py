"""What each branch must do, and how that is met at each target: a table nobody types.

`forks/<fork>/needs.toml`; `?` marks what may be left out:

    targets = ["v0.2.2", "624b824a8"]?          upstream revisions to look at; the pin, without it
    [[need]]
    name = "eager"                              in a word or two
    what = "Element-wise fused functions run eagerly on NPU"
    by = [                                      each of these may meet it:
        { change = "eager_jit.py" },            a change of the queue that applies there
        { change = "x.py", fork = "slime" },    or of another fork's, where that one stands
        { runtime = "slime_npu.device.is_npu" },  what our runtime registers or configures
        { upstream = "megatron/core/jit.py", pattern = "is_npu()" },
    ]                                           upstream itself: in that file or folder something
                                                matches (an ast-grep pattern in Python, else text)

A need is met at a target where one of `by` holds there. A change holds where it is applied, or
where upstream has it already; one that is *not needed* holds too, for its own guard says so. In
conflict it does not.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rebase import tables
from rebase.audit import carried, folder
from rebase.branch import Files
from rebase.carry import Carried
from rebase.errors import UsageError
from rebase.manifest import QueueFolder
from rebase.outcome import Pin, Status
from rebase.queue import SERIES
from rebase.recipe import Code, Source, Text
from rebase.targets import Progress
from rebase.workspace import Workspace

FILE = "needs.toml"


@dataclass(frozen=True)
class By:
    """One way to meet a need."""

    change: str = ""
    fork: str = ""
    runtime: str = ""
    upstream: str = ""
    pattern: str = ""
    __pydantic_config__ = tables.FORM

    def __post_init__(self) -> None:
        if sum(map(bool, (self.change, self.runtime, self.upstream))) != 1:
            raise ValueError("needs change, runtime or upstream, one of the three")
        if self.fork and not self.change:
            raise ValueError("fork says whose queue has the change")
        if bool(self.upstream.strip("/")) != bool(self.pattern.strip()):
            raise ValueError("upstream, a file or folder, and pattern go together")
        if self.runtime and not all(part.isidentifier() for part in self.runtime.split(".")):
            raise ValueError(f"runtime {self.runtime!r} is no dotted name")


@dataclass(frozen=True)
class Need:
    """One table of the file, as the module's docstring describes it."""

    name: str
    what: str
    by: tuple[By, ...]
    __pydantic_config__ = tables.FORM

    def __post_init__(self) -> None:
        if not self.name.strip() or not self.what.strip():
            raise ValueError("name or what is empty")
        if not self.by:
            raise ValueError("by is empty; a need that nothing meets is no entry of a table")


@dataclass(frozen=True)
class _File:
    need: tuple[Need, ...] = ()
    targets: tuple[str, ...] = ()
    __pydantic_config__ = tables.FORM

    def __post_init__(self) -> None:
        names = [need.name for need in self.need]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"need: {', '.join(sorted(twice))} is there twice")


@dataclass(frozen=True)
class Met:
    """How a need is met at a target: in words, one for each way that holds; empty where it is not.

    missing: why the other ways do not hold.
    """

    fork: str
    need: str
    what: str
    target: str
    at: Pin
    how: tuple[str, ...]
    missing: tuple[str, ...] = ()


def needs(
    ws: Workspace,
    forks: Sequence[str] = (),
    *,
    at: Sequence[str] = (),
    progress: Progress | None = None,
) -> list[Met]:
    """How the needs of `forks`, or of all, are met, at their files' targets or at those given.

    Ordered by fork, need, target. Raises UsageError with the mistakes of all the files, or where a
    fork lacks a target.
    """
    files = _load(ws, forks)
    found: list[Met] = []
    others: dict[str, Carried] = {}
    with ws.lock():
        for fork, file in files.items():
            targets: Sequence[str | None] = at or file.targets or [None]
            rows: dict[str, list[Met]] = {need.name: [] for need in file.need}
            for number, target in enumerate(targets):
                if progress:
                    progress(f"needs of {fork}", number, len(targets))
                for row in _at(ws, fork, file, target, others):
                    rows[row.need].append(row)
            found += (row for each in rows.values() for row in each)
    return found


def _load(ws: Workspace, forks: Sequence[str]) -> Mapping[str, _File]:
    """The files of the forks, those that have needs; what they name is there."""
    files: dict[str, _File] = {}
    mistakes: list[str] = []
    for fork in forks or ws.project.forks:
        path = folder(ws, fork) / FILE
        try:
            file = tables.read(path, _File)
        except UsageError as error:
            mistakes.append(error.what)
            continue
        if not file.need and fork in forks:
            mistakes.append(f"forks/{fork}/{FILE}: names no need")
        for need in file.need:
            for by in need.by:
                whose = by.fork or fork
                if whose not in ws.project.forks:
                    wrong = f"there is no fork {whose}"
                elif by.change and by.change not in (_changes(ws, whose) or [by.change]):
                    wrong = f"{whose}'s series names no {by.change}"
                else:
                    continue
                mistakes.append(f"forks/{fork}/{FILE}: {need.name}: {wrong}")
        if file.need:
            files[fork] = file
    if mistakes:
        raise UsageError("\n".join(mistakes), todo="Correct these files, then run this again.")
    return files


def _changes(ws: Workspace, fork: str) -> set[str] | None:
    """The names in a fork's series; None where its queue is a branch."""
    queue = ws.manifest(fork).queue
    if not isinstance(queue, QueueFolder):
        return None
    lines = (ws.root / queue.path / SERIES).read_text("utf-8").splitlines()
    return {line.strip() for line in lines if line.strip() and not line.startswith("#")}


def _at(
    ws: Workspace, fork: str, file: _File, at: str | None, others: dict[str, Carried]
) -> Iterator[Met]:
    """How each need is met at one target. others: forks where they stand, as far as known."""
    done = carried(ws, fork, at)
    made, pin = done.made, done.target.new.pin
    assert made
    files = Files(made.objects, made.objects.tree_of(made.new))
    for need in file.need:
        how: list[str] = []
        missing: list[str] = []
        for by in need.by:
            if by.change:
                of = done
                if by.fork and by.fork != fork:
                    of = others[by.fork] = others.get(by.fork) or carried(ws, by.fork, None)
                said, holds = _of_change(of, by)
            elif by.runtime:
                said, holds = _of_runtime(ws.root, by.runtime)
            else:
                said, holds = _of_upstream(files, by.upstream.rstrip("/"), by.pattern)
            (how if holds else missing).append(said)
        yield Met(fork, need.name, need.what, at or str(pin), pin, tuple(how), tuple(missing))


def _of_change(done: Carried, by: By) -> tuple[str, bool]:
    whose = f"{by.fork} " if by.fork else ""
    [outcome] = (each for each in done.report.outcomes if each.change == by.change)
    said = f"{whose}{by.change}: {outcome.status.value}"
    return said, outcome.status not in (Status.CONFLICT, Status.SKIPPED)


def _of_runtime(root: Path, name: str) -> tuple[str, bool]:
    """Whether a file of the project defines this module, or this name in one."""
    import griffe  # only who asks for needs waits for it

    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        stem = root.joinpath(*parts[:end])
        for path in (stem.with_suffix(".py"), stem / "__init__.py"):
            if path.is_file():
                here: griffe.Object | griffe.Alias
                here = griffe.visit(parts[end - 1], filepath=path, code=path.read_text("utf-8"))
                for part in parts[end:]:
                    if part not in here.members:
                        said = f"runtime: {path.relative_to(root)} has no {'.'.join(parts[end:])}"
                        return said, False
                    here = here.members[part]
                return f"runtime: {name}", True
    return f"runtime: this project has no {name}", False


def _of_upstream(files: Files, where: str, pattern: str) -> tuple[str, bool]:
    """Where upstream has it, if it does."""
    top = where.encode()
    for path in sorted(files.paths(top)):
        if path != top and not path.startswith(top + b"/"):
            continue  # a neighbour whose name begins alike
        find = Code(pattern) if path.endswith((b".py", b".pyi")) else Text(pattern)
        content = files.read(path) or b""
        if not find.may_match(content):
            continue
        try:
            place = next(find.places(Source(path, content)), None)
        except ValueError as error:
            raise UsageError(f"{FILE}: {error}", todo="Correct the pattern.") from None
        if place:
            return f"upstream: {place}", True
    return f"upstream: {where} has no `{pattern}`", False
