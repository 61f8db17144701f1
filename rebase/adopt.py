"""Adopting: existing patches become changes of a fork's queue.

They come as downstream has them: diffs without a header or mails, one file or many, one squashed
diff or a series, with blob ids of any length. Each is applied on the fork's branch as it is:
exactly, or where that fails by a three-way merge with the blobs it names, as `git apply --3way`.
What lands in the queue is the difference it made there.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from rebase import branch, landing, mail, patch
from rebase.carry import prepare
from rebase.errors import NeedsPerson, UsageError
from rebase.git import Git, GitError, ObjectId
from rebase.mail import Mail
from rebase.manifest import QueueFolder
from rebase.objects import Objects
from rebase.opened import refuse_open
from rebase.queue import Queue
from rebase.workspace import Target, Workspace


@dataclass(frozen=True)
class Adopted:
    """A patch that became a change. exact: it applied as it was; otherwise it was merged."""

    source: str
    change: str
    subject: str
    files: int
    exact: bool


def adopt(
    ws: Workspace, fork: str, patches: Sequence[Path], *, by_file: bool = False
) -> list[Adopted]:
    """Append patches to the queue of a fork, all of them or none.

    by_file: make a change of each file that a patch touches.
    Raises NeedsPerson, naming file, hunk and line, where a patch does not apply.
    """
    where = ws.manifest(fork).queue
    if not isinstance(where, QueueFolder):
        raise UsageError(
            f"{fork}: its queue is the branch {where.ref} of {where.url}.",
            todo="Commit the patch there.",
        )
    with ws.lock():
        refuse_open(ws, [fork])
        stand = ws.stand(fork, ws.source(fork))
        made = prepare(ws, Target(fork, stand, stand, "stays"))
        objects = made.objects
        tree = objects.tree_of(branch.chain(objects, made.new, made.steps))
        assert isinstance(made.queue, Queue)
        queue = made.queue
        adopted: list[Adopted] = []
        for path in patches:
            for each in _mails(path, by_file):
                after, exact = _apply(ws, fork, path, each, objects, tree)
                if after == tree:
                    raise UsageError(
                        f"{fork}: {path} ({each.subject}) changes nothing: the branch has it.",
                        kept="Nothing was adopted.",
                        todo="Leave it out.",
                    )
                queue = queue.with_added(replace(each, diff=patch.diff(objects, tree, after)))
                files = len(objects.changed(tree, after))
                name = queue.changes[-1].name
                adopted.append(Adopted(str(path), name, each.subject, files, exact))
                tree = after
        folder = ws.root / where.path
        old = made.queue.files()
        landing.land(
            ws.landing,
            landing.Landing(
                {folder / name: content for name, content in queue.files().items()},
                seen={folder / name: content for name, content in old.items()},
            ),
        )
    return adopted


def _mails(path: Path, by_file: bool) -> Iterator[Mail]:
    """The changes that a file of patches holds."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from None
    try:
        try:
            found = mail.read_all(raw)
        except mail.NotMail:
            diff = b"".join(file.text for file in patch.parse(raw))  # without text around it
            found = [Mail(_ident(), _encoded(path.stem) + b"\n", diff)]
        # A series' cover letter says what the others do, and does nothing.
        found = [each for each in found if each.diff]
        if not found:
            raise UsageError("there is no diff in it.")
        split = [patch.split_files(each.diff) for each in found]
    except (mail.BadMail, UsageError) as error:
        todo = error.todo if isinstance(error, UsageError) else ""
        raise UsageError(f"{path}: {error}", kept="Nothing was adopted.", todo=todo) from None
    for each, parts in zip(found, split, strict=True):
        if not by_file or len(parts) < 2:
            yield each
            continue
        for name, diff in parts:
            yield Mail(each.author, name + b"\n\nFrom " + _encoded(path.name) + b".\n", diff)


def _encoded(name: str) -> bytes:
    return name.encode("utf-8", "replace")


def _ident() -> bytes:
    """Who adopts, and when: the author of a patch that names none."""
    try:
        return Git(Path.cwd()).run_as_user("var", "GIT_AUTHOR_IDENT").stdout.strip()
    except GitError as error:
        raise UsageError(
            f"The patch names no author, and git does not know who you are: {error.stderr}",
            todo="git config --global user.name … and user.email …",
        ) from None


def _apply(
    ws: Workspace, fork: str, path: Path, each: Mail, objects: Objects, tree: ObjectId
) -> tuple[ObjectId, bool]:
    """The tree with the patch applied, and whether it applied exactly."""
    try:
        return patch.apply(objects, tree, each.diff), True
    except patch.Rejected as error:
        refused = error
    try:
        return patch.apply(objects, tree, each.diff, three_way=True), False
    except patch.Rejected:
        with suppress(patch.Rejected):
            patch.apply(objects, tree, each.diff, reverse=True)
            return tree, False  # it is there already, as its opposite applies
        raise NeedsPerson(
            f"{fork}: {path} ({each.subject}) does not apply on its branch at"
            f" {ws.manifest(fork).pin}:\n{refused}",
            kept="Nothing was adopted.",
            todo=f"Adopt it where it was made for: set the pin in {ws.manifest(fork).path.name}"
            " to that commit first, then sync; or mend the patch.",
        ) from None
