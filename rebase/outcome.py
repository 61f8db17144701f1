"""What happened, as data. How it looks is `report`'s, which knows no git."""

import enum
from dataclasses import dataclass

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

    change: its file name in the series (for a queue that is a branch: its commit's short id).
    subject: the first line of its message, as text.
    commit: the commit made, None where there is none; tree: the tree the branch has after it.
    taken: what of it upstream already has; the rest was applied, or there is no rest.
    places: where a recipe made its edit, `path:line`; new_places: those it had not expected.
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
    remembered: bool = False
    note: str = ""


@dataclass(frozen=True)
class Pin:
    """The upstream commit a fork stands on, and its release tag where it has one."""

    commit: ObjectId
    tag: str | None = None

    def __str__(self) -> str:
        return self.tag or self.commit[:9]
