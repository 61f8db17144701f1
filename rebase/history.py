"""What upstream did between two of its commits: who touched a path, or some lines of it."""

import os
import re
from collections.abc import Collection
from dataclasses import dataclass

from rebase.git import Git, GitError, ObjectId
from rebase.objects import Entry
from rebase.outcome import UpstreamCommit

_FORMAT = "tformat:%H%x00%s%x00%an%x00%as"  # a commit is four fields; -z ends each with a NUL
# What names a commit's own pull request, the surest first: GitHub's `(#12)` at the end and `Merge
# pull request #12`, GitLab's `project!12`, `(#12)` anywhere; what a revert quotes is another's.
_PULL_REQUEST = (r"\(#(\d+)\)\s*$", r"^Merge pull request #(\d+)", r"!(\d+)\b", r"\(#(\d+)\)")
_REVERTED = re.compile(r'^Revert ".*"')


@dataclass(frozen=True)
class Touch:
    """What an upstream commit did to a path: its entry before and after, None where it had none."""

    commit: UpstreamCommit
    old: Entry | None
    new: Entry | None


class History:
    """The upstream commits that are in `new` and not in `old`."""

    def __init__(self, git: Git, old: ObjectId, new: ObjectId) -> None:
        self.git = git
        self.old = old
        self.new = new
        self._touches: dict[bytes, list[Touch]] = {}

    def load(self, paths: Collection[bytes]) -> None:
        """Learn about many paths in one walk of the history, which is what costs the time."""
        if not (wanted := sorted(set(paths) - self._touches.keys())):
            return
        # git reads paths a line each; one that holds a newline stays without a history
        wanted = [path for path in wanted if b"\n" not in path]
        self._touches |= {path: [] for path in paths if path not in self._touches}
        if self.old == self.new or not wanted:
            return
        output = self.git.run(
            "--literal-pathspecs", "log", "-z", f"--format={_FORMAT}", "--raw", "--no-abbrev",
            "--no-renames", "--stdin",
            input=b"\n".join((self.new.encode(), b"^" + self.old.encode(), b"--", *wanted, b"")),
        )  # fmt: skip
        fields = iter(output.split(b"\0"))
        commit: UpstreamCommit | None = None
        for field in fields:
            # after a commit's own fields: for each path what happened, then the path
            if field.lstrip(b"\n").startswith(b":"):
                old_mode, new_mode, old, new, _ = field.lstrip(b"\n:").decode("ascii").split(" ")
                path = next(fields)
                if commit and path in self._touches:
                    touch = Touch(commit, _entry(old_mode, old), _entry(new_mode, new))
                    self._touches[path].append(touch)
            elif field:
                commit = _commit(field, next(fields), next(fields), next(fields))

    def touching(self, path: bytes) -> list[Touch]:
        """What the upstream commits did to `path`, newest first."""
        self.load([path])
        return self._touches[path]

    def of_lines(
        self, path: bytes, ranges: Collection[tuple[int, int]]
    ) -> tuple[UpstreamCommit, ...]:
        """The commits that touched these lines of `path`, newest first.

        ranges: first and last lines of the file at `new`, from 1. Where it has no such lines, the
        answer is empty.
        """
        if self.old == self.new or not ranges:
            return ()
        try:
            output = self.git.run(
                "log", "-z", f"--format={_FORMAT}", "--no-patch",
                *(f"-L{first},{last}:{os.fsdecode(path)}" for first, last in ranges),
                self.new, f"^{self.old}",
            )  # fmt: skip
        except GitError:
            return ()
        fields = iter(output.split(b"\0"))
        return tuple(
            _commit(id, next(fields), next(fields), next(fields)) for id in fields if id.strip()
        )


def _entry(mode: str, id: str) -> Entry | None:
    return Entry(int(mode, 8), ObjectId(id)) if int(mode, 8) else None


def _commit(id: bytes, subject: bytes, author: bytes, date: bytes) -> UpstreamCommit:
    text = subject.decode("utf-8", "replace")
    own = _REVERTED.sub("", text)
    numbers = (found[1] for each in _PULL_REQUEST if (found := re.search(each, own)))
    number = next(numbers, None)
    return UpstreamCommit(
        ObjectId(id.decode("ascii").strip()),
        text,
        author.decode("utf-8", "replace"),
        date.decode("ascii", "replace"),
        int(number) if number else None,
    )
