"""What upstream did between two of its commits: who touched a path, or some lines of it."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise

from rebase.git import Git, GitError, ObjectId
from rebase.outcome import UpstreamCommit

_FORMAT = "%x01%H%x00%s%x00%an%x00%as%x00"
# GitHub's `(#12)` and `Merge pull request #12`, GitLab's `project!12`
_PULL_REQUEST = re.compile(r"\(#(\d+)\)|Merge pull request #(\d+)|!(\d+)\b")
_ABSENT = "0" * 40


@dataclass(frozen=True)
class Touch:
    """What an upstream commit did to a path: its blob before and after, None where it had none."""

    commit: UpstreamCommit
    old: ObjectId | None
    new: ObjectId | None


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
        for record in output.split(b"\x01")[1:]:
            id, subject, author, date, *raw = record.split(b"\0")
            commit = _commit(id, subject, author, date)
            for info, path in pairwise(raw):
                if info.lstrip(b"\n").startswith(b":") and path in self._touches:
                    _, _, old, new, _ = info.lstrip(b"\n").decode("ascii").split(" ")
                    self._touches[path].append(
                        Touch(
                            commit,
                            None if old == _ABSENT else ObjectId(old),
                            None if new == _ABSENT else ObjectId(new),
                        )
                    )

    def touching(self, path: bytes) -> list[Touch]:
        """What the upstream commits did to `path`, newest first."""
        self.load([path])
        return self._touches[path]

    def of_lines(self, path: bytes, first: int, last: int) -> tuple[UpstreamCommit, ...]:
        """The commits that touched these lines (of the file at `new`, from 1), newest first."""
        if self.old == self.new:
            return ()
        try:
            output = self.git.run(
                "log", "-z", f"--format={_FORMAT}", "--no-patch",
                f"-L{first},{last}:{path.decode('utf-8', 'surrogateescape')}",
                self.new, f"^{self.old}",
            )  # fmt: skip
        except GitError:  # the lines are not in the file as upstream has it
            return tuple(touch.commit for touch in self.touching(path))
        return tuple(_commit(*record.split(b"\0")[:4]) for record in output.split(b"\x01")[1:])


def _commit(id: bytes, subject: bytes, author: bytes, date: bytes) -> UpstreamCommit:
    text = subject.decode("utf-8", "replace")
    number = _PULL_REQUEST.search(text)
    return UpstreamCommit(
        ObjectId(id.decode("ascii").strip()),
        text,
        author.decode("utf-8", "replace"),
        date.decode("ascii", "replace"),
        int(next(group for group in number.groups() if group)) if number else None,
    )
