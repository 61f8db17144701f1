"""Adopting: existing patches become changes of a fork's queue.

They come as downstream has them: diffs without a header or mails, one file or many, one squashed
diff or a series, with blob ids of any length. Each is applied on the fork's branch as it is:
exactly, or where that fails by a three-way merge with the blobs it names, as `git apply --3way`.
What lands in the queue is the difference it made there.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rebase import branch, landing, mail, patch
from rebase.carry import prepare
from rebase.errors import ForkmanError, NeedsPerson, UsageError
from rebase.git import Git, GitError, ObjectId
from rebase.mail import Mail
from rebase.manifest import QueueFolder
from rebase.objects import Objects
from rebase.opened import refuse_open
from rebase.queue import Queue
from rebase.workspace import Target, Workspace


@dataclass(frozen=True)
class Adopted:
    """A patch that became a change. exact: it applied as it was; otherwise it was merged.

    A series' cover letter says what the others do, and does nothing: it has no change.
    """

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
    Raises NeedsPerson, naming file, hunk and line, where a patch does not apply; all parts of it
    where it is split.
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
        for path, whole in _read(patches):
            if not whole.diff:
                adopted.append(Adopted(str(path), "", whole.subject, 0, True))
                continue
            refused: list[ForkmanError] = []
            for each in _parts(path, whole) if by_file else [whole]:
                try:
                    after, exact = _apply(ws, fork, path, each, objects, tree)
                except (NeedsPerson, UsageError) as error:
                    refused.append(error)
                    continue
                queue = queue.with_added(replace(each, diff=patch.diff(objects, tree, after)))
                files = len(objects.changed(tree, after))
                name = queue.changes[-1].name
                adopted.append(Adopted(str(path), name, each.subject, files, exact))
                tree = after
            if refused:
                raise _together(refused)
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


def _read(patches: Sequence[Path]) -> list[tuple[Path, Mail]]:
    """The changes and the cover letters that files of patches hold."""
    found = [(path, each) for path in patches for each in _mails(path)]
    if not any(each.diff for _, each in found):
        names = ", ".join(map(str, patches))
        raise UsageError(f"{names}: there is no diff in it.", kept="Nothing was adopted.")
    return found


def _mails(path: Path) -> list[Mail]:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from None
    try:
        try:
            found = mail.read_all(raw)
        except mail.NotMail:
            diff = b"".join(file.text for file in patch.parse(raw))  # without text around it
            if not diff:
                raise UsageError("there is no diff in it.") from None
            found = [Mail(_ident(), _encoded(path.stem) + b"\n", diff)]
        for each in found:
            patch.parse(each.diff)
    except (mail.BadMail, UsageError) as error:
        todo = error.todo if isinstance(error, UsageError) else ""
        raise UsageError(f"{path}: {error}", kept="Nothing was adopted.", todo=todo) from None
    return found


def _parts(path: Path, whole: Mail) -> list[Mail]:
    """A change as one for each file that it touches."""
    parts = patch.split_files(whole.diff)
    if len(parts) < 2:
        return [whole]
    origin = b"\n\nFrom " + _encoded(path.name) + b".\n"
    return [Mail(whole.author, name + origin, diff) for name, diff in parts]


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
    """The tree with the patch applied, and whether it applied exactly.

    Raises NeedsPerson where it does not apply, UsageError where it changes nothing.
    """
    after, exact = tree, True
    try:
        after = patch.apply(objects, tree, each.diff)
    except patch.Rejected as refused:
        exact = False
        try:
            after = patch.apply(objects, tree, each.diff, three_way=True)
        except patch.Rejected:
            try:  # it is there already where its opposite applies
                patch.apply(objects, tree, each.diff, reverse=True)
            except patch.Rejected:
                raise NeedsPerson(
                    f"{fork}: {path} ({each.subject}) does not apply on its branch at"
                    f" {ws.manifest(fork).pin}:\n{refused}",
                    kept="Nothing was adopted.",
                    todo="Adopt it where it was made for: set the pin in"
                    f" {ws.manifest(fork).path.name} to that commit first, then sync; or mend the"
                    " patch.",
                ) from None
    if after == tree:
        raise UsageError(
            f"{fork}: {path} ({each.subject}) changes nothing: the branch has it.",
            kept="Nothing was adopted.",
            todo="Leave it out.",
        )
    return after, exact


def _together(refused: Sequence[ForkmanError]) -> ForkmanError:
    """One error for all parts of a patch that cannot be adopted."""
    worst = min(refused, key=lambda error: error.exit_code)
    what = "\n".join(error.what for error in refused)
    kind = NeedsPerson if isinstance(worst, NeedsPerson) else UsageError
    return kind(what, kept=worst.kept, todo=worst.todo)
