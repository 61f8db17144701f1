"""The object database of a mirror: read objects, edit trees, merge, write one pack.

A replay makes a few thousand small objects. They are kept in memory and written as one pack at the
end (`flush`), because a process or a file for each would cost more than all the work. The few that
a merge needs on the way are written as files, because git would take longer to start.

Merging is git's own (merge-ort), asked through `git merge-tree` on synthetic commits: git 2.39, the
oldest supported, has no `--merge-base`, so the base is made the parent of both sides.
"""

import hashlib
import re
import struct
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pygit2

from rebase.errors import EnvironmentFault
from rebase.git import EMPTY_TREE, Git, GitError, ObjectId
from rebase.words import visible

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
Changes = dict[bytes, tuple[Entry | None, Entry | None]]  # path → its old entry and its new one
FileMerge = tuple[ObjectId, ObjectId, ObjectId]  # blobs: base, ours, theirs


@dataclass(frozen=True)
class Merge:
    """A three-way merge of trees, as git made it.

    tree: the result; where it is not clean, conflicted files hold git's conflict markers.
    clean: whether git resolved everything.
    stages: for each conflicted path its entries in base (1), ours (2) and theirs (3).
    notes: git's own words on each conflict: (paths, kind, message); kinds are stable over versions.
    Messages call ours `upstream` and theirs `our change`, as a replay merges them so.
    """

    tree: ObjectId
    clean: bool
    stages: dict[bytes, dict[int, Entry]]
    notes: tuple[tuple[tuple[bytes, ...], str, str], ...]


# A tree is a row of `mode name\0id`: each name with its whole raw entry, which dict() takes as is.
_TREE_ENTRY = re.compile(rb"(?=[0-7]+ ([^\0]+))([^\0]+\0.{20})", re.DOTALL)
_PARENT = re.compile(rb"^parent ([0-9a-f]{40})$", re.M)
_KIND = {"commit": 1, "tree": 2, "blob": 3}
_LOOSE = 20  # objects that are written as files in the time in which `git index-pack` starts
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
        self._raw_entries: dict[ObjectId, dict[bytes, bytes]] = {}
        self._file_merges: dict[FileMerge, ObjectId | None] = {}

    # -- objects ---------------------------------------------------------------------------------

    def read(self, id: ObjectId) -> bytes:
        """The content of an object. Raises EnvironmentFault where the repository lacks it."""
        if pending := self._pending.get(id):
            return pending[1]
        try:
            return self._odb.read(id)[1]
        except KeyError:
            pass
        self.bring([id])
        try:
            return self._odb.read(id)[1]
        except KeyError:
            raise EnvironmentFault(
                f"The repository {self.git.directory} lacks object {id}.",
                todo="It is shallow or partial, or damaged. Fetch it whole: forkman fetch.",
            ) from None

    def bring(self, ids: Collection[ObjectId]) -> None:
        """Fetch those of the objects that a blobless mirror lacks, in one go, as the user.

        What its upstream does not have either stays away.
        """
        if not (missing := self._missing(ids)):
            return
        if self.git.run("config", "remote.origin.promisor", ok=(0, 1)).strip() != b"true":
            return
        with suppress(GitError):
            # As git itself fetches an object that was promised to it.
            self.git.run_as_user(
                "-c", "fetch.negotiationAlgorithm=noop", "fetch", "origin", "--no-tags",
                "--no-write-fetch-head", "--recurse-submodules=no", "--filter=blob:none", "--stdin",
                input="".join(f"{id}\n" for id in missing).encode(),
            )  # fmt: skip

    def need(self, files: Mapping[bytes, Entry]) -> None:
        """Have the contents of these files. Raises EnvironmentFault that names what is lacking."""
        ids = {entry.id for entry in files.values() if entry.mode != SUBMODULE}
        self.bring(ids)
        if missing := set(self._missing(ids)):
            named = [
                f"{visible(path)} (blob {entry.id})"
                for path, entry in sorted(files.items())
                if entry.id in missing
            ]
            raise EnvironmentFault(
                f"{self.git.directory.stem}: neither the repository {self.git.directory} nor what "
                f"it was fetched from has the content of {', '.join(named)}.",
                todo="Its source is a partial copy. Fetch from a whole one: "
                "forkman fetch --upstream FORK=ADDRESS.",
            )

    def _missing(self, ids: Collection[ObjectId]) -> list[ObjectId]:
        return [id for id in ids if id not in self._pending and id not in self._odb]

    def write(self, kind: str, content: bytes) -> ObjectId:
        """Make an object, kept in memory until `flush`."""
        id = ObjectId(
            hashlib.sha1(b"%s %d\0%s" % (kind.encode(), len(content), content)).hexdigest()
        )
        if id not in self._pending and id not in self._odb:
            self._pending[id] = (kind, content)
        return id

    def flush(self) -> None:
        """Write what is pending: a few objects as files, more as one pack, which git indexes.

        Raises EnvironmentFault where it cannot be written (a full disk).
        """
        try:
            if len(self._pending) <= _LOOSE:
                for kind, content in self._pending.values():
                    self._odb.write(_KIND[kind], content)
            else:
                pack = _pack(self._pending.values())
                self.git.run("index-pack", "--stdin", "--threads=1", input=pack)
        except (pygit2.GitError, OSError, GitError) as error:
            raise EnvironmentFault(
                f"The repository {self.git.directory} cannot be written: {error}"
            ) from None
        self._pending.clear()

    # -- trees -----------------------------------------------------------------------------------

    def entries(self, tree: ObjectId) -> dict[bytes, Entry]:
        """A tree's own entries, by name, in git's order."""
        return {name: _entry(raw) for name, raw in self._raw(tree).items()}

    def find(self, tree: ObjectId, path: bytes) -> Entry | None:
        """The entry at `path`, or None."""
        above, slash, name = path.rpartition(b"/")
        if slash:
            parent = self.find(tree, above)
            if parent is None or parent.mode != TREE:
                return None
            tree = parent.id
        raw = self._raw(tree).get(name)
        return _entry(raw) if raw else None

    def walk(self, tree: ObjectId, under: bytes = b"") -> Iterable[tuple[bytes, Entry]]:
        """Every path below `tree` that is not a tree itself."""
        for name, entry in self.entries(tree).items():
            if entry.mode == TREE:
                yield from self.walk(entry.id, under + name + b"/")
            else:
                yield under + name, entry

    def changed(self, old: ObjectId | None, new: ObjectId | None, under: bytes = b"") -> Changes:
        """The paths that differ between two trees, with their old and new entry; no renames."""
        if old == new:
            return {}
        before = self._raw(old) if old else {}
        after = self._raw(new) if new else {}
        found: Changes = {}
        for name in sorted({name for name, _ in before.items() ^ after.items()}):
            was, now = (
                _entry(raw) if (raw := side.get(name)) else None for side in (before, after)
            )
            was_tree = was.id if was and was.mode == TREE else None
            now_tree = now.id if now and now.mode == TREE else None
            if was_tree or now_tree:
                found |= self.changed(was_tree, now_tree, under + name + b"/")
            was, now = (None if was_tree else was), (None if now_tree else now)
            if was or now:
                found[under + name] = (was, now)
        return found

    def renames(self, old: ObjectId, new: ObjectId) -> dict[bytes, bytes]:
        """The files git takes as renamed between two trees: new path → old path."""
        self.flush()
        output = self.git.run(
            "diff-tree", "-r", "-z", "--find-renames", "--diff-filter=R", "--name-status", old, new
        )
        fields = output.split(b"\0")
        return dict(zip(fields[2::3], fields[1::3], strict=False))

    def splice(self, tree: ObjectId, edits: Edits) -> ObjectId:
        """`tree` with `edits` made; directories that become empty go, as git has none."""
        entries = dict(self._raw(tree))
        below: dict[bytes, dict[bytes, Entry | None]] = {}
        for path, entry in edits.items():
            name, slash, rest = path.partition(b"/")
            if slash:
                below.setdefault(name, {})[rest] = entry
            elif entry is None:
                entries.pop(name, None)
            else:
                entries[name] = _raw_entry(name, entry)
        for name, inner in below.items():
            was = _entry(entries[name]) if name in entries else None
            is_tree = was is not None and was.mode == TREE
            if not is_tree and not any(inner.values()):
                continue  # deleting below what is no directory here
            id = self.splice(was.id if was and is_tree else EMPTY_TREE, inner)
            if id == EMPTY_TREE:
                entries.pop(name, None)
            else:
                entries[name] = _raw_entry(name, Entry(TREE, id))
        return self._write_tree(entries)

    def tree(self, entries: Mapping[bytes, Entry]) -> ObjectId:
        """The tree with exactly these entries."""
        return self._write_tree({name: _raw_entry(name, entry) for name, entry in entries.items()})

    def _raw(self, tree: ObjectId) -> dict[bytes, bytes]:
        """A tree's own entries as it holds them, by name."""
        known = self._raw_entries.get(tree)
        if known is None:
            content = b"" if tree == EMPTY_TREE else self.read(tree)
            known = self._raw_entries[tree] = dict(_TREE_ENTRY.findall(content))
        return known

    def _write_tree(self, entries: dict[bytes, bytes]) -> ObjectId:
        # git sorts a directory as if its name ended in a slash
        names = sorted(entries, key=lambda n: n + b"/" if entries[n].startswith(b"40000 ") else n)
        entries = {name: entries[name] for name in names}
        id = self.write("tree", b"".join(entries.values()))
        self._raw_entries.setdefault(id, entries)
        return id

    # -- commits ---------------------------------------------------------------------------------

    def tree_of(self, commit: ObjectId) -> ObjectId:
        """The tree of a commit."""
        return ObjectId(self.read(commit)[5:45].decode("ascii"))

    def parents_of(self, commit: ObjectId) -> list[ObjectId]:
        """The parents of a commit, in order."""
        head = self.read(commit).partition(b"\n\n")[0]
        return [ObjectId(id.decode("ascii")) for id in _PARENT.findall(head)]

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
        return _parse_merge(done.stdout, done.returncode, sides)

    def merge_files(self, merges: Sequence[FileMerge]) -> list[ObjectId | None]:
        """Merge many files at once: the merged blob of each, None on conflict.

        All of them are one merge of three flat trees, so git starts once. Every name is in all
        three trees, which leaves nothing for rename detection to find: each file is merged alone,
        exactly as in the whole tree.
        """
        if new := [merge for merge in dict.fromkeys(merges) if merge not in self._file_merges]:
            names = {b"%08d" % number: merge for number, merge in enumerate(new)}
            merged = self.merge(
                *(
                    self.tree({name: Entry(FILE, blobs[side]) for name, blobs in names.items()})
                    for side in range(3)
                )
            )
            result = self.entries(merged.tree)
            self._file_merges |= {
                merge: None if name in merged.stages else result[name].id
                for name, merge in names.items()
            }
        return [self._file_merges[merge] for merge in merges]


def _entry(raw: bytes) -> Entry:
    return Entry(int(raw[: raw.index(b" ")], 8), ObjectId(raw[-20:].hex()))


def _raw_entry(name: bytes, entry: Entry) -> bytes:
    return b"%o %s\0%s" % (entry.mode, name, bytes.fromhex(entry.id))


def _pack(objects: Collection[tuple[str, bytes]]) -> bytes:
    """A pack (gitformat-pack(5)) of whole objects, each a kind and its content."""
    parts = [struct.pack(">4sII", b"PACK", 2, len(objects))]
    for kind, content in objects:
        # Trees are ids for the most part: to deflate them takes long and saves little.
        level = 1 if kind == "blob" else 0
        parts += (_pack_header(_KIND[kind], len(content)), zlib.compress(content, level))
    pack = b"".join(parts)
    return pack + hashlib.sha1(pack).digest()


def _pack_header(kind: int, size: int) -> bytes:
    """An object's header in a pack: three bits of type, then the size, seven bits a byte."""
    byte, size = kind << 4 | size & 15, size >> 4
    header = bytearray()
    while size:
        header.append(byte | 0x80)
        byte, size = size & 0x7F, size >> 7
    header.append(byte)
    return bytes(header)


def _parse_merge(output: bytes, status: int, sides: Sequence[ObjectId]) -> Merge:
    """Read the output of `git merge-tree -z --messages` (its manual page has the format)."""
    ours, theirs = sides
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
        message = message.replace(ours, "upstream").replace(theirs, "our change")
        if kind.startswith("CONFLICT"):
            notes.append((paths, kind, message))
        at += 3 + count
    return Merge(tree, status == 0, stages, tuple(notes))
