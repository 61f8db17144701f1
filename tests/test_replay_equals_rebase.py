"""The law of replay: what forkman makes of every change is what `git rebase` makes of it.

Hypothesis makes a base, an upstream that went on from it (and made some of our changes itself, or
parts of them, or took them back) and a branch of ours. Outcome and tree of every change must be
git's, with these differences, which the design asks for and `_explained` checks one by one:

- **not dropped for a look-alike**: git leaves a change out, untried, when some upstream commit has
  the same patch-id, which ignores white space and modes, and never asks whether upstream still has
  it. Forkman tries it; then what git makes of it when told to try (`pick`) must be forkman's too.
- **found upstream**: some hunks of the change were made by upstream commits, which the outcome
  names. Then git may have duplicated lines, or called it a conflict.

FORKMAN_EXAMPLES=3000 looks harder than CI does.
"""

import os
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import cycle
from pathlib import Path

from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from rebase.git import ObjectId
from rebase.history import History
from rebase.objects import Objects
from rebase.outcome import Outcome, Status
from rebase.replay import Edit, Step, replay

FILE, EXECUTABLE, SYMLINK, SUBMODULE = b"100644", b"100755", b"120000", b"160000"
State = dict[bytes, tuple[bytes, bytes]]  # path → (mode, content; for a submodule its commit)
Change = Callable[[State], State]

PATHS = (
    b"a.py",
    b"pkg/b.py",
    b"pkg/c.py",
    b"pkg/sub/d.py",
    b"pkg/sub/e.txt",
    b"lib/f.py",
    b"with space.txt",
    b"quo\"te's.txt",
    b"tab\tnew\nline",
    b"\xff\xfe.bin",
    "模型/权重.py".encode(),
    b"-n",
)
# some that are directories above, or below the files above
PLACES = (*PATHS, b"pkg", b"pkg/sub", b"a.py/inside", b"lib/f.py/x/y", b"new.py", b"pkg/new.py")
LINES = (
    b"",
    b"    ",
    b"\t",
    b"x = 1",
    b"    x = 1",
    b"x  = 1",
    b"return x",
    b"return x  ",
    b"}",
    b"=======",
    b"<<<<<<< HEAD",
    b"||||||| base",
    b">>>>>>> theirs",
    b"caf\xe9",
    b"with \r inside",
    "变量".encode(),
)


# -- changes -------------------------------------------------------------------------------------


def put(state: State, path: bytes, entry: tuple[bytes, bytes]) -> State:
    """`state` with `path`, which replaces what is in its way: files above it, a directory there."""
    above = {path[:at] for at, byte in enumerate(path) if byte == ord("/")}
    return {
        other: kept
        for other, kept in state.items()
        if other not in above and not other.startswith(path + b"/")
    } | {path: entry}


def pick(state: State, number: int, modes: Sequence[bytes] = (FILE, EXECUTABLE)) -> bytes | None:
    paths = sorted(path for path, (mode, _) in state.items() if mode in modes)
    return paths[number % len(paths)] if paths else None


def on_file(change: Callable[[bytes], bytes]) -> Callable[[int], Change]:
    def make(number: int) -> Change:
        def apply(state: State) -> State:
            if (path := pick(state, number)) is None:
                return state
            mode, content = state[path]
            return state | {path: (mode, change(content))}

        return apply

    return make


line_edits = st.lists(
    st.tuples(
        st.integers(0, 40), st.sampled_from(["replace", "insert", "delete", "twice"]),
        st.sampled_from(LINES) | st.integers(0, 30).map(b"line %d".__mod__),
    ),
    min_size=1, max_size=3,
)  # fmt: skip


def edited(content: bytes, edits: Sequence[tuple[int, str, bytes]]) -> bytes:
    lines = content.split(b"\n")
    for at, action, line in edits:
        at %= len(lines)
        match action:
            case "replace":
                lines[at] = line
            case "insert":
                lines.insert(at, line)
            case "delete" if len(lines) > 1:
                del lines[at]
            case "twice":
                lines.insert(at, lines[at])
    return b"\n".join(lines)


def indented(content: bytes) -> bytes:
    return b"\n".join(b"    " + line if line.strip() else line for line in content.split(b"\n"))


def edit(number: int, edits: list[tuple[int, str, bytes]]) -> Change:
    return on_file(lambda content: edited(content, edits))(number)


def add(path: bytes, mode: bytes, content: bytes) -> Change:
    return lambda state: put(state, path, (mode, content))


def delete(number: int) -> Change:
    def apply(state: State) -> State:
        path = pick(state, number, (FILE, EXECUTABLE, SYMLINK, SUBMODULE))
        return {other: entry for other, entry in state.items() if other != path}

    return apply


def rename(number: int, to: bytes, edits: list[tuple[int, str, bytes]]) -> Change:
    def apply(state: State) -> State:
        if (path := pick(state, number)) is None:
            return state
        mode, content = state[path]
        without = {other: entry for other, entry in state.items() if other != path}
        return put(without, to, (mode, edited(content, edits) if edits else content))

    return apply


def rename_directory(old: bytes, new: bytes) -> Change:
    def apply(state: State) -> State:
        moved = state
        for path in sorted(state):
            if path.startswith(old + b"/"):
                moved = put({p: e for p, e in moved.items() if p != path},
                            new + path[len(old) :], state[path])  # fmt: skip
        return moved

    return apply


def change_mode(number: int) -> Change:
    def apply(state: State) -> State:
        if (path := pick(state, number)) is None:
            return state
        mode, content = state[path]
        return state | {path: (EXECUTABLE if mode == FILE else FILE, content)}

    return apply


def both(first: Change, second: Change) -> Change:
    return lambda state: second(first(state))


def zero_first(content: bytes) -> bytes:
    """Content that git takes for binary."""
    return b"\0" + content


numbers = st.integers(0, 11)
body = st.lists(st.sampled_from(LINES) | st.integers(0, 9).map(b"line %d".__mod__), max_size=8).map(
    b"\n".join
)
submodule = st.sampled_from([digit * 40 for digit in (b"1", b"2", b"3")])
one_change = st.one_of(
    st.builds(edit, numbers, line_edits),
    st.builds(edit, numbers, line_edits),
    st.builds(edit, numbers, line_edits),
    st.builds(add, st.sampled_from(PLACES), st.sampled_from([FILE, EXECUTABLE]), body),
    st.builds(add, st.sampled_from(PLACES), st.just(SYMLINK), st.sampled_from([b"a.py", b"../x"])),
    st.builds(add, st.sampled_from(PLACES), st.just(SUBMODULE), submodule),
    st.builds(add, st.sampled_from(PLACES), st.just(FILE), st.binary(max_size=6).map(zero_first)),
    st.builds(delete, numbers),
    st.builds(rename, numbers, st.sampled_from(PLACES), st.just([]) | line_edits),
    st.builds(
        rename_directory, st.sampled_from([b"pkg", b"pkg/sub", b"lib"]),
        st.sampled_from([b"moved", b"lib", b"pkg/deep", b"src/pkg"]),
    ),
    st.builds(change_mode, numbers),
    numbers.map(on_file(lambda content: content.rstrip(b"\n"))),
    numbers.map(on_file(lambda content: content.replace(b"\r\n", b"\n").replace(b"\n", b"\r\n"))),
    numbers.map(on_file(indented)),
    st.just(lambda state: state),
)  # fmt: skip
changes = one_change | st.builds(both, one_change, one_change)


@dataclass(frozen=True)
class Merge:
    """Two lines of development that part here, and a merge of both."""

    main: list[Change]
    side: list[Change]


@dataclass(frozen=True)
class Repeat:
    """Upstream makes one of our changes, or a part of it.

    hunks: which of a file's hunks, in turn; spaced: whether blank lines come with other spaces.
    """

    number: int
    hunks: tuple[bool, ...]
    spaced: bool

    def of(self, change: Change, state: State) -> State:
        now = change(state)
        for path in now.keys() & state.keys():
            (mode, old), (new_mode, new) = state[path], now[path]
            if mode == new_mode and mode in (FILE, EXECUTABLE):
                now = now | {path: (mode, self._part(old.split(b"\n"), new.split(b"\n")))}
        return now

    def _part(self, old: list[bytes], new: list[bytes]) -> bytes:
        made: list[bytes] = []
        taken = cycle(self.hunks)
        for what, i, j, k, m in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
            if what == "equal" or not next(taken):
                made += old[i:j]
            else:
                made += [self._spaced(line) for line in new[k:m]]
        return b"\n".join(made)

    def _spaced(self, line: bytes) -> bytes:
        if not self.spaced or line.strip():
            return line
        return b"" if line else b"  "


@dataclass(frozen=True)
class TakeBack:
    """A revert of the commit before: every path it touched is as it was before it."""


commits = st.lists(
    changes | st.builds(Merge, st.lists(changes, max_size=2), st.lists(changes, max_size=2)),
    min_size=1, max_size=4,
)  # fmt: skip
hunks = st.lists(st.booleans(), min_size=1, max_size=3).map(tuple)
upstream_commits = st.lists(
    changes
    | st.builds(Repeat, st.integers(0, 3), st.just((True,)), st.just(False))
    | st.builds(Repeat, st.integers(0, 3), hunks, st.booleans())
    | st.builds(TakeBack)
    | st.builds(Merge, st.lists(changes, max_size=2), st.lists(changes, max_size=2)),
    max_size=5,
)  # fmt: skip


@st.composite
def bases(draw: st.DrawFn) -> State:
    state: State = {}
    for number, path in enumerate(draw(st.lists(st.sampled_from(PATHS), max_size=6, unique=True))):
        # lines of its own, so that renames are recognised, between lines that come again
        repeated = draw(st.lists(st.sampled_from(LINES), min_size=1, max_size=3))
        lines = [
            line
            for at in range(draw(st.integers(2, 12)))
            for line in (b"line %d of %d" % (at, number), repeated[at % len(repeated)])
        ]
        end = draw(st.sampled_from([b"\n", b"\n", b"\n", b"\r\n"]))
        content = end.join(lines) + draw(st.sampled_from([end, end, b""]))
        state[path] = (draw(st.sampled_from([FILE, FILE, FILE, EXECUTABLE])), content)
    return state


# One file whose lines come again, statements that both add, and blank lines that differ.
blocks = st.sampled_from([b"    \nx = f(x)", b"\nx = f(x)\n", b"x = f(x)", b"g()", b"  \n\ng()\n"])
crowded_changes = st.lists(
    st.tuples(
        st.integers(0, 11), st.sampled_from(["insert", "insert", "insert", "replace", "delete"]),
        blocks | st.sampled_from(LINES),
    ),
    min_size=1, max_size=3,
).map(lambda edits: edit(0, edits))  # fmt: skip
crowded_upstreams = st.lists(
    st.builds(Repeat, st.integers(0, 2), hunks, st.booleans())
    | st.builds(Repeat, st.integers(0, 2), st.just((True,)), st.booleans())
    | crowded_changes
    | st.builds(TakeBack),
    min_size=1, max_size=4,
)  # fmt: skip
crowded_bases = st.lists(
    st.sampled_from(LINES) | st.integers(0, 9).map(b"line %d".__mod__), min_size=1, max_size=12
).map(lambda lines: {b"a.py": (FILE, b"\n".join(lines) + b"\n")})


# -- repositories --------------------------------------------------------------------------------


def history(start: State, items: Sequence[object], ours: Sequence[Change], base: int,
            mark: int, name: str) -> Iterator[bytes]:  # fmt: skip
    """git fast-import commands for `items` on the commit `base`; marks count from `mark`."""
    head, state, before = base, start, start
    count = 0

    def commit(parents: Sequence[int], state: State) -> bytes:
        nonlocal mark, count
        mark, count = mark + 1, count + 1
        lines = [b"commit refs/heads/%s" % name.encode(), b"mark :%d" % mark]
        lines += [b"author A <a@x> %d +0100" % (10**9 + mark), b"committer C <c@x> %d +0000" % mark]
        message = f"{name} {count}".encode()
        lines += [b"data %d" % len(message), message]
        lines += [b"from :%d" % parents[0]] if parents[0] else []
        lines += [b"merge :%d" % parent for parent in parents[1:]] + [b"deleteall"]
        for path, (mode, content) in state.items():
            quoted = b'"%s"' % b"".join(b"\\%03o" % byte for byte in path)
            if mode == SUBMODULE:
                lines.append(b"M 160000 %s %s" % (content, quoted))
            else:
                lines += [b"M %s inline %s" % (mode, quoted), b"data %d" % len(content), content]
        return b"\n".join(lines) + b"\n"

    for item in items:
        match item:
            case Merge(main, side):
                tips = []
                for line in (main, side):
                    at, now = head, state
                    for change in line:
                        now = change(now)
                        yield commit([at], now)
                        at = mark
                    tips.append((at, now))
                (one, now), (other, theirs) = tips
                if head in (one, other):
                    head, now = (other, theirs) if head == one else (one, now)
                else:
                    for path in state.keys() - theirs.keys():
                        now = {p: entry for p, entry in now.items() if p != path}
                    for path in theirs:
                        if theirs[path] != state.get(path):
                            now = put(now, path, theirs[path])
                    yield commit([one, other], now)
                    head = mark
                before, state = state, now
                continue
            case Repeat(number):
                now = item.of(ours[number % len(ours)], state)
            case TakeBack():
                now = before
            case _:
                assert callable(item)
                now = item(state)
        yield commit([head], now)
        head, before, state = mark, state, now
    yield b"reset refs/heads/%s\nfrom :%d\n\n" % (name.encode(), head)


ENV = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")} | {
    "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull, "LC_ALL": "C",
    "GIT_COMMITTER_NAME": "C", "GIT_COMMITTER_EMAIL": "c@x", "GIT_EDITOR": "false",
}  # fmt: skip


class Repository:
    def __init__(self, path: Path, base: State, upstream: Sequence[object], ours: Sequence[object]):
        self.path = path
        path.mkdir()
        self.git("init", "--quiet", "--initial-branch=unused")
        config = "[gc]\n\tauto = 0\n[core]\n\tfsync = none\n[advice]\n\tdetachedHead = false\n"
        with (path / ".git/config").open("a") as file:
            file.write(config)
        singles = [item for item in ours if callable(item)]
        script = [
            *history({}, [lambda _: base], (), 0, 0, "base"),
            *history(base, ours, (), 1, 1000, "ours"),
            *history(base, upstream, singles or [lambda state: state], 1, 2000, "upstream"),
        ]
        self.git("fast-import", "--quiet", input=b"".join(script))

    def git(
        self, *args: str, input: bytes = b"", ok: Sequence[int] = (0,),
        env: dict[str, str] | None = None,
    ) -> str:  # fmt: skip
        done = subprocess.run(
            ["git", *args], cwd=self.path, env=ENV | (env or {}), input=input, capture_output=True
        )
        assert done.returncode in ok, (args, done.returncode, done.stdout, done.stderr)
        self.status = done.returncode
        return done.stdout.decode("utf-8", "replace").strip()

    def steps(self, objects: Objects) -> list[Step]:
        found = []
        for id in self.git(
            "rev-list", "--reverse", "--topo-order", "--no-merges", "base..ours"
        ).split():
            tree, parent = self.git("rev-parse", f"{id}^{{tree}}", f"{id}^^{{tree}}").split()
            message = self.git("log", "-1", "--format=%B", id).encode()
            edit = Edit(ObjectId(parent), ObjectId(tree))
            found.append(Step(id, b"A <a@x> 1 +0000", message, edit))
        return found

    def rebase(self, onto: str, picks: Sequence[str] | None = None) -> dict[str, tuple[str, str]]:
        """What `git rebase` makes of the branch: for each change by name what it became, and the
        tree after it. Without picks, all of it; with picks, those, in this order.
        """
        self.git("checkout", "--quiet", "--force", "--detach", "ours")
        self.git("clean", "-ffdxq")
        env = {}
        words = ["rebase", "--quiet", "--empty=drop", "upstream"]
        if picks is not None:
            todo = self.path / ".git/picks"
            todo.write_text("".join(f"pick {id}\n" for id in picks) or "noop\n")
            env = {"GIT_SEQUENCE_EDITOR": f"cp '{todo}'"}
            words = ["rebase", "--quiet", "--interactive", "--empty=drop", "--onto", onto, "base"]
        self.git(*words, ok=(0, 1), env=env)
        found: dict[str, tuple[str, str]] = {}
        while self.status:
            assert self.git("ls-files", "--unmerged"), "git rebase stopped without a conflict"
            tree = self.git("rev-parse", "HEAD^{tree}")
            found[self.git("log", "-1", "--format=%s", "REBASE_HEAD")] = ("conflict", tree)
            self.git("rebase", "--skip", ok=(0, 1))
        for line in self.git("log", "--format=%s%x09%T", f"{onto}..HEAD").split("\n"):
            if line:
                subject, tree = line.split("\t")
                found[subject] = ("applied", tree)
        return found


# -- the law -------------------------------------------------------------------------------------

WORDS = {
    Status.APPLIED: "applied",
    Status.CONFLICT: "conflict",
    Status.ALREADY_UPSTREAM: "empty",
}


thorough = settings(
    max_examples=int(os.environ.get("FORKMAN_EXAMPLES", "120")),
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


@thorough
@given(bases(), upstream_commits, commits)
def test_every_change_becomes_what_git_rebase_makes_of_it(base, upstream, ours):
    check(base, upstream, ours)


@thorough
@given(crowded_bases, crowded_upstreams, st.lists(crowded_changes, min_size=1, max_size=3))
def test_so_it_does_where_upstream_took_much_of_ours(base, upstream, ours):
    check(base, upstream, ours)


def check(base: State, upstream: Sequence[object], ours: Sequence[object]) -> None:
    """The law, for one repository."""
    with tempfile.TemporaryDirectory() as folder:
        repository = Repository(Path(folder, "r"), base, upstream, ours)
        objects = Objects(repository.path / ".git")
        onto = ObjectId(repository.git("rev-parse", "upstream"))
        old = ObjectId(repository.git("rev-parse", "base"))
        steps = repository.steps(objects)
        outcomes = list(replay(objects, steps, onto, History(objects.git, old, onto)))
        objects.flush()
        repository.git("fsck", "--connectivity-only")
        assert [outcome.change for outcome in outcomes] == [step.name for step in steps]

        made = repository.rebase("upstream")
        head, tree = onto, objects.tree_of(onto)
        for number, (step, outcome) in enumerate(zip(steps, outcomes, strict=True)):
            became = made.get(step.subject, ("empty", tree))
            event(f"git: {became[0]}")
            if outcome.taken and outcome.status is Status.APPLIED:
                event("partly upstream")
            if (WORDS[outcome.status], outcome.tree) != became:
                rest = [later.name for later in steps[number:]]
                tried = repository.rebase(head, rest)
                became = tried.get(step.subject, ("empty", tree))
                if (WORDS[outcome.status], outcome.tree) == became:
                    assert _looks_alike(repository, step), (step, outcome, became)
                    event("difference: not dropped for a look-alike")
                else:
                    _explained(repository, objects, step, tree, outcome, became)
                    event("difference: found upstream")
                # git goes on from what forkman made
                if outcome.commit:
                    head = outcome.commit
                made = repository.rebase(head, rest[1:])
            head, tree = outcome.commit or head, outcome.tree


def _looks_alike(repository: Repository, step: Step) -> bool:
    """Whether git left the step out because of its patch-id."""
    marked = repository.git("rev-list", "--cherry-mark", "--no-merges", "upstream...ours").split()
    return f"={step.name}" in marked


def _explained(
    repository: Repository, objects: Objects, step: Step, head: ObjectId, outcome: Outcome,
    became: tuple[str, str],
) -> None:  # fmt: skip
    """Check that the outcome differs from git's only by what upstream commits brought."""
    what, tree = became
    context = (step, outcome, became)
    assert outcome.status is not Status.CONFLICT, context
    assert what != "empty", context
    assert outcome.taken, context
    assert isinstance(step.does, Edit)
    change = objects.changed(step.does.before, step.does.after)
    taken = {taken.path: taken for taken in outcome.taken}
    assert taken.keys() <= change.keys(), context

    def lines(tree: ObjectId, path: bytes) -> Counter[bytes]:
        entry = objects.find(tree, path)
        return Counter(objects.read(entry.id).split(b"\n") if entry and entry.is_file else ())

    for path in objects.changed(head, outcome.tree).keys() | taken.keys():
        before, after, there, result = (
            lines(t, path) for t in (step.does.before, step.does.after, head, outcome.tree)
        )
        # nothing is made that the change does not make,
        assert result - there <= after - before, context
        assert there - result <= before - after, context
        # and what it would have made is there, or an upstream commit that is named brought it.
        missing = ((after - before) - (result - there)) + ((before - after) - (there - result))
        if missing:
            assert taken[path].by, context
    if what == "applied":
        # git was clean: it has the lines more often, or removed more of them
        for path, (ours, theirs) in objects.changed(outcome.tree, ObjectId(tree)).items():
            assert path in taken, context
            assert ours and theirs and ours.mode == theirs.mode, context
            more, less = (lines(t, path) for t in (ObjectId(tree), outcome.tree))
            before, after = lines(step.does.before, path), lines(step.does.after, path)
            assert more - less <= after - before and less - more <= before - after, context
