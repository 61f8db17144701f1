"""The object database of a mirror: read objects, edit trees, merge, write one pack.

A replay makes a few thousand small objects. They are kept in memory and written as one pack at the
end (`flush`), because a process or a file for each would cost more than all the work.

Merging is git's own (merge-ort), asked through `git merge-tree` on synthetic commits: git 2.39, the
oldest supported, has no `--merge-base`, so the base is made the parent of both sides.
"""

import hashlib
import re
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pygit2

from rebase.errors import EnvironmentFault
from rebase.git import Git, ObjectId

# Reading objects needs no configuration, and the user's must not matter.
for _level in (
    pygit2.enums.ConfigLevel.GLOBAL,
    pygit2.enums.ConfigLevel.XDG,
    pygit2.enums.ConfigLevel.SYSTEM,
):
    pygit2.settings.search_path[_level] = ""

TREE, FILE, EXECUTABLE, SYMLINK, SUBMODULE = 0o040000, 0o100644, 0o100755, 0o120000, 0o160000


class Entry(NamedTuple):
    """What a tree holds under a name: a mode and an object."""

    mode: int
    id: ObjectId

    @property
    def is_file(self) -> bool:
        return self.mode in (FILE, EXECUTABLE)


Edits = Mapping[bytes, Entry | None]  # path → its new entry, None where it goes


@dataclass(frozen=True)
class Merge:
    """A three-way merge of trees, as git made it.

    tree: the result; where it is not clean, conflicted files hold git's conflict markers.
    clean: whether git resolved everything.
    stages: for each conflicted path its entries in base (1), ours (2) and theirs (3).
    notes: git's own words on each conflict: (paths, kind, message); kinds are stable over versions.
    """

    tree: ObjectId
    clean: bool
    stages: dict[bytes, dict[int, Entry]]
    notes: tuple[tuple[tuple[bytes, ...], str, str], ...]


_TREE_ENTRY = re.compile(rb"([0-7]+) ([^\0]+)\0(.{20})", re.DOTALL)
_KIND = {"commit": 1, "tree": 2, "blob": 3}
_SYNTHETIC = b"author forkman <> 0 +0000\ncommitter forkman <> 0 +0000\n\n"


class Objects:
    """One repository's objects, with what was made here and is not written yet."""

    def __init__(self, git_dir: Path) -> None:
        self.git = Git(git_dir)
        try:
            self.repository = pygit2.Repository(
                str(git_dir), pygit2.enums.RepositoryOpenFlag.NO_SEARCH
            )
        except (pygit2.GitError, ValueError) as error:
            raise EnvironmentFault(f"{git_dir} cannot be opened as a repository: {error}") from None
        self._odb = self.repository.odb
        self._pending: dict[ObjectId, tuple[str, bytes]] = {}
        self._entries: dict[ObjectId, dict[bytes, Entry]] = {}

    # -- objects ---------------------------------------------------------------------------------

    def read(self, id: ObjectId) -> bytes:
        """The content of an object. Raises EnvironmentFault where the repository lacks it."""
        if pending := self._pending.get(id):
            return pending[1]
        try:
            return self._odb.read(id)[1]
        except KeyError:
            pass
        # A partial clone fetches what it lacks when git itself is asked for it.
        found = self.git.run("cat-file", "--batch", input=id.encode() + b"\n")
        header, _, content = found.partition(b"\n")
        if header.endswith(b"missing"):
            raise EnvironmentFault(
                f"The repository {self.git.directory} lacks object {id}.",
                todo="It is shallow or partial, or damaged. Fetch it whole: forkman fetch.",
            )
        return content[:-1]

    def write(self, kind: str, content: bytes) -> ObjectId:
        """Make an object, kept in memory until `flush`."""
        id = ObjectId(
            hashlib.sha1(b"%s %d\0%s" % (kind.encode(), len(content), content)).hexdigest()
        )
        if id not in self._pending and id not in self._odb:
            self._pending[id] = (kind, content)
        return id

    def flush(self) -> None:
        """Write what is pending as one pack (gitformat-pack(5)), which git checks and indexes."""
        if not self._pending:
            return
        parts = [struct.pack(">4sII", b"PACK", 2, len(self._pending))]
        for kind, content in self._pending.values():
            parts += (_pack_header(_KIND[kind], len(content)), zlib.compress(content, 1))
        pack = b"".join(parts)
        self.git.run("index-pack", "--stdin", input=pack + hashlib.sha1(pack).digest())
        self._pending.clear()

    # -- trees -----------------------------------------------------------------------------------

    def entries(self, tree: ObjectId) -> dict[bytes, Entry]:
        """A tree's own entries, by name, in git's order."""
        known = self._entries.get(tree)
        if known is None:
            known = self._entries[tree] = {
                name: Entry(int(mode, 8), ObjectId(id.hex()))
                for mode, name, id in _TREE_ENTRY.findall(self.read(tree))
            }
        return known

    def find(self, tree: ObjectId, path: bytes) -> Entry | None:
        """The entry at `path`, or None."""
        entry = Entry(TREE, tree)
        for name in path.split(b"/"):
            if entry.mode != TREE:
                return None
            found = self.entries(entry.id).get(name)
            if found is None:
                return None
            entry = found
        return entry

    def walk(self, tree: ObjectId, under: bytes = b"") -> Iterable[tuple[bytes, Entry]]:
        """Every path below `tree` that is not a tree itself."""
        for name, entry in self.entries(tree).items():
            if entry.mode == TREE:
                yield from self.walk(entry.id, under + name + b"/")
            else:
                yield under + name, entry

    def changed(
        self, old: ObjectId | None, new: ObjectId | None, under: bytes = b""
    ) -> dict[bytes, tuple[Entry | None, Entry | None]]:
        """The paths that differ between two trees, with their old and new entry; no renames."""
        if old == new:
            return {}
        before = self.entries(old) if old else {}
        after = self.entries(new) if new else {}
        found: dict[bytes, tuple[Entry | None, Entry | None]] = {}
        for name in before.keys() | after.keys():
            was, now = before.get(name), after.get(name)
            if was == now:
                continue
            was_tree = was.id if was and was.mode == TREE else None
            now_tree = now.id if now and now.mode == TREE else None
            if was_tree or now_tree:
                found |= self.changed(was_tree, now_tree, under + name + b"/")
            was, now = (None if was_tree else was), (None if now_tree else now)
            if was or now:
                found[under + name] = (was, now)
        return found

    def splice(self, tree: ObjectId, edits: Edits) -> ObjectId:
        """`tree` with `edits` made; directories that become empty go, as git has none."""
        entries = dict(self.entries(tree))
        below: dict[bytes, dict[bytes, Entry | None]] = {}
        for path, entry in edits.items():
            name, slash, rest = path.partition(b"/")
            if slash:
                below.setdefault(name, {})[rest] = entry
            elif entry is None:
                entries.pop(name, None)
            else:
                entries[name] = entry
        for name, inner in below.items():
            was = entries.get(name)
            is_tree = was is not None and was.mode == TREE
            if not is_tree and not any(inner.values()):
                continue  # deleting below what is no directory here
            id = self.splice(was.id if was and is_tree else self.tree({}), inner)
            if self.entries(id):
                entries[name] = Entry(TREE, id)
            else:
                entries.pop(name, None)
        return self.tree(entries)

    def tree(self, entries: Mapping[bytes, Entry]) -> ObjectId:
        """The tree with exactly these entries."""
        # git sorts a directory as if its name ended in a slash
        ordered = sorted(
            entries.items(), key=lambda item: item[0] + b"/" if item[1].mode == TREE else item[0]
        )
        id = self.write(
            "tree",
            b"".join(
                b"%o %s\0%s" % (entry.mode, name, bytes.fromhex(entry.id))
                for name, entry in ordered
            ),
        )
        self._entries.setdefault(id, dict(ordered))
        return id

    # -- commits ---------------------------------------------------------------------------------

    def tree_of(self, commit: ObjectId) -> ObjectId:
        """The tree of a commit."""
        return ObjectId(self.read(commit)[5:45].decode("ascii"))

    def commit(
        self, tree: ObjectId, parents: Sequence[ObjectId], author: bytes, message: bytes
    ) -> ObjectId:
        """A commit whose committer is its author, so that its id is the same on every machine.

        author: `Name <email> seconds zone`, UTF-8, as git writes it in a commit.
        """
        return self.write(
            "commit",
            b"tree %s\n%sauthor %s\ncommitter %s\n\n%s"
            % (
                tree.encode(),
                b"".join(b"parent %s\n" % parent.encode() for parent in parents),
                author,
                author,
                message,
            ),
        )

    # -- merges ----------------------------------------------------------------------------------

    def merge(self, base: ObjectId, ours: ObjectId, theirs: ObjectId, *options: str) -> Merge:
        """Merge the trees `ours` and `theirs` over `base` with git's merge-ort.

        options: configuration for this merge, as `key=value`.
        """
        ancestor = self.write("commit", b"tree %s\n%s" % (base.encode(), _SYNTHETIC))
        sides = [
            self.write(
                "commit",
                b"tree %s\nparent %s\n%s" % (side.encode(), ancestor.encode(), _SYNTHETIC),
            )
            for side in (ours, theirs)
        ]
        if sides[0] == sides[1]:
            return Merge(ours, True, {}, ())
        self.flush()
        done = self.git.call(
            *(word for option in options for word in ("-c", option)),
            "merge-tree", "--write-tree", "-z", "--messages", *sides,
            ok=(0, 1),
        )  # fmt: skip
        return _parse_merge(done.stdout, done.returncode)

    def merge_files(
        self, merges: Sequence[tuple[ObjectId, ObjectId, ObjectId]]
    ) -> list[ObjectId | None]:
        """Merge many files at once: (base, ours, theirs) blobs → the merged blob, None on conflict.

        All of them are one merge of three flat trees, so git starts once. Every name is in all
        three trees, which leaves nothing for rename detection to find: each file is merged alone,
        exactly as in the whole tree.
        """
        if not merges:
            return []
        sides: list[dict[bytes, Entry]] = [{}, {}, {}]
        for number, blobs in enumerate(merges):
            for side, blob in zip(sides, blobs, strict=True):
                side[b"%08d" % number] = Entry(FILE, blob)
        base, ours, theirs = (self.tree(side) for side in sides)
        merged = self.merge(base, ours, theirs)
        result = self.entries(merged.tree)
        return [
            None if (name := b"%08d" % number) in merged.stages else result[name].id
            for number in range(len(merges))
        ]


def _pack_header(kind: int, size: int) -> bytes:
    """An object's header in a pack: three bits of type, then the size, seven bits a byte."""
    byte, size = kind << 4 | size & 15, size >> 4
    header = bytearray()
    while size:
        header.append(byte | 0x80)
        byte, size = size & 0x7F, size >> 7
    header.append(byte)
    return bytes(header)


def _parse_merge(output: bytes, status: int) -> Merge:
    """Read the output of `git merge-tree -z --messages` (its manual page has the format)."""
    fields = output.split(b"\0")
    tree = ObjectId(fields[0].decode("ascii"))
    stages: dict[bytes, dict[int, Entry]] = {}
    at = 1
    while at < len(fields) and fields[at]:
        info, _, path = fields[at].partition(b"\t")
        mode, id, stage = info.split(b" ")
        stages.setdefault(path, {})[int(stage)] = Entry(int(mode, 8), ObjectId(id.decode("ascii")))
        at += 1
    at += 1
    notes = []
    while at + 1 < len(fields) and fields[at]:
        count = int(fields[at])
        paths = tuple(fields[at + 1 : at + 1 + count])
        kind = fields[at + 1 + count].decode("utf-8", "replace")
        message = fields[at + 2 + count].decode("utf-8", "replace").strip()
        if kind.startswith("CONFLICT"):
            notes.append((paths, kind, message))
        at += 3 + count
    return Merge(tree, status == 0, stages, tuple(notes))
