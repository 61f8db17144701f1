"""A fork's changes in order, as a folder or as commits.

    forks/<fork>/series           one file name a line, in order
    forks/<fork>/fix-mask.patch   a patch change: one mail (see `rebase.mail`)
    forks/<fork>/eager_jit.py     a recipe change

In `series`, lines that begin with `#` and blank lines are for people and stay as they are. A name
says nothing about the order, so inserting a change renames none. Names differ by more than case
and Unicode form, because some file systems know no more.

A queue is a value: what changes it gives a new one. Loading one and writing its `files` keeps every
byte of `series`, and of each change that was not itself changed.
"""

import errno
import hashlib
import io
import re
import unicodedata
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from rebase import mail as mails
from rebase.errors import UsageError
from rebase.git import EMPTY_TREE, Git, ObjectId
from rebase.mail import BadMail, Mail
from rebase.words import split_lines

SERIES = "series"
# A line that names a change, with the comment right above it.
_BLOCK = re.compile(rb"^(?:[ \t]*#[^\n]*\n)*[^\S\n]*[^\s#][^\n]*\n?", re.MULTILINE)
_NAME = re.compile(r"[^\W_][^/\\\x00-\x1f\x7f-\x9f]*\.(patch|py)")


@dataclass(frozen=True)
class Patch:
    """A change that is a patch. raw: its file's content, of which `mail` is the meaning."""

    name: str
    mail: Mail
    raw: bytes


@dataclass(frozen=True)
class RecipeFile:
    """A change that is a recipe. source: its file's content; path: the file."""

    name: str
    source: bytes
    path: Path


Change = Patch | RecipeFile


@dataclass(frozen=True)
class Queue:
    """A fork's changes. series: the content of the file that orders them, naming each once."""

    series: bytes
    changes: tuple[Change, ...]

    def files(self) -> dict[str, bytes]:
        """What the queue's folder holds: each file's name and content."""
        return {SERIES: self.series} | {change.name: _content(change) for change in self.changes}

    def key(self) -> str:
        """A digest of what the queue does: its changes in order, not its comments (SHA-256)."""
        digest = hashlib.sha256()
        for change in self.changes:
            name, content = change.name.encode(), _content(change)
            digest.update(b"%d %d\n%s%s" % (len(name), len(content), name, content))
        return digest.hexdigest()

    def __getitem__(self, name: str) -> Change:
        """The change with this name. Raises UsageError where there is none."""
        for change in self.changes:
            if change.name == name:
                return change
        raise UsageError(
            f"The queue has no change {name!r}.",
            todo="It has: " + (", ".join(change.name for change in self.changes) or "none."),
        )

    def with_change(self, name: str, mail: Mail) -> "Queue":
        """The patch `name` now holds `mail`; its file stays as it is where that says the same.

        Raises UsageError where there is no such change, and for a recipe.
        """
        old = self[name]
        if not isinstance(old, Patch):
            raise UsageError(
                f"{name} is a recipe: its commit is what its code makes of upstream.",
                todo=f"Edit {old.path}, or take the recipe out and add a patch.",
            )
        if old.mail == mail:
            return self
        new = Patch(name, mail, mails.write(mail))
        return replace(
            self, changes=tuple(new if change is old else change for change in self.changes)
        )

    def without(self, name: str) -> "Queue":
        """The queue without this change and the comment right above it.

        Raises UsageError where there is no such change.
        """
        gone = self[name]
        blocks = iter(self.changes)
        return Queue(
            _BLOCK.sub(lambda block: b"" if next(blocks) is gone else block[0], self.series),
            tuple(change for change in self.changes if change is not gone),
        )

    def with_added(self, mail: Mail, after: str | None = None) -> "Queue":
        """The queue with a new patch, after the change `after` or else at its end.

        Its name is a slug of its subject. Raises UsageError where there is no change `after`.
        """
        taken = {_folded(change.name.rpartition(".")[0]) for change in self.changes}
        new = Patch(f"{slug(mail.subject, taken)}.patch", mail, mails.write(mail))
        lines = split_lines(self.series)
        at, place = len(lines), len(self.changes)
        if after is not None:
            place = self.changes.index(self[after]) + 1
            at = [_name(line) for line in lines].index(after) + 1
        return Queue(
            b"".join((*map(_ended, lines[:at]), new.name.encode() + b"\n", *lines[at:])),
            (*self.changes[:place], new, *self.changes[place:]),
        )

    def with_order(self, names: Sequence[str]) -> "Queue":
        """The same changes in this order; the comment right above a change moves with it.

        names: each change's name, once; ValueError where they are not.
        """
        now = [change.name for change in self.changes]
        if sorted(names) != sorted(now):
            raise ValueError(f"not an order of the queue's changes: {names}")
        if list(names) == now:
            return self
        blocks = dict(zip(now, _BLOCK.findall(self.series), strict=True))
        order = iter(names)
        return Queue(
            _BLOCK.sub(lambda _: _ended(blocks[next(order)]), self.series),
            tuple(self[name] for name in names),
        )


def load(folder: Path) -> Queue:
    """Read a fork's queue. folder: `forks/<fork>`.

    Raises UsageError whose `what` lists all mistakes, one a line.
    """
    here = "/".join(folder.parts[-2:])
    mistakes: list[str] = []
    changes: list[Change] = []
    listed: dict[str, str] = {}
    try:
        series = _read(folder / SERIES)
    except OSError as error:
        raise UsageError(
            f"{here}/{SERIES}: {error.strerror}",
            todo=f"Give the fork a file {here}/{SERIES} that names its changes; it may be empty.",
        ) from None
    for number, line in enumerate(split_lines(series), 1):
        where = f"{here}/{SERIES}:{number}"
        try:
            name = _name(line)
        except UnicodeDecodeError:
            mistakes.append(f"{where}: not UTF-8")
            continue
        if name is None:
            continue
        if not _NAME.fullmatch(name):
            mistakes.append(
                f"{where}: {name!r} cannot name a change; a name begins with a letter or digit, "
                "holds no slash and no control character, and ends in .patch or .py"
            )
            continue
        if other := listed.get(_folded(name)):
            mistakes.append(
                f"{where}: {name} is listed twice"
                if other == name
                else f"{where}: {name} and {other} are one file where case does not matter"
            )
            continue
        listed[_folded(name)] = name
        try:
            changes.append(_change(folder / name))
        except OSError as error:
            mistakes.append(f"{here}/{name}: {error.strerror}")
        except BadMail as error:
            mistakes.append(f"{here}/{name}: {error}")
    mistakes += [
        f"{here}/{file.name}: not listed in {SERIES}, so it would not be applied"
        for file in sorted(folder.iterdir())
        if file.suffix in (".patch", ".py")
        and not file.name.startswith(".")
        and _folded(file.name) not in listed
    ]
    if mistakes:
        raise UsageError("\n".join(mistakes), todo="Correct the queue, then run this again.")
    return Queue(series, tuple(changes))


class Branch(NamedTuple):
    """The changes that a range of commits holds.

    commits, mails: each change's commit and what it says, oldest first.
    merges: the merge commits of the range, which like in git-rebase are no changes.
    """

    commits: list[ObjectId]
    mails: list[Mail]
    merges: list[ObjectId]


def from_commits(
    git: Git, base: ObjectId, tip: ObjectId, diff: Callable[[ObjectId, ObjectId], bytes]
) -> Branch:
    """Read the commits of base..tip as changes, in the order in which git-rebase takes them.

    Messages and authors are those from before the commits went through mail, if they did, and in
    UTF-8 where their commit declares another encoding.
    diff: makes the patch from one tree or commit to another; a root's is from the empty tree.
    Raises UsageError for a commit whose author is not as git writes it.
    """
    branch = Branch([], [], [])
    listing = git.text("rev-list", "--topo-order", "--reverse", "--parents", f"{base}..{tip}")
    parents: dict[ObjectId, ObjectId] = {}
    for line in listing.splitlines():
        commit, *its = map(ObjectId, line.split())
        if len(its) > 1:
            branch.merges.append(commit)
        else:
            branch.commits.append(commit)
            parents[commit] = its[0] if its else EMPTY_TREE
    for commit, content in zip(branch.commits, _contents(git, branch.commits), strict=True):
        author, message = _read_commit(content)
        patch = diff(parents[commit], commit)
        try:
            mail = Mail(mails.original_author(author, message), mails.original(message), patch)
        except ValueError as error:
            raise UsageError(f"The commit {commit} cannot be a change: {error}.") from None
        branch.mails.append(mail)
    return branch


def _contents(git: Git, ids: Sequence[ObjectId]) -> Iterator[bytes]:
    """The contents of objects, read in one go."""
    output = io.BytesIO(git.run("cat-file", "--batch", input="\n".join(ids).encode() + b"\n"))
    for _ in ids:
        yield output.read(int(output.readline().split()[2]) + 1)[:-1]


def _read_commit(content: bytes) -> tuple[bytes, bytes]:
    """A commit's author, in UTF-8, and its message, in UTF-8 if the commit says what it is in."""
    headers, _, message = content.partition(b"\n\n")
    fields = dict(line.split(b" ", 1) for line in headers.split(b"\n") if not line.startswith(b" "))
    encoding = fields.get(b"encoding", b"utf-8").decode("ascii", "replace")
    author = _recoded(fields.get(b"author", b""), encoding)
    try:
        author.decode()
    except UnicodeDecodeError:
        author = author.decode("latin-1").encode()  # as git has it; a mail's must be UTF-8
    return author, _recoded(message, encoding)


def _recoded(content: bytes, encoding: str) -> bytes:
    """In UTF-8, if it is in this encoding."""
    try:
        return content.decode(encoding).encode()
    except (LookupError, ValueError):  # no such encoding, or not in it
        return content


def slug(subject: str, taken: Container[str]) -> str:
    """A file name, without its extension, for a change with this subject.

    It is of lower case ASCII letters, digits and hyphens, so it is the same on every file system.
    A long subject keeps its beginning; one that is a path keeps its end, which tells more.
    taken: the names it must not be, without extension and in lower case.
    """
    words = re.findall(r"[a-z0-9]+", subject.lower())
    is_path = "/" in subject and " " not in subject
    while len(words) > 1 and len("-".join(words)) > 50:
        words.pop(0 if is_path else -1)
    name = "-".join(words)[:50] or "change"
    found, number = name, 1
    while found in taken:
        number += 1
        found = f"{name}-{number}"
    return found


def _content(change: Change) -> bytes:
    return change.raw if isinstance(change, Patch) else change.source


def _change(path: Path) -> Change:
    content = _read(path)
    if path.suffix == ".py":
        return RecipeFile(path.name, content, path)
    return Patch(path.name, mails.read(content), content)


def _read(path: Path) -> bytes:
    """A file's content. Raises OSError, also for what is no plain file."""
    if path.is_symlink():
        raise OSError(errno.ELOOP, "a symbolic link; a queue holds its files itself")
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a plain file")
    return path.read_bytes()


def _name(line: bytes) -> str | None:
    """The name on a line of `series`; None for a comment or a blank line."""
    name = line.strip()
    return None if not name or name.startswith(b"#") else name.decode()


def _ended(line: bytes) -> bytes:
    return line if line.endswith(b"\n") else line + b"\n"


def _folded(name: str) -> str:
    """The same for names that some file system takes for one."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())
