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
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import pygit2

from rebase.git import EMPTY_TREE, ObjectId
from rebase.history import History, Touch
from rebase.objects import Changes, Edits, Entry, FileMerge, Merge, Objects
from rebase.outcome import Conflict, Hunk, Kind, Outcome, Status, Taken, UpstreamCommit
from rebase.words import split_lines


@dataclass(frozen=True)
class Edit:
    """A textual change: the trees before and after it, on the base it was made for."""

    before: ObjectId
    after: ObjectId


class Runs(Protocol):
    """A change that finds its own place in a tree: a recipe."""

    def __call__(self, objects: Objects, tree: ObjectId) -> tuple[Edits, Outcome]:
        """The edits to make to `tree`, and the outcome without commit and tree of the branch."""

    def by(self, objects: Objects, history: History) -> tuple[UpstreamCommit, ...]:
        """The upstream commits that left nothing to do at the end of `history`, newest first."""


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
    changes = [
        objects.changed(step.does.before, step.does.after) if isinstance(step.does, Edit) else None
        for step in steps
    ]
    upstreamed = Upstreamed(objects, history, {path for change in changes for path in change or ()})
    lost: dict[bytes, str] = {}  # path → the step in conflict that should have changed it
    at = 0
    while at < len(steps):
        batch = _plain_steps(objects, changes[at:], tree, upstreamed)
        merged = iter(objects.merge_files([merge for plain in batch for merge in plain.merges]))
        for plain in batch:
            blobs = [next(merged) for _ in plain.merges]
            if None in blobs:
                break  # to the careful way below; the steps after it see another tree
            edits = plain.spliced | {
                path: entry._replace(id=blob)
                for (path, entry), blob in zip(plain.merged.items(), blobs, strict=True)
                if blob
            }
            now = objects.splice(tree, edits)
            if now == tree and edits:
                break
            step, at = steps[at], at + 1
            head, tree = objects.commit(now, [head], step.author, step.message), now
            yield Outcome(step.name, step.subject, Status.APPLIED, tree, head)
        else:
            if batch:
                continue
        step, at = steps[at], at + 1
        if isinstance(step.does, Edit):
            now, outcome = _carry(objects, step, step.does, head, tree, upstreamed, recall)
        else:
            recipe_edits, outcome = step.does(objects, tree)
            now = objects.splice(tree, recipe_edits)
            if outcome.status in (Status.ALREADY_UPSTREAM, Status.NOT_NEEDED):
                outcome = replace(outcome, by=step.does.by(objects, history))
        if outcome.status is Status.CONFLICT:
            paths = changes[at - 1] or {}
            if causes := sorted({lost[path] for path in paths.keys() & lost.keys()}):
                note = f"May come from the conflict in {', '.join(causes)}."
                outcome = replace(outcome, note=note)
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
    merges: list[FileMerge]


def _plain_steps(
    objects: Objects,
    changes: Sequence[Changes | None],
    tree: ObjectId,
    upstreamed: "Upstreamed",
) -> list[_Plain]:
    """The first of the changes, as far as they are plain and need no file that an earlier one of
    them must merge; None is a recipe.
    """
    batch: list[_Plain] = []
    here: dict[bytes, Entry] = {}  # entries that differ from `tree` once the batch is spliced
    merging: set[bytes] = set()
    for change in changes:
        if change is None:
            return batch
        plain = _Plain({}, {}, [])
        for path, (was, now) in change.items():
            ours = here.get(path) or objects.find(tree, path)
            if not (was and now and ours and was.is_file and was.mode == now.mode == ours.mode):
                return batch
            if path in merging or ours == now:
                return batch  # where upstream has it, the careful way says since when
            if ours == was:
                plain.spliced[path] = now
            elif upstreamed.may_have((was.id, ours.id, now.id)):
                return batch
            else:
                plain.merged[path] = ours
                plain.merges.append((was.id, ours.id, now.id))
        batch.append(plain)
        here |= {path: entry for path, entry in plain.spliced.items() if entry}
        merging |= plain.merged.keys()
    return batch


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
    merge = objects.merge(edit.before, tree, edit.after)
    left, taken, rewritten = upstreamed.without(edit, tree, merge.stages.keys())
    rest = edit
    if taken and not (merge.clean and merge.tree == tree):
        merge = objects.merge(edit.before, tree, left)
        rest = Edit(edit.before, left)
        outcome = replace(outcome, taken=taken)
    if merge.clean:
        if merge.tree != tree:
            return merge.tree, outcome
        taken = upstreamed.whole(edit, taken)
        return tree, replace(outcome, status=Status.ALREADY_UPSTREAM, taken=taken)
    if recall and (resolved := recall(step, rest, head)):
        if resolved == tree:
            return tree, replace(outcome, status=Status.ALREADY_UPSTREAM, remembered=True)
        return resolved, replace(outcome, remembered=True)
    conflicts = _conflicts(objects, rest, tree, merge, upstreamed.history)
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

    def __init__(self, objects: Objects, history: History, paths: Collection[bytes] = ()) -> None:
        """paths: what will be asked for, as one walk of the history is what takes the time."""
        self.objects = objects
        self.history = history
        self.paths = paths
        self._may_have: dict[FileMerge, bool] = {}

    def may_have(self, merge: FileMerge) -> bool:
        """Whether upstream also added, or also removed, a line that the change adds or removes.

        Only then can a clean merge hold a hunk twice, or have taken less than the whole change.
        """
        if merge not in self._may_have:
            was, ours, now = (Counter(self.objects.read(id).split(b"\n")) for id in merge)
            self._may_have[merge] = any(
                (ours[line] - was[line]) * (now[line] - was[line]) > 0 and line.strip()
                for line in {line for line, _ in was.items() ^ now.items()}
            )
        return self._may_have[merge]

    def without(
        self, edit: Edit, tree: ObjectId, conflicted: Collection[bytes]
    ) -> tuple[ObjectId, tuple[Taken, ...], dict[bytes, tuple[UpstreamCommit, ...]]]:
        """The tree after the change without the hunks that upstream has, what was taken, and by
        path the commits that made a hunk which upstream rewrote since.
        """
        changed = self.objects.changed(edit.before, edit.after)
        self.history.load({*self.paths, *changed})
        renamed = self.objects.renames(edit.before, edit.after) if conflicted else {}
        edits: dict[bytes, Entry | None] = {}
        found: list[Taken] = []
        hunks: dict[bytes, list[_Range]] = {}
        tries: list[_Try] = []
        for path, (was, now) in changed.items():
            ours = self.objects.find(tree, path)
            if not (now and now.is_file and ours and ours.is_file and ours != was):
                continue
            touches = self.history.touching(path)
            if was is None and path in conflicted:
                # both added it: upstream took it, and may have gone on from there
                by = tuple(t.commit for t in touches if t.old is None and t.new == now)
                old = renamed.get(path)
                if by and not (old and self.objects.find(tree, old)):
                    edits[path] = None
                    if old:  # so that upstream's own rename is there for git to find
                        edits[old] = changed[old][0]
                    found.append(Taken(path, 1, 1, by))
            elif was and was.is_file:
                hunks[path] = _hunks(self.objects.read(was.id), self.objects.read(now.id))
                tries += self._tries(path, was.id, now.id, ours.id, hunks[path], touches)
        there, lost = self._made(tries)
        for path, in_upstream in there.items():
            was, now = changed[path]
            assert was and now
            old, new = self.objects.read(was.id), self.objects.read(now.id)
            left = [hunk for number, hunk in enumerate(hunks[path]) if number not in in_upstream]
            edits[path] = now._replace(id=self.objects.write("blob", _apply(old, new, left)))
            by = tuple(dict.fromkeys(in_upstream.values()))
            found.append(Taken(path, len(in_upstream), len(hunks[path]), by))
        rewritten = {
            path: tuple(dict.fromkeys(by for number, by in commits.items()
                                      if number not in there.get(path, {})))
            for path, commits in lost.items()
        }  # fmt: skip
        found.sort(key=lambda taken: taken.path)
        return self.objects.splice(edit.after, edits), tuple(found), rewritten

    def whole(self, edit: Edit, found: tuple[Taken, ...]) -> tuple[Taken, ...]:
        """What was taken of a change of which nothing is left: every hunk of every path."""
        known = {taken.path: taken for taken in found}
        changed = self.objects.changed(edit.before, edit.after)
        self.history.load({*self.paths, *changed})
        taken: list[Taken] = []
        for path, (was, now) in sorted(changed.items()):
            total = self._total(was, now)
            by = tuple(t.commit for t in self.history.touching(path) if t.new == now)
            taken.append(Taken(path, total, total, known[path].by if path in known else by))
        return tuple(taken)

    def _total(self, was: Entry | None, now: Entry | None) -> int:
        if not (was and now and was.is_file and now.is_file):
            return 1
        return len(_hunks(self.objects.read(was.id), self.objects.read(now.id)))

    def _tries(
        self, path: bytes, base: ObjectId, after: ObjectId, ours: ObjectId,
        hunks: Sequence["_Range"], touches: Sequence[Touch],
    ) -> Iterator["_Try"]:  # fmt: skip
        """Each of the hunks with each upstream commit that may have made it.

        A line of spaces equals an empty line here, and no other white space is ignored.
        """
        old, new = self.objects.read(base), self.objects.read(after)
        before, today = self._even(old), self._even(self.objects.read(ours))
        alone = [self._even(_apply(old, new, [hunk])) for hunk in hunks]
        bring_touched(self.objects, touches)
        for touch in touches:
            if not (touch.old and touch.new and touch.old.is_file and touch.new.is_file):
                continue
            was, now = self.objects.read(touch.old.id), self.objects.read(touch.new.id)
            lines = split_lines(was), split_lines(now)
            for number, hunk in enumerate(hunks):
                if alone[number] != before and _plausible(hunk, old, new, *lines):
                    yield _Try(
                        path, number, touch.commit, before, alone[number],
                        self._even(was), self._even(now), today,
                    )  # fmt: skip

    def _made(self, tries: list["_Try"]) -> tuple["_Made", "_Made"]:
        """By path and hunk the upstream commit that made it: where it is still there, and where
        upstream rewrote the place since.
        """
        # The hunk on the file as it was before U,
        tries = self._kept(tries, [(t.base, t.was, t.alone) for t in tries], lambda t: t.was)
        # merged with U, is U;
        whole = self.objects.merge_files([(t.was, t.blob, t.now) for t in tries])
        tries = [t for t, blob in zip(tries, whole, strict=True) if blob == t.now]
        # and taking it out of U's file
        tries = self._kept(tries, [(t.alone, t.now, t.base) for t in tries], lambda t: t.now)
        # also changes today's.
        still = self.objects.merge_files([(t.now, t.today, t.blob) for t in tries])
        there: _Made = {}
        rewritten: _Made = {}
        for t, blob in zip(tries, still, strict=True):
            if blob != t.today:
                found = there if blob else rewritten
                found.setdefault(t.path, {}).setdefault(t.hunk, t.commit)
        return there, rewritten

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


_Made = dict[bytes, dict[int, UpstreamCommit]]  # path → number of the hunk → who made it


def bring_touched(objects: Objects, touches: Sequence[Touch]) -> None:
    """Have the contents of what upstream did here, which a blobless mirror has to fetch."""
    sides = {side for touch in touches for side in (touch.old, touch.new)}
    objects.bring([side.id for side in sides if side and side.is_file])


@dataclass(frozen=True)
class _Try:
    """Whether upstream commit U (`commit`: `was` → `now`) made a hunk of the change to `path`.

    alone: the file `base` with only that hunk made; today: the file as the branch has it;
    blob: the last merge.
    """

    path: bytes
    hunk: int
    commit: UpstreamCommit
    base: ObjectId
    alone: ObjectId
    was: ObjectId
    now: ObjectId
    today: ObjectId
    blob: ObjectId = EMPTY_TREE


def _plausible(
    hunk: "_Range", old: bytes, new: bytes, was: Sequence[bytes], now: Sequence[bytes]
) -> bool:
    """Whether U can have made the hunk at all: a cheap look before four merges.

    One line tells: the longest that the hunk adds, or, if it adds none, the longest it removes.
    """
    added = split_lines(new)[hunk.new_start : hunk.new_end]
    if (line := max(added, key=len, default=b"")).strip():
        return now.count(line) > was.count(line)
    line = max(split_lines(old)[hunk.old_start : hunk.old_end], key=len, default=b"")
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
    if old == new:
        return []
    patch = pygit2.Patch.create_from(old, new, context_lines=0, interhunk_lines=0)
    found = [
        # a hunk without lines on one side names the line before the gap
        _Range(
            start := hunk.old_start - (hunk.old_lines > 0), start + hunk.old_lines,
            into := hunk.new_start - (hunk.new_lines > 0), into + hunk.new_lines,
        )
        for hunk in patch.hunks
    ]  # fmt: skip
    return found or [_Range(0, len(split_lines(old)), 0, len(split_lines(new)))]


def _apply(old: bytes, new: bytes, hunks: Sequence[_Range]) -> bytes:
    """`old` with only these of the hunks made that lead to `new`."""
    before, after = split_lines(old), split_lines(new)
    parts: list[bytes] = []
    at = 0
    for hunk in hunks:
        parts += before[at : hunk.old_start] + after[hunk.new_start : hunk.new_end]
        at = hunk.old_end
    return b"".join(parts + before[at:])


# -- conflicts -----------------------------------------------------------------------------------

# git's own short words for a conflict, which stay the same over its versions.
_KINDS = {
    "CONFLICT (contents)": Kind.CONTENT,
    "CONFLICT (modify/delete)": Kind.MODIFY_DELETE,
    "CONFLICT (distinct modes)": Kind.MODE,
    "CONFLICT (rename/rename)": Kind.RENAME,
    "CONFLICT (rename/delete)": Kind.RENAME,
    "CONFLICT (rename involved in collision)": Kind.RENAME,
    "CONFLICT (directory rename suggested)": Kind.RENAME,
    "CONFLICT (file in way of directory rename)": Kind.RENAME,
    "CONFLICT (directory rename collision)": Kind.RENAME,
    "CONFLICT (directory rename unclear split)": Kind.RENAME,
}


def _conflicts(
    objects: Objects, edit: Edit, tree: ObjectId, merge: Merge, history: History
) -> tuple[Conflict, ...]:
    """What is in conflict, by path, with the lines and the upstream commits behind it."""
    shown = objects.merge(edit.before, tree, edit.after, "merge.conflictStyle=diff3")
    upstream_tree = objects.tree_of(history.new)
    said: dict[bytes, list[tuple[Kind, str]]] = {}
    spoken: set[bytes] = set()
    for paths, word, message in merge.notes:
        path = next((path for path in paths if path in merge.stages), paths[0])
        said.setdefault(path, []).append((_KINDS.get(word, Kind.OTHER), message))
        spoken |= set(paths)
    for path in merge.stages.keys() - spoken:  # git left it unmerged without a word
        said[path] = [(Kind.CONTENT, "")]
    found: dict[bytes, Conflict] = {}
    for path, notes in sorted(said.items()):
        base, ours, theirs = (
            entry if (entry := merge.stages.get(path, {}).get(stage)) and entry.is_file else None
            for stage in (1, 2, 3)
        )
        kind = next((kind for kind, _ in notes if kind is not Kind.CONTENT), Kind.CONTENT)
        if ours and theirs and ours.id == theirs.id:
            kind = Kind.MODE
        elif kind is Kind.CONTENT and not base:
            kind = Kind.ADD_ADD
        entry = objects.find(shown.tree, path)
        hunks: tuple[Hunk, ...] = ()
        if entry and entry.is_file and ours and theirs:
            now = objects.find(upstream_tree, path)
            hunks = _marked(
                objects.read(entry.id),
                objects.read(base.id) if base else b"", objects.read(ours.id),
                objects.read(theirs.id), objects.read(now.id if now and now.is_file else ours.id),
            )  # fmt: skip
        # where a file and a directory want one name, git adds the side that it is from
        name = re.sub(rb"~[0-9a-f]{40}(_\d+)?$", b"", path)
        detail = "\n".join(message for _, message in notes)
        found.setdefault(
            name, Conflict(name, kind, hunks, _who(objects, history, name, hunks), (), detail)
        )
    return tuple(found.values())


def _who(
    objects: Objects, history: History, path: bytes, hunks: Sequence[Hunk]
) -> tuple[UpstreamCommit, ...]:
    """The upstream commits that touched the lines in conflict; where those tell nothing, the one
    that removed the path, or else all that touched it.
    """
    ranges = [
        # where upstream removed the lines, its commit shows at the lines around the gap
        (max(1, hunk.line - (not lines)), max(hunk.line, hunk.line + lines - 1))
        for hunk in hunks
        for lines in [len(split_lines(hunk.upstream))]
    ]
    touches = history.touching(path)
    bring_touched(objects, touches)
    if touches and touches[0].new is None:
        touches = touches[:1]
    return history.of_lines(path, ranges) or tuple(touch.commit for touch in touches)


def _marked(
    content: bytes, base: bytes, ours: bytes, theirs: bytes, upstream: bytes
) -> tuple[Hunk, ...]:
    """Read git's conflict markers (style diff3) in `content` into hunks.

    base, ours, theirs: the files that were merged; upstream: the one in which lines are counted.
    The outer markers carry the merged commits' ids, so code cannot look like them; a line of code
    can look like the inner ones, so the split is the one whose parts the three files have.
    """
    outer = rb"^<{7} [0-9a-f]{40}(?::.*)?\r?\n((?:.*\n)*?)>{7} [0-9a-f]{40}(?::.*)?\r?(?:\n|\Z)"
    found: list[tuple[int, bytes, bytes, bytes]] = []
    seen: list[bytes] = []  # the lines with every conflict resolved as upstream has it
    for number, part in enumerate(re.split(outer, content, flags=re.M)):
        if number % 2 == 0:
            seen += split_lines(part)
        elif parts := _parted(part, ours, base, theirs):
            found.append((len(seen) + 1, *parts))
            seen += split_lines(parts[0])
    moved = _hunks(b"".join(seen), upstream) if found else []
    return tuple(Hunk(_moved(line, moved), was, left, right) for line, left, was, right in found)


def _parted(
    part: bytes, ours: bytes, base: bytes, theirs: bytes
) -> tuple[bytes, bytes, bytes] | None:
    """The three sides of one conflict: ours, base, theirs."""
    for bar in re.finditer(rb"^\|{7}(?: .*)?\n", part, re.M):
        rest = part[bar.end() :]
        for equals in re.finditer(rb"^={7}\r?\n", rest, re.M):
            texts = part[: bar.start()], rest[: equals.start()], rest[equals.end() :]
            # git ends the last line of a file that does not
            left, was, right = (
                side if side in file else side.rstrip(b"\r\n")
                for side, file in zip(texts, (ours, base, theirs), strict=True)
            )
            if left in ours and was in base and right in theirs:
                return left, was, right
    return None


def _moved(line: int, hunks: Sequence[_Range]) -> int:
    """Where a line is after `hunks`; for one inside a hunk, where that begins."""
    shift = 0
    for hunk in hunks:
        if hunk.old_end > line - 1 >= hunk.old_start:
            return hunk.new_start + 1
        if hunk.old_end <= line - 1:
            shift = hunk.new_end - hunk.old_end
    return line + shift
