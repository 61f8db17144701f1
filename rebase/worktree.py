"""Worktrees: where a person edits a branch or resolves a conflict, with git's own tools.

A conflict is brought into a worktree by git's cherry-pick, so its index is really conflicted and
`git add`, mergetool and editors work as ever. git's rerere remembers how a conflict was resolved
(`rr-cache` in the mirror); `Memory` asks it in a scratch worktree that holds no other files.
"""

import os
import re
import shutil
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path

from rebase.errors import EnvironmentFault, NeedsPerson
from rebase.git import Git, GitError, ObjectId
from rebase.objects import Objects
from rebase.replay import Edit, Step

# One conflict must look the same to rerere whoever meets it.
_STYLE = ("-c", "merge.conflictStyle=zdiff3", "-c", "rerere.enabled=true")
_MARKER = re.compile(rb"^(?:[<>|]{7} .*|={7}\r?$)", re.MULTILINE)


def add(git_dir: Path, path: Path, head: ObjectId) -> None:
    """Check out `head` in a new worktree at `path`, with the user's own git configuration."""
    remove(git_dir, path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        git = Git(git_dir)
        # A mirror's branches belong to forkman, so the worktree has none.
        git.run_as_user("worktree", "add", "--detach", str(path), head)
    except (GitError, OSError) as error:
        remove(git_dir, path)
        raise EnvironmentFault(
            f"No worktree can be made at {path}: {getattr(error, 'stderr', error)}"
        ) from error


def remove(git_dir: Path, path: Path) -> None:
    """Remove a worktree and what is in it."""
    git = Git(git_dir)
    git.run("worktree", "remove", "--force", str(path), ok=(0, 128))
    shutil.rmtree(path, ignore_errors=True)  # what git does not know, of a run that was killed
    git.run("worktree", "prune")


def bring_conflict(objects: Objects, path: Path, step: Step, edit: Edit) -> None:
    """Bring the change into the worktree at `path`, up to its conflict."""
    pick = _pick(objects, step, edit)
    Git(path).run_as_user(*_STYLE, "cherry-pick", "--no-commit", pick, ok=(0, 1))


def resolution(
    objects: Objects, path: Path, fork: str, head: ObjectId, wanted: ObjectId
) -> ObjectId:
    """The tree a person made in the worktree at `path`; the resolution is remembered.

    head: the commit that was checked out there; wanted: the tree after the change that conflicts.
    A file whose conflict markers are all gone counts as resolved, staged or not. Raises NeedsPerson
    where something is still in conflict, or a deletion has to be decided.
    """
    git = Git(path)
    sides = (objects.tree_of(head), wanted)
    stages: dict[str, set[str]] = {}
    for record in git.run("ls-files", "--unmerged", "-z").split(b"\0")[:-1]:
        info, _, raw = record.partition(b"\t")
        stages.setdefault(os.fsdecode(raw), set()).add(info.split()[2].decode("ascii"))
    open_files = []
    listed = git.run_as_user("diff", "--name-only", "--no-renames", "-z", head).stdout
    for raw in sorted({*listed.split(b"\0")[:-1], *map(os.fsencode, stages)}):
        name = os.fsdecode(raw)
        file, seen = path / name, stages.get(name)
        plain = file.is_file() and not file.is_symlink()
        if seen and not (plain and {"2", "3"} <= seen):
            open_files.append(f"{name}: keep it (git add) or delete it (git rm)")
        elif plain and (line := _marked_line(objects, sides, raw, file.read_bytes())):
            open_files.append(f"{name}:{line}: a conflict marker")
    if open_files:
        raise NeedsPerson(
            f"{fork}: still in conflict in {path}:\n  " + "\n  ".join(open_files),
            kept="The worktree and the replay are as they were.",
            todo=f"Resolve them there, then: forkman continue {fork}",
        )
    git.run(*_STYLE, "rerere")
    git.run_as_user("add", "--update", ".")  # with the attributes it was checked out with
    return ObjectId(git.text("write-tree"))


def _marked_line(
    objects: Objects, sides: Sequence[ObjectId], path: bytes, content: bytes
) -> int | None:
    """The first line of a file that is a conflict marker, and no line of either side's file."""
    if not (markers := list(_MARKER.finditer(content))):
        return None
    entries = [objects.find(tree, path) for tree in sides]
    code = {line for it in entries if it for line in objects.read(it.id).splitlines()}
    for marker in markers:
        if marker[0].rstrip(b"\r") not in code:
            return content.count(b"\n", 0, marker.start()) + 1
    return None


def untracked(path: Path) -> Sequence[str]:
    """The files in a worktree that git does not know, and so will not keep."""
    listed = Git(path).run_as_user("ls-files", "--others", "--exclude-standard", "-z").stdout
    return [os.fsdecode(name) for name in listed.split(b"\0")[:-1]]


def unfinished(path: Path) -> str:
    """The git command that somebody began in a worktree and did not finish; "" for none."""
    marks = {
        "rebase-merge": "rebase",
        "rebase-apply": "rebase",
        "MERGE_HEAD": "merge",
        "CHERRY_PICK_HEAD": "cherry-pick",
        "REVERT_HEAD": "revert",
    }
    git_dir = Path(Git(path).text("rev-parse", "--absolute-git-dir"))
    return next((command for mark, command in marks.items() if (git_dir / mark).exists()), "")


def resolutions(git_dir: Path) -> tuple[str, ...]:
    """The names of the conflicts that rerere can resolve."""
    found = (git_dir / "rr-cache").glob("*/postimage*")
    return tuple(sorted({image.parent.name for image in found}))


def forget(git_dir: Path, names: Collection[str]) -> None:
    """Forget resolutions."""
    for name in names:
        shutil.rmtree(git_dir / "rr-cache" / name, ignore_errors=True)


class Memory:
    """What people resolved before: a `Recall` for the replay."""

    def __init__(self, objects: Objects) -> None:
        self.objects = objects
        self.empty = not resolutions(objects.git.directory)

    def __call__(self, step: Step, edit: Edit, head: ObjectId) -> ObjectId | None:
        """The tree as rerere resolves the conflict of `step` on `head`; None where it cannot."""
        if self.empty:
            return None
        pick = _pick(self.objects, step, edit)
        with tempfile.TemporaryDirectory(prefix="forkman-") as scratch:
            path = Path(scratch, "worktree")
            mirror = self.objects.git
            try:
                mirror.run("worktree", "add", "--no-checkout", "--detach", str(path), head)
                git = Git(path)
                sparse = Path(git.text("rev-parse", "--git-path", "info/sparse-checkout"))
                sparse = path / sparse
                sparse.parent.mkdir(parents=True, exist_ok=True)
                sparse.write_text("/.nothing-but-conflicts\n", "ascii")
                only = ("-c", "core.sparseCheckout=true")
                git.run(*only, "read-tree", "-m", "-u", "HEAD")
                again = ("-c", "rerere.autoUpdate=true", "cherry-pick", "--no-commit", pick)
                git.run(*only, *_STYLE, *again, ok=(0, 1))
                if git.run("ls-files", "--unmerged"):
                    return None
                return ObjectId(git.text("write-tree"))
            finally:
                remove(mirror.directory, path)


def _pick(objects: Objects, step: Step, edit: Edit) -> ObjectId:
    """The change as a commit that git can cherry-pick."""
    before = objects.commit(edit.before, [], step.author, b"before\n")
    pick = objects.commit(edit.after, [before], step.author, step.message)
    objects.flush()
    return pick
