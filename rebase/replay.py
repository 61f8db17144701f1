"""Replay: carry the changes of a branch to another base, in memory, as `git rebase` would.

A step is one change with what it was on its old base: the tree before it and the tree after it, or
a recipe that finds its own place. Replaying a step merges `before → after` into the branch so far.

- The plain case, where a change only edits files that are still there, costs no merge of whole
  trees: files that upstream left alone are spliced in, and the rest go through git's merge in one
  call for as many steps as touch different files.
- Everything else (adds, deletes, renames, modes, links, submodules, conflicts) is git's merge of
  the whole trees.

"Clean" is not trusted. Where upstream also added or removed lines that the change adds or removes,
and wherever git reports a conflict, `Upstreamed` asks hunk by hunk whether an upstream commit
already made it; what upstream has is taken out of the change, and what is left is merged again.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import pygit2

from rebase.git import EMPTY_TREE, ObjectId
from rebase.history import History, Touch
from rebase.objects import Edits, Entry, Merge, Objects
from rebase.outcome import Conflict, Hunk, Kind, Outcome, Status, Taken, UpstreamCommit


@dataclass(frozen=True)
class Edit:
    """A textual change: the trees before and after it, on the base it was made for."""

    before: ObjectId
    after: ObjectId


class Runs(Protocol):
    """A change that finds its own place in a tree: a recipe."""

    def __call__(self, objects: Objects, tree: ObjectId) -> tuple[Edits, Outcome]:
        """The edits to make to `tree`, and the outcome without commit and tree of the branch."""


@dataclass(frozen=True)
class Step:
    """One change of a queue, ready to be replayed.

    name: its file name in the series. author, message: as in the commit to make.
    """

    name: str
    author: bytes
    message: bytes
    does: Edit | Runs

    @property
    def subject(self) -> str:
        return self.message.partition(b"\n")[0].decode("utf-8", "replace")


# What a person resolved before: (the change's own commit, the head it meets) → the resolved tree.
Recall = Callable[[Step, Edit, ObjectId], ObjectId | None]


def replay(
    objects: Objects,
    steps: Sequence[Step],
    onto: ObjectId,
    history: History,
    recall: Recall | None = None,
) -> Iterator[Outcome]:
    """Replay `steps` on the commit `onto`, and yield the outcome of each, in order.

    A step in conflict is left out and the next ones go on without it, so that one run shows every
    conflict. The commits made are in `objects`; `objects.flush()` writes them.
    history: what upstream did since the steps' own base.
    """
    head, tree = onto, objects.tree_of(onto)
    upstreamed = Upstreamed(objects, history)
    lost: dict[bytes, str] = {}  # path → the step in conflict that should have changed it
    at = 0
    while at < len(steps):
        batch = _plain_steps(objects, steps, at, tree)
        merged = iter(objects.merge_files([merge for plain in batch for merge in plain.merges]))
        for plain in batch:
            results = [next(merged) for _ in plain.merges]
            if None in results or any(_both_moved(objects, *merge) for merge in plain.merges):
                break  # to the careful way below; the steps after it see another tree
            edits = plain.spliced | {
                path: entry._replace(id=blob)
                for (path, entry), blob in zip(plain.merged.items(), results, strict=True)
                if blob
            }
            step = steps[at]
            now = objects.splice(tree, edits)
            if now == tree and edits:
                break
            head, tree, at = objects.commit(now, [head], step.author, step.message), now, at + 1
            yield Outcome(step.name, step.subject, Status.APPLIED, tree, head)
        else:
            if batch:
                continue
        step = steps[at]
        at += 1
        if not isinstance(step.does, Edit):
            recipe_edits, outcome = step.does(objects, tree)
            now = objects.splice(tree, recipe_edits)
        else:
            now, outcome = _carry(objects, step, step.does, head, tree, upstreamed, recall)
            paths = objects.changed(step.does.before, step.does.after).keys()
            if outcome.status is Status.CONFLICT:
                if causes := sorted({lost[path] for path in paths & lost.keys()}):
                    outcome = replace(
                        outcome, note=f"May come from the conflict in {', '.join(causes)}."
                    )
                lost |= dict.fromkeys(paths, step.name)
        if outcome.status is Status.APPLIED:
            head, tree = objects.commit(now, [head], step.author, step.message), now
            outcome = replace(outcome, commit=head)
        yield replace(outcome, tree=tree)


@dataclass(frozen=True)
class _Plain:
    """A plain step: what to splice in, and which files to merge (path → entry, blobs to merge)."""

    spliced: dict[bytes, Entry | None]
    merged: dict[bytes, Entry]
    merges: list[tuple[ObjectId, ObjectId, ObjectId]]


def _plain_steps(objects: Objects, steps: Sequence[Step], at: int, tree: ObjectId) -> list[_Plain]:
    """The plain steps from `at` on that touch no file an earlier one of them must merge."""
    batch: list[_Plain] = []
    here: dict[bytes, Entry] = {}  # entries that differ from `tree` once the batch is spliced
    merging: set[bytes] = set()
    for step in steps[at:]:
        if not isinstance(step.does, Edit):
            break
        plain = _Plain({}, {}, [])
        for path, (was, now) in objects.changed(step.does.before, step.does.after).items():
            ours = here.get(path) or objects.find(tree, path)
            if not (was and now and ours and was.is_file and was.mode == now.mode == ours.mode):
                return batch
            if path in merging:
                return batch
            if ours == now:
                return batch  # upstream has it: the careful way says since when
            if ours == was:
                plain.spliced[path] = now
            else:
                plain.merged[path] = ours
                plain.merges.append((was.id, ours.id, now.id))
        batch.append(plain)
        here |= {path: entry for path, entry in plain.spliced.items() if entry}
        merging |= plain.merged.keys()
    return batch


def _both_moved(objects: Objects, base: ObjectId, ours: ObjectId, theirs: ObjectId) -> bool:
    """Whether upstream also added, or also removed, a line that the change adds or removes.

    Only then can a clean merge hold a hunk twice, or have taken less than the whole change.
    """
    was, upstream, now = (Counter(objects.read(id).split(b"\n")) for id in (base, ours, theirs))
    for line in (now - was) | (was - now):
        moved, change = upstream[line] - was[line], now[line] - was[line]
        if moved * change > 0 and line.strip():
            return True
    return False


def _carry(
    objects: Objects,
    step: Step,
    edit: Edit,
    head: ObjectId,
    tree: ObjectId,
    upstreamed: "Upstreamed",
    recall: Recall | None,
) -> tuple[ObjectId, Outcome]:
    """Carry one step over the careful way: its new tree, and its outcome."""
    outcome = Outcome(step.name, step.subject, Status.APPLIED, tree)
    if edit.before == edit.after:  # empty from the start; git rebase keeps such commits too
        return tree, outcome
    left, taken, rewritten = upstreamed.without(edit, tree)
    outcome = replace(outcome, taken=taken)
    merge = objects.merge(edit.before, tree, left)
    if merge.clean:
        if merge.tree == tree:
            return tree, replace(
                outcome,
                status=Status.ALREADY_UPSTREAM,
                taken=upstreamed.whole(edit, taken),
            )
        return merge.tree, outcome
    if recall and (resolved := recall(step, Edit(edit.before, left), head)):
        if resolved == tree:
            return tree, replace(outcome, status=Status.ALREADY_UPSTREAM, remembered=True)
        return resolved, replace(outcome, remembered=True)
    conflicts = _conflicts(objects, Edit(edit.before, left), tree, merge, upstreamed.history)
    return tree, replace(
        outcome,
        status=Status.CONFLICT,
        conflicts=tuple(replace(c, rewritten=rewritten.get(c.path, ())) for c in conflicts),
    )


# -- what upstream already has -------------------------------------------------------------------


class Upstreamed:
    """Finds which hunks of a change upstream made itself between the two bases.

    A hunk is upstream if some upstream commit U made it, which is decided by applying it: the hunk
    is merged into the file as it was before U; merging that with U must give what U made, no more.
    And it must still be there: taking it out of today's file must change that file. (Upstream may
    have reverted U; and where it rewrote the place since, a person decides.)
    """

    def __init__(self, objects: Objects, history: History) -> None:
        self.objects = objects
        self.history = history

    def without(
        self, edit: Edit, tree: ObjectId
    ) -> tuple[ObjectId, tuple[Taken, ...], dict[bytes, tuple[UpstreamCommit, ...]]]:
        """The tree after the change without the hunks that upstream has, what was taken, and by
        path the commits that made a hunk which upstream rewrote since.
        """
        rewritten: dict[bytes, tuple[UpstreamCommit, ...]] = {}
        edits: dict[bytes, Entry | None] = {}
        found: list[Taken] = []
        changed = self.objects.changed(edit.before, edit.after)
        both = {
            path: (was, now, ours)
            for path, (was, now) in changed.items()
            if now and now.is_file
            and (ours := self.objects.find(tree, path)) and ours.is_file
            and ours != was
        }  # fmt: skip
        self.history.load(both.keys())
        for path, (was, now, ours) in sorted(both.items()):
            touches = self.history.touching(path)
            if (
                was is None
            ):  # both added it: upstream took it whole, and may have gone on from there
                by = tuple(t.commit for t in touches if t.old is None and t.new == now.id)
                if by:
                    edits[path] = None
                    found.append(Taken(path, 1, 1, by))
            elif was.is_file:
                id, taken, rewritten[path] = self._file(path, was.id, now.id, ours.id, touches)
                if taken:
                    edits[path] = was._replace(id=id) if id == was.id else now._replace(id=id)
                    found.append(taken)
        left = self.objects.splice(edit.after, edits) if edits else edit.after
        return left, tuple(found), rewritten

    def whole(self, edit: Edit, found: tuple[Taken, ...]) -> tuple[Taken, ...]:
        """What was taken of a change of which nothing is left: every hunk of every path."""
        known = {taken.path: taken for taken in found}
        changed = self.objects.changed(edit.before, edit.after)
        self.history.load(changed.keys())
        taken: list[Taken] = []
        for path, (was, now) in sorted(changed.items()):
            total = self._total(was, now)
            by = tuple(
                touch.commit
                for touch in self.history.touching(path)
                if touch.new == (now.id if now else None)
            )
            taken.append(Taken(path, total, total, known[path].by if path in known else by))
        return tuple(taken)

    def _total(self, was: Entry | None, now: Entry | None) -> int:
        if not (was and now and was.is_file and now.is_file):
            return 1
        return len(_hunks(self.objects.read(was.id), self.objects.read(now.id)))

    def _file(
        self, path: bytes, base: ObjectId, after: ObjectId, ours: ObjectId, touches: list[Touch]
    ) -> tuple[ObjectId, Taken | None, tuple[UpstreamCommit, ...]]:
        """One file: its blob without the hunks upstream has, what was taken, what was rewritten.

        A line of spaces equals an empty line here, and no other white space is ignored.
        """
        old, new = self.objects.read(base), self.objects.read(after)
        hunks = _hunks(old, new)
        before = self._even(old)
        alone = [self._even(_apply(old, new, [hunk])) for hunk in hunks]
        today = self._even(self.objects.read(ours))
        tries: list[_Try] = []
        for touch in touches:
            if touch.old and touch.new:
                was, now = self.objects.read(touch.old), self.objects.read(touch.new)
                lines = _lines(was), _lines(now)
                tries += [
                    _Try(number, touch.commit, self._even(was), self._even(now))
                    for number, hunk in enumerate(hunks)
                    if alone[number] != before and _plausible(hunk, old, new, *lines)
                ]
        # The hunk on the file as it was before U,
        tries = self._kept(tries, [(before, t.was, alone[t.hunk]) for t in tries], lambda t: t.was)
        # merged with U, is U;
        whole = self.objects.merge_files([(t.was, t.blob, t.now) for t in tries])
        tries = [t for t, blob in zip(tries, whole, strict=True) if blob == t.now]
        # and taking it out of U's file
        tries = self._kept(tries, [(alone[t.hunk], t.now, before) for t in tries], lambda t: t.now)
        # also changes today's.
        still = self.objects.merge_files([(t.now, today, t.blob) for t in tries])
        there: dict[int, UpstreamCommit] = {}
        rewritten: dict[int, UpstreamCommit] = {}
        for t, blob in zip(tries, still, strict=True):
            if blob != today:
                (there if blob else rewritten).setdefault(t.hunk, t.commit)
        since = tuple(dict.fromkeys(rewritten[n] for n in rewritten.keys() - there.keys()))
        if not there:
            return after, None, since
        left = [hunk for number, hunk in enumerate(hunks) if number not in there]
        id = self.objects.write("blob", _apply(old, new, left)) if left else base
        by = tuple(dict.fromkeys(there.values()))
        return id, Taken(path, len(there), len(hunks), by), since

    def _kept(
        self,
        tries: list["_Try"],
        merges: list[tuple[ObjectId, ObjectId, ObjectId]],
        unchanged: Callable[["_Try"], ObjectId],
    ) -> list["_Try"]:
        """The tries whose merge is clean and changes something, with the merged blob."""
        return [
            replace(t, blob=blob)
            for t, blob in zip(tries, self.objects.merge_files(merges), strict=True)
            if blob and blob != unchanged(t)
        ]

    def _even(self, content: bytes) -> ObjectId:
        """The content as a blob, with lines of spaces made empty."""
        return self.objects.write("blob", re.sub(rb"^[ \t]+(?=\r?$)", b"", content, flags=re.M))


@dataclass(frozen=True)
class _Try:
    """Whether upstream commit U (`commit`: `was` → `now`) made a hunk; `blob`: the last merge."""

    hunk: int
    commit: UpstreamCommit
    was: ObjectId
    now: ObjectId
    blob: ObjectId = EMPTY_TREE


def _plausible(
    hunk: "_Range", old: bytes, new: bytes, was: Sequence[bytes], now: Sequence[bytes]
) -> bool:
    """Whether U can have made the hunk at all: a cheap look before four merges.

    One line tells: the longest that the hunk adds, or, if it adds none, the longest it removes.
    """
    added = _lines(new)[hunk.new_start : hunk.new_end]
    if (line := max(added, key=len, default=b"")).strip():
        return now.count(line) > was.count(line)
    line = max(_lines(old)[hunk.old_start : hunk.old_end], key=len, default=b"")
    return was.count(line) > now.count(line)


@dataclass(frozen=True)
class _Range:
    """A hunk without context: half-open ranges of lines, from 0."""

    old_start: int
    old_end: int
    new_start: int
    new_end: int


def _hunks(old: bytes, new: bytes) -> list[_Range]:
    """The hunks that lead from `old` to `new`; for binary content one that replaces everything."""
    patch = pygit2.Patch.create_from(old, new, context_lines=0, interhunk_lines=0)
    found = [
        # a hunk without lines on one side names the line before the gap
        _Range(
            start := hunk.old_start - (hunk.old_lines > 0), start + hunk.old_lines,
            into := hunk.new_start - (hunk.new_lines > 0), into + hunk.new_lines,
        )
        for hunk in patch.hunks
    ]  # fmt: skip
    return found or [_Range(0, len(_lines(old)), 0, len(_lines(new)))]


def _apply(old: bytes, new: bytes, hunks: Sequence[_Range]) -> bytes:
    """`old` with only these of the hunks made that lead to `new`."""
    before, after = _lines(old), _lines(new)
    parts: list[bytes] = []
    at = 0
    for hunk in hunks:
        parts += before[at : hunk.old_start] + after[hunk.new_start : hunk.new_end]
        at = hunk.old_end
    return b"".join(parts + before[at:])


def _lines(content: bytes) -> list[bytes]:
    """Lines as git has them: split after line feeds only."""
    return re.findall(rb"[^\n]*\n|[^\n]+", content)


# -- conflicts -----------------------------------------------------------------------------------

_KINDS = (
    ("CONFLICT (add/add)", Kind.ADD_ADD),
    ("CONFLICT (content", Kind.CONTENT),
    ("CONFLICT (modify/delete)", Kind.MODIFY_DELETE),
    ("CONFLICT (rename", Kind.RENAME),
    ("CONFLICT (directory rename", Kind.RENAME),
    ("CONFLICT (file location)", Kind.RENAME),
    ("CONFLICT (distinct modes)", Kind.MODE),
    ("CONFLICT (distinct types)", Kind.MODE),
)


def _conflicts(
    objects: Objects, edit: Edit, tree: ObjectId, merge: Merge, history: History
) -> tuple[Conflict, ...]:
    """What is in conflict, by path, with the lines and the upstream commits behind it."""
    shown = objects.merge(edit.before, tree, edit.after, "merge.conflictStyle=diff3")
    found: dict[bytes, Conflict] = {}
    for paths, _, message in merge.notes:
        kind = next((kind for text, kind in _KINDS if message.startswith(text)), Kind.OTHER)
        path = next((path for path in paths if path in merge.stages), paths[0])
        if path in found and kind is not Kind.CONTENT:
            continue
        hunks: tuple[Hunk, ...] = ()
        entry = objects.find(shown.tree, path)
        if kind in (Kind.CONTENT, Kind.ADD_ADD) and entry and entry.is_file:
            stages = merge.stages.get(path, {})
            hunks = _marked(
                objects.read(entry.id),
                *(objects.read(stages[n].id) if n in stages else b"" for n in (2, 3)),
            )
        found[path] = Conflict(path, kind, hunks, _who(history, path, hunks), detail=message)
    for path in merge.stages.keys() - found.keys():
        found[path] = Conflict(path, Kind.OTHER, detail="git left it unmerged")
    return tuple(found[path] for path in sorted(found))


def _who(history: History, path: bytes, hunks: Sequence[Hunk]) -> tuple[UpstreamCommit, ...]:
    """The upstream commits that touched the lines in conflict; without lines, the whole path."""
    if not hunks:
        return tuple(touch.commit for touch in history.touching(path))
    commits: dict[UpstreamCommit, None] = {}
    for hunk in hunks:
        # where upstream removed the lines, its commit shows at the lines around the gap
        last = max(hunk.line, hunk.line + len(_lines(hunk.upstream)) - 1)
        commits |= dict.fromkeys(
            history.of_lines(path, max(1, hunk.line - (not hunk.upstream)), last)
        )
    return tuple(commits)


def _marked(content: bytes, upstream: bytes, ours: bytes) -> tuple[Hunk, ...]:
    """Read git's conflict markers (style diff3) into hunks.

    The outer markers carry the merged commits' ids, so code cannot look like them; `=======` can be
    a line of code (a heading in a docstring), so the split is the one whose parts both files have.
    """
    hunks: list[Hunk] = []
    line = 1
    parts = re.split(
        rb"^<<<<<<< [0-9a-f]{40}\n((?:.*\n)*?)>>>>>>> [0-9a-f]{40}\n?", content, flags=re.M
    )
    for number, part in enumerate(parts):
        if number % 2 == 0:
            line += len(_lines(part))
            continue
        for bar in re.finditer(rb"^\|{7}.*\n", part, re.M):
            left, rest = part[: bar.start()], part[bar.end() :]
            split = next(
                (
                    Hunk(line, rest[: equals.start()], left, rest[equals.end() :])
                    for equals in re.finditer(rb"^={7}\n", rest, re.M)
                    if left.rstrip(b"\n") in upstream and rest[equals.end() :].rstrip(b"\n") in ours
                ),
                None,
            )
            if split:
                hunks.append(split)
                line += len(_lines(left))
                break
    return tuple(hunks)
