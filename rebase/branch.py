"""A fork's branch: what it stands on (pin and layers), and its queue as steps to replay.

The branch itself is never kept as the truth: manifests and queue are, and it is made from them.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import groupby
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from rebase import patch
from rebase.errors import UsageError
from rebase.git import EMPTY_TREE, ObjectId
from rebase.history import History
from rebase.mail import Mail
from rebase.objects import EXECUTABLE, FILE, Edits, Entry, Objects
from rebase.outcome import Layer, Outcome, Status, UpstreamCommit
from rebase.queue import Patch, Queue, RecipeFile, from_commits, slug
from rebase.replay import Edit, Step, bring_touched

if TYPE_CHECKING:
    from rebase.recipe import Find, Recipe

_AUTHOR = b"forkman <forkman@localhost> 0 +0000"


def base(
    objects: Objects, pin: ObjectId, layers: Sequence[Layer], content: Callable[[Layer], bytes]
) -> ObjectId:
    """The commit a fork's changes go on: the pin, or the pin with its layers as one commit.

    content: reads a layer's patch. Raises UsageError where a layer does not apply.
    """
    if not layers:
        return pin
    tree = objects.tree_of(pin)
    for layer in layers:
        try:
            tree = patch.apply(objects, tree, content(layer))
        except patch.Rejected as error:
            raise UsageError(
                f"{layer.fork}'s {layer.path} ({layer.blob[:9]}) does not apply on {pin[:9]}:\n"
                f"{error}",
                todo="A layer and a pin go together: see which release of"
                f" {layer.fork} that upstream commit belongs to.",
            ) from None
    names = "".join(f"{layer.fork} {layer.path} {layer.blob}\n" for layer in layers)
    return objects.commit(tree, [pin], _AUTHOR, b"Layers of other forks\n\n" + names.encode())


def steps(objects: Objects, fork: str, onto: ObjectId, queue: Queue) -> list[Step]:
    """The changes of `queue` as steps: each patch with its trees when applied on the base `onto`.

    Raises UsageError where a patch does not apply on the base it was made for, or a recipe finds
    nothing there.
    """
    tree = objects.tree_of(onto)
    found: list[Step] = []
    for is_patch, changes in groupby(queue.changes, lambda change: isinstance(change, Patch)):
        if is_patch:
            patches = [change for change in changes if isinstance(change, Patch)]
            trees = patch.apply_series(objects, tree, [change.mail.diff for change in patches])
            for change in patches:
                before = tree
                try:
                    tree = next(trees)
                except patch.Rejected as error:
                    raise UsageError(
                        f"{fork}: {change.name} does not apply on its own pin:\n{error}",
                        todo="It was edited by hand, or the pin was changed without its queue.",
                    ) from None
                mail = change.mail
                found.append(Step(change.name, mail.author, mail.message, Edit(before, tree)))
        else:
            for recipe in changes:
                assert isinstance(recipe, RecipeFile)
                step = recipe_step(recipe)
                assert not isinstance(step.does, Edit)
                edits, outcome = step.does(objects, tree)
                if outcome.status is Status.CONFLICT:
                    raise UsageError(
                        f"{fork}: the recipe {recipe.name} does not fit the pin: "
                        + "; ".join(conflict.detail for conflict in outcome.conflicts),
                        todo=f"Correct {recipe.path}.",
                    )
                tree = objects.splice(tree, edits)
                found.append(step)
    return found


def branch_steps(
    objects: Objects, onto: ObjectId, tip: ObjectId
) -> tuple[list[Step], list[ObjectId]]:
    """The commits onto..tip, oldest first, as steps; and the merges, which git rebase drops.

    A step has a slug of its subject as name: unlike a commit's id, it outlives a rebase.
    """
    branch = from_commits(objects.git, onto, tip, lambda old, new: b"")
    found, names = list[Step](), set[str]()
    for id, mail in zip(branch.commits, branch.mails, strict=True):
        parent = objects.read(id).split(b"\n", 2)[1]
        before = (
            objects.tree_of(ObjectId(parent[7:].decode("ascii")))
            if parent.startswith(b"parent ")
            else EMPTY_TREE
        )
        edit = Edit(before, objects.tree_of(id))
        name = slug(mail.subject, names)
        names.add(name)
        found.append(Step(name, mail.author, mail.message, edit))
    return found, branch.merges


def chain(objects: Objects, onto: ObjectId, steps: Sequence[Step]) -> ObjectId:
    """The last commit of the branch that the steps make on their own base."""
    head, tree = onto, objects.tree_of(onto)
    for step in steps:
        if isinstance(step.does, Edit):
            after = step.does.after
        else:
            edits, outcome = step.does(objects, tree)
            if outcome.status is not Status.APPLIED:
                continue
            after = objects.splice(tree, edits)
        head, tree = objects.commit(after, [head], step.author, step.message), after
    return head


def recipe_step(change: RecipeFile) -> Step:
    """A recipe as a step: it finds its place in whatever tree the branch has by then."""
    from rebase import recipe

    loaded = recipe.load(change.path, change.source)
    return Step(change.name, loaded.author, loaded.message(), _Runs(change.name, loaded))


class _Runs:
    """What a recipe's step does."""

    def __init__(self, name: str, recipe: "Recipe") -> None:
        self._name = name
        self._recipe = recipe
        # Making the steps, the branch's old state and a replay that stays ask for the same trees.
        self._ran = cache(self._run)

    def __call__(self, objects: Objects, tree: ObjectId) -> tuple[Edits, Outcome]:
        return self._ran(objects, tree)

    def _run(self, objects: Objects, tree: ObjectId) -> tuple[Edits, Outcome]:
        from rebase.recipe import NewFile

        found = self._recipe.run(Files(objects, tree))
        edits: dict[bytes, Entry | None] = {}
        for path, content in found.edits.items():
            if isinstance(content, NewFile):
                mode = EXECUTABLE if content.executable else FILE
                edits[path] = Entry(mode, objects.write("blob", content.content))
            else:
                was = objects.find(tree, path)
                assert was, "a recipe edits files that are there"
                edits[path] = was._replace(id=objects.write("blob", content))
        outcome = Outcome(
            self._name,
            self._recipe.subject.strip(),
            found.status,
            tree,
            conflicts=found.conflicts,
            places=found.places,
            new_places=found.new_places,
            note=found.note,
        )
        return edits if found.status is Status.APPLIED else {}, outcome

    def by(self, objects: Objects, history: History) -> tuple[UpstreamCommit, ...]:
        """The upstream commits that left nothing to do at the end of `history`."""
        if history.old == history.new:
            return ()
        commits: list[UpstreamCommit] = []
        # upstream's own tree: in the branch's the queue's earlier changes have moved the lines
        found = self._recipe.run(Files(objects, objects.tree_of(history.new)))
        objects.flush()  # git reads the history, and a base with layers may be new
        history.load({path for path, *_ in found.already})
        for path, first, last in found.already:
            bring_touched(objects, history.touching(path))
            commits += history.of_lines(path, [(first, last)])
        for guard in found.unneeded:
            commits += _emptied(objects, guard, history)
        return tuple(dict.fromkeys(commits))


def _emptied(objects: Objects, guard: "Find", history: History) -> list[UpstreamCommit]:
    """The newest upstream commit that took away the last match of `guard`, if there was one."""
    from rebase.recipe import holders

    def held(tree: ObjectId) -> set[bytes]:
        return holders(guard, Files(objects, tree))

    def in_file(path: bytes, entry: Entry | None) -> bool:
        return bool(entry and held(objects.splice(EMPTY_TREE, {path: entry})))

    waiting, seen = held(objects.tree_of(history.old)), set[bytes]()
    while waiting - seen:
        history.load(waiting)
        path = min(waiting - seen)
        seen.add(path)
        bring_touched(objects, history.touching(path))
        for touch in history.touching(path):
            if in_file(path, touch.old) and not in_file(path, touch.new):
                left = held(objects.tree_of(touch.commit.id))
                if not left:
                    return [touch.commit]
                waiting |= left  # it moved there, and went from there later
                break
    return []


# Each recipe looks through much the same files, in the old base's tree and in the new one's.
_contents: WeakKeyDictionary[Objects, dict[ObjectId, bytes]] = WeakKeyDictionary()


class Files:
    """The regular files of a tree, as recipes read them."""

    def __init__(self, objects: Objects, tree: ObjectId) -> None:
        self._objects = objects
        self._known = _contents.setdefault(objects, {})
        self._files = {path: entry for path, entry in objects.walk(tree) if entry.is_file}

    def paths(self, under: bytes = b"") -> Iterable[bytes]:
        return (path for path in self._files if path.startswith(under))

    def read(self, path: bytes) -> bytes | None:
        if not (entry := self._files.get(path)):
            return None
        if entry.id not in self._known:
            self._known[entry.id] = self._objects.read(entry.id)
        return self._known[entry.id]

    def grep(self, literal: bytes, paths: Iterable[bytes]) -> Iterable[bytes]:
        paths = [path for path in paths if path in self._files]
        # what a blobless mirror lacks of them comes in one fetch, not in one a file
        self._objects.bring(list({self._files[path].id for path in paths} - self._known.keys()))
        return (path for path in paths if literal in (self.read(path) or b""))


def mails(
    objects: Objects, queue_steps: Sequence[Step], outcomes: Sequence[Outcome], onto: ObjectId
) -> list[tuple[Outcome, Mail]]:
    """The applied changes of a replay as mails, in order: for the exports and the queue."""
    tree = objects.tree_of(onto)
    found: list[tuple[Outcome, Mail]] = []
    for step, outcome in zip(queue_steps, outcomes, strict=True):
        if outcome.status is Status.APPLIED:
            text = patch.diff(objects, tree, outcome.tree)
            found.append((outcome, Mail(step.author, step.message, text)))
        tree = outcome.tree
    return found
