"""What happened, as data. How it looks is `report`'s, which knows no git."""

import enum
from dataclasses import dataclass

from rebase.errors import ExitCode
from rebase.git import ObjectId


class Status(enum.Enum):
    """How a replay of one change ended."""

    APPLIED = "applied"
    ALREADY_UPSTREAM = "already upstream"
    NOT_NEEDED = "not needed"  # a recipe whose own guard found nothing that needs it
    CONFLICT = "conflict"
    SKIPPED = "skipped"  # by a person, with `forkman skip`


class Kind(enum.Enum):
    """What kind of conflict it is."""

    CONTENT = "content"
    ADD_ADD = "add/add"
    MODIFY_DELETE = "modify/delete"
    RENAME = "rename"
    MODE = "mode"
    ANCHOR_LOST = "anchor lost"  # a recipe no longer finds the code it edits
    OTHER = "other"  # file against directory, submodules, binary files


@dataclass(frozen=True)
class UpstreamCommit:
    """An upstream commit that has to do with an outcome.

    date: its author date, `YYYY-MM-DD`; pull_request: the number its subject names, if any.
    """

    id: ObjectId
    subject: str
    author: str
    date: str
    pull_request: int | None = None


@dataclass(frozen=True)
class Hunk:
    """One place where upstream and our change disagree.

    line: where it is in upstream's file now, counted from 1.
    base, upstream, ours: its lines before both, in upstream now, and as our change wants them.
    """

    line: int
    base: bytes
    upstream: bytes
    ours: bytes


@dataclass(frozen=True)
class Conflict:
    """Why one path of a change cannot be carried over.

    who: the upstream commits since the old base that touched those lines, newest first.
    rewritten: the upstream commits that made hunks of this very change, which upstream has
    rewritten since: often the change can be skipped.
    detail: what git or the recipe said, for kinds that have no hunks.
    """

    path: bytes
    kind: Kind
    hunks: tuple[Hunk, ...] = ()
    who: tuple[UpstreamCommit, ...] = ()
    rewritten: tuple[UpstreamCommit, ...] = ()
    detail: str = ""


@dataclass(frozen=True)
class Taken:
    """What upstream already has of a change to one path: `hunks` of its `total` hunks.

    by: the upstream commits that brought them; empty where the history does not say.
    """

    path: bytes
    hunks: int
    total: int
    by: tuple[UpstreamCommit, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """How the replay of one change ended.

    change: its file name in the series (for a queue that is a branch: a slug
    of its subject).
    subject: the first line of its message, as text.
    commit: the commit made, None where there is none; tree: the tree the branch has after it.
    taken: what of it upstream already has; the rest was applied, or there is no rest.
    places: where a recipe made its edit, `path:line`; new_places: those it had not expected.
    by: the upstream commits that did what a recipe would, or took away what needed it.
    remembered: a conflict came up, and git's rerere resolved it as a person did before.
    note: what else a maintainer must know, in a sentence.
    """

    change: str
    subject: str
    status: Status
    tree: ObjectId
    commit: ObjectId | None = None
    taken: tuple[Taken, ...] = ()
    conflicts: tuple[Conflict, ...] = ()
    places: tuple[str, ...] = ()
    new_places: tuple[str, ...] = ()
    by: tuple[UpstreamCommit, ...] = ()
    remembered: bool = False
    note: str = ""


@dataclass(frozen=True)
class Pin:
    """The upstream commit a fork stands on, and its release tag where it has one."""

    commit: ObjectId
    tag: str | None = None

    def __str__(self) -> str:
        return self.tag or self.commit[:9]


@dataclass(frozen=True)
class Site:
    """A place in upstream's code that only CUDA has an answer for.

    scope: the dotted names of the definitions it is in, "" at module level.
    kind: which of `rebase.residue`'s kinds it is; code: what stands there, in short.
    """

    path: str
    line: int
    scope: str
    kind: str
    code: str

    @property
    def name(self) -> str:
        """What it is called in a file of accepted sites, whatever its line."""
        return f"{self.path}:{self.scope}"


@dataclass(frozen=True)
class Stale:
    """What was accepted and is there no more: `what` says which, `reason` why it was accepted."""

    what: str
    reason: str


@dataclass(frozen=True)
class Broken:
    """A contract that upstream does not keep.

    contract: the name or the flag; why: what of ours relies on it; detail: what is wrong.
    by: the upstream commit that broke it; empty where the history does not say.
    """

    contract: str
    why: str
    detail: str
    by: tuple[UpstreamCommit, ...] = ()


@dataclass(frozen=True)
class Unparsed:
    """A file that changes of ours touch, and that does not parse under the fork's Python."""

    path: str
    line: int
    detail: str
    changes: tuple[str, ...]


@dataclass(frozen=True)
class Audit:
    """What a replay that conflicts nowhere may still hide.

    at: where the fork's branch was looked at.
    residue: CUDA-only code that nobody accepted; in a sync, what was not there at the old pin.
    contracts: those that are broken; in a sync, those that held at the old pin.
    unparsed: files that our changes broke.
    accepted: how many sites are; kept: how many contracts are.
    before: what would be a finding in a sync, had it not been so at the old pin already.
    stale: what was accepted, and is there no more.
    """

    fork: str
    at: Pin
    residue: tuple[Site, ...] = ()
    contracts: tuple[Broken, ...] = ()
    unparsed: tuple[Unparsed, ...] = ()
    accepted: int = 0
    kept: int = 0
    before: int = 0
    stale: tuple[Stale, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def findings(self) -> int:
        """How many things a person has to look at."""
        return len(self.residue) + len(self.contracts) + len(self.unparsed)


@dataclass(frozen=True)
class Layer:
    """A patch from another fork's tree that goes on before ours, as it was at a pin."""

    fork: str
    path: str
    blob: ObjectId


@dataclass(frozen=True)
class ForkReport:
    """What a sync or a rebase found for one fork.

    source: where upstream was read, "git" or "archives".
    old, new: the pin before and after; how: why this target ("leads", "follows slime
    docker/Dockerfile", "as asked", "stays").
    outcomes: one for each change of the queue, in order; empty where nothing was replayed.
    problem: why the fork could not be carried at all (its upstream is out of reach, a layer does
    not apply); todo: what to do about it.
    notes: what else a maintainer must know, a sentence each (moved tags, a source's limits).
    audit: what a clean replay may hide; None where nothing was audited.
    """

    fork: str
    source: str
    old: Pin
    new: Pin
    how: str
    outcomes: tuple[Outcome, ...] = ()
    problem: str = ""
    todo: str = ""
    unreachable: bool = False
    notes: tuple[str, ...] = ()
    audit: Audit | None = None

    @property
    def conflicts(self) -> tuple[Outcome, ...]:
        return tuple(o for o in self.outcomes if o.status is Status.CONFLICT)

    @property
    def findings(self) -> int:
        """How many things of the audit a person has to look at."""
        return self.audit.findings if self.audit else 0

    @property
    def moved(self) -> bool:
        return self.old != self.new


@dataclass(frozen=True)
class Report:
    """What one run did.

    command: the words it was asked with ("sync", "rebase slime"). landed: pins, queues and exports
    were written; dry: they would have been. written, removed: paths, relative to the project.
    """

    command: str
    forks: tuple[ForkReport, ...]
    landed: bool
    dry: bool = False
    written: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def exit_code(self) -> ExitCode:
        """What it means for the script that asked."""
        for fork in self.forks:
            if (fork.problem and not fork.unreachable) or fork.conflicts or fork.findings:
                return ExitCode.PERSON
        if any(fork.unreachable for fork in self.forks):
            return ExitCode.ENVIRONMENT
        return ExitCode.DONE
