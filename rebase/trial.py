"""Trying a recipe while it is written: what it would do to an upstream revision, and say of itself.

Nothing is written, not even to the mirror: the objects that a trial makes go into a repository
beside it that lasts no longer than the trial.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rebase import branch, patch, upstream
from rebase.audit import standing
from rebase.errors import UsageError
from rebase.git import Git
from rebase.manifest import QueueFolder
from rebase.objects import Objects
from rebase.outcome import Outcome, Pin
from rebase.queue import RecipeFile
from rebase.replay import Edit
from rebase.workspace import Workspace


@dataclass(frozen=True)
class Trial:
    """What a recipe does at `at`.

    outcome: what it says of itself; in a conflict the nearest code is named. diff: what it changes
    in upstream with its layers, as git writes it; empty where it changes nothing.
    """

    fork: str
    at: Pin
    outcome: Outcome
    diff: bytes
    notes: tuple[str, ...] = ()


def attempt(ws: Workspace, file: Path, *, at: str | None = None) -> Trial:
    """Run the recipe in `file` on upstream at its fork's pin, or at `at`; fetches nothing.

    The fork is the one in whose queue's folder the file lies; the series need not name it. Raises
    UsageError where there is no such fork, file or revision, or the recipe is none.
    """
    fork = _fork(ws, file)
    try:
        source = file.read_bytes()
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}.") from None
    step = branch.recipe_step(RecipeFile(file.name, source, file))
    assert not isinstance(step.does, Edit)
    target = standing(ws, fork, at)
    stand = target.new
    mirror = ws.objects(fork, stand.source).git.directory
    upstream.complete(mirror, [stand.pin.commit])
    with _beside(mirror) as objects:
        base = branch.base(objects, stand.pin.commit, stand.patches, ws.layer)
        tree = objects.tree_of(base)
        edits, outcome = step.does(objects, tree)
        after = objects.splice(tree, edits)
        diff = patch.diff(objects, tree, after) if after != tree else b""
    return Trial(fork, stand.pin, outcome, diff, target.notes)


def _fork(ws: Workspace, file: Path) -> str:
    """The fork in whose queue's folder a file lies."""
    for fork, entry in ws.project.forks.items():
        if isinstance(entry.queue, QueueFolder):
            here = ws.root / entry.queue.path
            if file.absolute().parent.resolve() == here.resolve():
                return fork
    raise UsageError(
        f"{file} lies in no fork's queue.",
        todo="Give the recipe a file in the folder of its fork, like forks/<fork>/name.py; the"
        " series need not name it yet.",
    )


@contextmanager
def _beside(mirror: Path) -> Iterator[Objects]:
    """A repository that has all that the mirror has, and that goes away."""
    with tempfile.TemporaryDirectory(prefix="forkman-") as scratch:
        Git(Path(scratch)).run("init", "--quiet", "--bare", "--template=", ".")
        borrowed = Path(scratch, "objects", "info", "alternates")
        borrowed.parent.mkdir(exist_ok=True)
        borrowed.write_text(f"{(mirror / 'objects').resolve()}\n", "utf-8")
        yield Objects(Path(scratch))
