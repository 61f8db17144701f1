import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rebase import export, patch
from rebase.errors import EnvironmentFault, ForkmanError, NeedsPerson, UsageError
from rebase.export import Exported, ForkExport, Layer
from rebase.git import EMPTY_TREE, ObjectId
from rebase.mail import Mail
from rebase.objects import EXECUTABLE, FILE, SUBMODULE, SYMLINK, Entry, Objects
from rebase.outcome import Pin

Files = Mapping[bytes, bytes | tuple[int, bytes]]  # path → content, or mode and content

AUTHOR = "Ångström <a@example.com> 1700000000 +0100".encode()
LINES = b"".join(b"line %d\n" % number for number in range(1, 41))
PIN = {b"d/a.py": LINES, b"gone.py": b"x\n", b"z.txt": b"z\n", b"other": b"untouched\n"}
STEPS: list[Files] = [
    PIN | {b"d/a.py": LINES.replace(b"line 20\n", b"twenty\n")},
    {
        b"d/a.py": LINES.replace(b"line 20\n", b"twenty\n").replace(b"line 33\n", b""),
        b"new/b.py": b"b\n",
        b"z.txt": b"z\nmore\n",
        b"other": b"untouched\n",
    },
]


def repository(path: Path) -> Objects:
    subprocess.run(["git", "init", "--quiet", "--bare", path], check=True)
    return Objects(path)


@pytest.fixture
def objects(tmp_path: Path) -> Objects:
    return repository(tmp_path / "mirror.git")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Objects:
    return repository(tmp_path_factory.mktemp("export") / "mirror.git")


def make(objects: Objects, files: Files) -> ObjectId:
    """The tree that holds `files`; a submodule's content is its commit."""
    edits = {}
    for path, file in files.items():
        mode, content = (FILE, file) if isinstance(file, bytes) else file
        id = ObjectId(content.decode()) if mode == SUBMODULE else objects.write("blob", content)
        edits[path] = Entry(mode, id)
    return objects.splice(EMPTY_TREE, edits)


def fork_of(objects: Objects, start: Files, *steps: Files, name: str = "slime") -> ForkExport:
    trees = [make(objects, files) for files in (start, *steps)]
    changes = tuple(
        (
            f"change-{number}.patch",
            Mail(
                AUTHOR, b"[NPU] change %d\n" % number, patch.diff(objects, *trees[number - 1 :][:2])
            ),
        )
        for number in range(1, len(trees))
    )
    return ForkExport(
        fork=name,
        upstream="https://example.com/u.git",
        source="git",
        pin=Pin(ObjectId("1" * 40), "v1"),
        layers=(Layer("lead", "docker/x.patch", ObjectId("2" * 40)),),
        base=trees[0],
        tip=trees[-1],
        changes=changes,
        name=f"{name}.patch",
    )


def write(objects: Objects, folder: Path, *forks: ForkExport) -> dict[str, Exported]:
    """Export to a folder, as a landing does."""
    entries = {}
    folder.mkdir(exist_ok=True)
    for fork in forks:
        entries[fork.fork], files = export.export(objects, fork)
        for path, content in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)
    (folder / "index.json").write_bytes(export.index(entries.values()))
    return entries


def edit(path: Path, old: bytes, new: bytes) -> None:
    assert old in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(old, new))


# -- what is written -----------------------------------------------------------------------------


def test_an_export_is_one_patch_and_a_series(objects: Objects) -> None:
    fork = fork_of(objects, PIN, *STEPS)
    _, files = export.export(objects, fork)
    assert list(files) == ["slime.patch", "slime/0001-change-1.patch", "slime/0002-change-2.patch"]
    assert files["slime.patch"] == patch.diff(objects, fork.base, fork.tip)


def test_the_index_is_read_back_as_it_was_written(objects: Objects, tmp_path: Path) -> None:
    forks = [fork_of(objects, PIN, *STEPS, name=name) for name in ("slime", "lead")]
    written = write(objects, tmp_path / "out", *forks)
    assert export.read_index(tmp_path / "out/index.json") == written
    assert export.read_index(tmp_path / "out") == written
    content = export.index(written.values())
    assert content == export.index(reversed(written.values()))
    assert content.endswith(b"}\n")


CONFIGURATION = """
[diff]
    noprefix = true
    mnemonicPrefix = true
    context = 0
    renames = copies
    orderFile = {home}/order
    suppressBlankEmpty = true
    algorithm = histogram
[format]
    attach = true
    headers = "X-Extra: yes\\n"
    signOff = true
    thread = deep
    coverLetter = true
    from = Somebody <s@example.com>
[core]
    autocrlf = true
    attributesFile = {home}/attributes
    quotePath = false
[apply]
    whitespace = fix
[commit]
    gpgsign = true
[tag]
    gpgsign = true
[merge]
    conflictStyle = diff3
[am]
    keepcr = false
    messageId = true
[user]
    useConfigOnly = true
"""

# Exports a fork of the repository argv[1], whose trees follow; prints the files, verifies them.
SCRIPT = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import test_export as test
from rebase import export
objects = test.Objects(Path(sys.argv[1]))
fork = test.fork_of(objects, test.EVERY_KIND[0], *test.EVERY_KIND[1:])
out = Path(sys.argv[3])
test.write(objects, out, fork)
print(export.verify(objects, out, "slime", fork.base))
for path in sorted(out.rglob("*")):
    if path.is_file():
        print(path.relative_to(out), path.read_bytes())
"""

EVERY_KIND: list[Files] = [
    PIN | {b"bin": b"\0\1" * 900, b"crlf": b"a\r\n\r\n", b"latin": b"caf\xe9 \n", b"run": b"r\n"},
    {
        b"d/a.py": LINES.replace(b"line 9\n", b"\n\nnine \n"),
        b"bin": b"\0\2" * 800,
        b"crlf": b"a\r\n\r\nb\r\n",
        b"latin": b"caf\xe9s \n no end",
        b"run": (EXECUTABLE, b"r\n"),
        b"link": (SYMLINK, b"d/a.py"),
        b"empty": b"",
        "路径 with spaces".encode(): b"x\n",
    },
    {b"d/a.py": LINES, b"gone.py": b"x\n"},
]


def run_script(objects: Objects, out: Path, variables: Mapping[str, str]) -> bytes:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, objects.git.directory, Path(__file__).parent, out],
        env=os.environ | variables,
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


def test_a_hostile_configuration_and_a_locale_change_no_byte(
    objects: Objects, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / ".gitconfig").write_text(CONFIGURATION.format(home=home))
    (home / "order").write_text("z*\n")
    (home / "attributes").write_text("* text eol=crlf diff=odd\n*.py -diff\n")
    hostile = {"HOME": str(home), "XDG_CONFIG_HOME": str(home), "GIT_DIFF_OPTS": "-u0"}
    plain = run_script(objects, tmp_path / "plain", {"LC_ALL": "C", "LANG": "C"})
    assert b"findings=())" in plain
    assert run_script(objects, tmp_path / "hostile", hostile) == plain
    assert run_script(objects, tmp_path / "utf8", hostile | {"LC_ALL": "C.UTF-8"}) == plain


def test_another_git_writes_the_same_bytes(objects: Objects, tmp_path: Path) -> None:
    other = os.environ.get("FORKMAN_TEST_GIT")
    if not other:
        pytest.skip("FORKMAN_TEST_GIT names no second git")
    first = {"PATH": f"{Path(other).parent}:{os.environ['PATH']}"}
    here = run_script(objects, tmp_path / "here", {})
    assert run_script(objects, tmp_path / "there", first) == here


# -- an index that is not ours -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda index: index.update(version=2), "version 2"),
        (lambda index: index.pop("forks"), "no index of forkman's"),
        (lambda index: index["forks"]["slime"].pop("after"), r"slime\.after: Field required"),
        (lambda index: index["forks"]["slime"].update(source="ftp"), r"slime\.source"),
        (lambda index: index["forks"]["slime"].update(fork="other"), "is 'other'"),
        (lambda index: index["forks"]["slime"].update(before="--help"), "no object's id"),
        (lambda index: index["forks"]["slime"]["patch"].update(sha256="0"), "no sha256"),
    ]
    + [
        (
            lambda index, path=path: index["forks"]["slime"]["patch"].update(path=path),
            "leads out of the index's folder",
        )
        for path in (
            "../x", "/etc/passwd", "a/../../x", ".git/config", "", "a//b", "a\\b", "a\nb", "away/x",
        )
    ],
)  # fmt: skip
def test_a_wrong_index_is_refused(objects: Objects, tmp_path: Path, change, what: str) -> None:
    out = tmp_path / "out"
    write(objects, out, fork_of(objects, PIN, *STEPS))
    (out / "away").symlink_to(tmp_path)
    content = json.loads((out / "index.json").read_bytes())
    change(content)
    (out / "index.json").write_text(json.dumps(content))
    with pytest.raises(UsageError, match=what):
        export.read_index(out)


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff", b"null", b"{}"])
def test_what_is_no_index_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "index.json").write_bytes(content)
    with pytest.raises(UsageError, match="no index of forkman's"):
        export.read_index(tmp_path)


@pytest.mark.parametrize("content", [b"{", b'{"version": 2}', b'{"version": 1, "forks": {"a": 1}}'])
def test_a_damaged_index_counts_as_none_where_all_is_exported_anew(
    objects: Objects, tmp_path: Path, content: bytes
) -> None:
    assert export.listed(tmp_path, all_anew=False) == {}
    written = write(objects, tmp_path, fork_of(objects, PIN, *STEPS))
    assert export.listed(tmp_path, all_anew=True) == written
    (tmp_path / "index.json").write_bytes(content)
    assert export.listed(tmp_path, all_anew=True) == {}
    with pytest.raises(export.DamagedIndex) as caught:
        export.listed(tmp_path, all_anew=False)
    assert "xport" in caught.value.todo


def test_a_missing_index_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nowhere: No such file"):
        export.read_index(tmp_path / "nowhere")


# -- verifying -----------------------------------------------------------------------------------


def verify(objects: Objects, out: Path, fork: ForkExport) -> list[str]:
    return [str(finding) for finding in export.verify(objects, out, "slime", fork.base).findings]


def test_what_was_written_is_applied_in_every_way(objects: Objects, tmp_path: Path) -> None:
    fork = fork_of(objects, PIN, *STEPS)
    write(objects, tmp_path, fork)
    result = export.verify(objects, tmp_path, "slime", fork.base)
    done = ["git apply", "git apply --3way", "git am --keep --keep-cr", "git am"]
    if shutil.which("patch"):
        done.insert(2, "patch -p1")
    assert result.done == tuple(done)
    assert result.findings == ()


def test_content_that_a_tool_does_not_take_is_said(objects: Objects, tmp_path: Path) -> None:
    fork = fork_of(objects, *EVERY_KIND[:2])
    write(objects, tmp_path, fork)
    result = export.verify(objects, tmp_path, "slime", fork.base)
    assert result.findings == ()
    assert result.done == ("git apply", "git apply --3way", "git am --keep --keep-cr")
    assert [how for how, _ in result.skipped] == ["patch -p1", "git am"]


def test_a_fork_that_changes_nothing_has_no_patch(objects: Objects, tmp_path: Path) -> None:
    """git apply refuses a patch without a diff."""
    fork = fork_of(objects, PIN)
    entry = write(objects, tmp_path / "out", fork)["slime"]
    assert (entry.patch, entry.series) == (None, ())
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["index.json"]
    assert b'"patch": null' in (tmp_path / "out/index.json").read_bytes()
    result = export.verify(objects, tmp_path / "out", "slime", fork.base)
    assert (result.done, result.findings) == ((), ())
    assert {why for _, why in result.skipped} == {"there is nothing to apply"}
    checkout = lay_out(tmp_path / "src", PIN)
    for reverse in (False, True):
        applied = export.apply_to(tmp_path / "out", checkout, reverse=reverse)
        assert applied == export.Applied("slime", (), ())
    assert files_in(checkout) == PIN


def test_changes_that_take_each_other_back_are_a_series_and_no_patch(
    objects: Objects, tmp_path: Path
) -> None:
    fork = fork_of(objects, PIN, STEPS[0], PIN)
    entry = write(objects, tmp_path, fork)["slime"]
    assert (entry.patch, len(entry.series)) == (None, 2)
    result = export.verify(objects, tmp_path, "slime", fork.base)
    assert result.done == ("git am --keep --keep-cr", "git am")
    assert result.findings == ()


def test_a_change_without_a_diff_is_named_and_not_exported(
    objects: Objects, tmp_path: Path
) -> None:
    fork = fork_of(objects, PIN, PIN, *STEPS)
    entry = write(objects, tmp_path / "out", fork)["slime"]
    assert entry.empty == ("change-1.patch",)
    assert [file.path for file in entry.series] == [
        "slime/0001-change-2.patch", "slime/0002-change-3.patch",
    ]  # fmt: skip
    assert verify(objects, tmp_path / "out", fork) == []


def test_what_is_exported_is_taken_by_the_plain_commands(objects: Objects, tmp_path: Path) -> None:
    """Those of the README, with no option more."""
    write(objects, tmp_path / "out", fork_of(objects, PIN, PIN, *STEPS))
    mails = sorted((tmp_path / "out/slime").iterdir())
    for command in (["apply", tmp_path / "out/slime.patch"], ["am", "--quiet", "--keep", *mails]):
        checkout = lay_out(tmp_path / str(command[0]), PIN)
        for words in (["init"], ["add", "--all"], ["commit", "--message", "pin"], command):
            subprocess.run(["git", *words], cwd=checkout, check=True, capture_output=True)
        assert files_in(checkout) == STEPS[-1]


def test_a_patch_that_the_index_leaves_out_is_missed(objects: Objects, tmp_path: Path) -> None:
    fork = fork_of(objects, PIN, *STEPS)
    entry = write(objects, tmp_path, fork)["slime"]
    (tmp_path / "index.json").write_bytes(export.index([replace(entry, patch=None, series=())]))
    found = verify(objects, tmp_path, fork)
    changed = "d/a.py, gone.py, new/b.py, z.txt"
    assert f"slime: git apply: applies, but gives another {changed}" in found
    assert f"slime: git am: applies, but gives another {changed}" in found


def test_a_way_that_failed_is_not_among_those_that_gave_the_tree(
    objects: Objects, tmp_path: Path
) -> None:
    fork = fork_of(objects, PIN, *STEPS)
    write(objects, tmp_path, fork)
    edit(tmp_path / "slime/0002-change-2.patch", b"+more", b"+less")  # applies, to another tree
    done = export.verify(objects, tmp_path, "slime", fork.base).done
    assert done[:2] == ("git apply", "git apply --3way")
    assert not any(how.startswith("git am") for how in done)
    edit(tmp_path / "slime.patch", b" line 19", b" line XIX")  # does not apply
    assert export.verify(objects, tmp_path, "slime", fork.base).done == ()


def test_verifying_leaves_the_mirror_alone(objects: Objects, tmp_path: Path) -> None:
    fork = fork_of(objects, PIN, *STEPS)
    write(objects, tmp_path / "out", fork)
    before = sorted((tmp_path / "mirror.git").rglob("*"))
    edit(tmp_path / "out/slime.patch", b"+twenty", b"+forty")
    assert verify(objects, tmp_path / "out", fork)
    assert sorted((tmp_path / "mirror.git").rglob("*")) == before


def test_an_edit_that_still_applies_is_caught(objects: Objects, tmp_path: Path) -> None:
    fork = fork_of(objects, PIN, *STEPS)
    write(objects, tmp_path, fork)
    edit(tmp_path / "slime.patch", b"+twenty", b"+forty")
    found = verify(objects, tmp_path, fork)
    assert "slime.patch: sha256: was changed after it was exported" in found
    assert "slime.patch: git apply: applies, but gives another d/a.py" in found
    assert "slime.patch: git apply --3way: applies, but gives another d/a.py" in found


def test_an_edit_is_caught_though_the_index_was_made_to_match(
    objects: Objects, tmp_path: Path
) -> None:
    fork = fork_of(objects, PIN, *STEPS)
    entry = write(objects, tmp_path, fork)["slime"]
    mail = tmp_path / "slime/0001-change-1.patch"
    edit(mail, b"+twenty", b"+forty")
    files = [(tmp_path / file.path).read_bytes() for file in entry.series]
    series = tuple(
        replace(file, sha256=export._sha256(content))
        for file, content in zip(entry.series, files, strict=True)
    )
    (tmp_path / "index.json").write_bytes(export.index([replace(entry, series=series)]))
    assert verify(objects, tmp_path, fork) == [
        "slime: git am --keep --keep-cr: applies, but gives another d/a.py",
        "slime: git am: applies, but gives another d/a.py",
    ]


def test_hunks_that_fail_are_named_with_what_is_there(objects: Objects, tmp_path: Path) -> None:
    fork = fork_of(objects, PIN, *STEPS)
    write(objects, tmp_path, fork)
    edit(tmp_path / "slime.patch", b" line 19", b" line XIX")
    edit(tmp_path / "slime/0002-change-2.patch", b" line 32", b" line XXXII")
    found = verify(objects, tmp_path, fork)
    why = 'd/a.py: hunk 1 (line 17): expected "line XIX", the file has "line 19" in line 19'
    assert f"slime.patch: git apply: {why}" in found
    why = 'd/a.py: hunk 1 (line 30): expected "line XXXII", the file has "line 32" in line 32'
    assert f"slime/0002-change-2.patch: git am: {why}" in found


def test_a_file_that_is_missing_or_cut_short_is_named(objects: Objects, tmp_path: Path) -> None:
    fork = fork_of(objects, PIN, *STEPS)
    write(objects, tmp_path, fork)
    (tmp_path / "slime/0001-change-1.patch").unlink()
    whole = tmp_path / "slime.patch"
    whole.write_bytes(whole.read_bytes()[: -len(b"+more\n")])
    missing, damaged = (
        "slime/0001-change-1.patch: read: No such file",
        "slime.patch: read: The patch is",
    )
    found = verify(objects, tmp_path, fork)
    assert any(line.startswith(missing) for line in found)
    assert any(line.startswith(damaged) for line in found)


def test_another_base_is_named(objects: Objects, tmp_path: Path) -> None:
    fork = fork_of(objects, PIN, *STEPS)
    write(objects, tmp_path, fork)
    other = make(objects, PIN | {b"other": b"moved on\n"})
    found = [str(f) for f in export.verify(objects, tmp_path, "slime", other).findings]
    assert f"index.json: tree before: is {fork.base}, but the pin's with layers is {other}" in found


# -- downstream ----------------------------------------------------------------------------------


def lay_out(folder: Path, files: Files) -> Path:
    """Files in a directory."""
    folder.mkdir(parents=True, exist_ok=True)
    for path, file in files.items():
        mode, content = (FILE, file) if isinstance(file, bytes) else file
        place = folder / os.fsdecode(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        if mode == SYMLINK:
            place.symlink_to(os.fsdecode(content))
        else:
            place.write_bytes(content)
            place.chmod(0o755 if mode == EXECUTABLE else 0o644)
    return folder


def files_in(folder: Path) -> dict[bytes, bytes | tuple[int, bytes]]:
    found: dict[bytes, bytes | tuple[int, bytes]] = {}
    for place in folder.rglob("*"):
        path = os.fsencode(place.relative_to(folder))
        if path.split(b"/")[0] == b".git":
            continue
        if place.is_symlink():
            found[path] = (SYMLINK, os.fsencode(place.readlink()))
        elif place.is_file():
            runs = place.stat().st_mode & 0o100
            found[path] = (EXECUTABLE, place.read_bytes()) if runs else place.read_bytes()
        else:
            assert any(place.iterdir()), f"{place} was left empty"
    return found


@pytest.fixture
def out(objects: Objects, tmp_path: Path) -> Path:
    """An export of PIN → STEPS."""
    write(objects, tmp_path / "out", fork_of(objects, PIN, *STEPS))
    return tmp_path / "out"


CHANGED = (b"d/a.py", b"gone.py", b"new/b.py", b"z.txt")


def test_it_applies_to_a_plain_directory_and_can_be_taken_back(out: Path, tmp_path: Path) -> None:
    checkout = lay_out(tmp_path / "src", PIN)
    assert export.apply_to(out, checkout).changed == CHANGED
    assert files_in(checkout) == STEPS[-1]
    assert export.apply_to(out, checkout).changed == ()
    assert export.apply_to(out, checkout, reverse=True).changed == CHANGED
    assert files_in(checkout) == PIN
    assert export.apply_to(out, checkout, reverse=True).changed == ()


@pytest.mark.parametrize("inside", [".", "third_party/src"])
def test_it_applies_to_a_worktree_and_inside_another_repository(
    out: Path, tmp_path: Path, inside: str
) -> None:
    subprocess.run(["git", "init", "--quiet", tmp_path / "repo"], check=True)
    checkout = lay_out(tmp_path / "repo" / inside, PIN)
    export.apply_to(out, checkout)
    assert files_in(checkout) == STEPS[-1]


def test_a_check_changes_nothing(out: Path, tmp_path: Path) -> None:
    checkout = lay_out(tmp_path / "src", PIN)
    assert export.apply_to(out, checkout, check=True).changed == CHANGED
    assert files_in(checkout) == PIN


def test_lines_that_moved_are_found_and_reported(out: Path, tmp_path: Path) -> None:
    checkout = lay_out(tmp_path / "src", PIN | {b"d/a.py": b"# vendored\n" + LINES})
    assert export.apply_to(out, checkout).moved == (b"d/a.py",)
    assert files_in(checkout)[b"d/a.py"] == b"# vendored\n" + STEPS[-1][b"d/a.py"]  # type: ignore[operator]
    assert export.apply_to(out, checkout).changed == ()


def test_other_content_is_refused_whole(out: Path, tmp_path: Path) -> None:
    theirs = PIN | {b"d/a.py": LINES.replace(b"line 20\n", b"theirs\n")}
    checkout = lay_out(tmp_path / "src", theirs)
    with pytest.raises(NeedsPerson) as caught:
        export.apply_to(out, checkout)
    assert (
        'd/a.py: hunk 1 (line 17): expected "line 20", the file has "theirs"' in caught.value.what
    )
    assert "slime at v1 and docker/x.patch" in caught.value.todo
    assert files_in(checkout) == theirs


def test_a_run_that_was_killed_is_completed(out: Path, tmp_path: Path) -> None:
    half = PIN | {b"d/a.py": STEPS[-1][b"d/a.py"]}
    checkout = lay_out(tmp_path / "src", half)
    assert export.apply_to(out, checkout).changed == (b"gone.py", b"new/b.py", b"z.txt")
    assert files_in(checkout) == STEPS[-1]


def test_a_change_that_is_there_in_part_is_refused(out: Path, tmp_path: Path) -> None:
    partly = PIN | {b"d/a.py": b"# vendored\n" + LINES, b"z.txt": STEPS[-1][b"z.txt"]}
    checkout = lay_out(tmp_path / "src", partly)
    with pytest.raises(NeedsPerson, match=r"have the change already.*: z\.txt\."):
        export.apply_to(out, checkout)
    assert files_in(checkout) == partly


def test_nothing_is_written_through_a_symbolic_link(out: Path, tmp_path: Path) -> None:
    elsewhere = lay_out(tmp_path / "elsewhere", {b"a.py": LINES})
    checkout = lay_out(
        tmp_path / "src",
        {b"d": (SYMLINK, os.fsencode(elsewhere)), b"gone.py": b"x\n", b"z.txt": b"z\n"},
    )
    with pytest.raises(UsageError, match="is a symbolic link"):
        export.apply_to(out, checkout)
    assert files_in(elsewhere) == {b"a.py": LINES}


def test_a_link_in_the_place_of_a_file_is_refused(out: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"z\n")
    checkout = lay_out(tmp_path / "src", PIN | {b"z.txt": (SYMLINK, os.fsencode(secret))})
    with pytest.raises(NeedsPerson, match=r"z\.txt"):
        export.apply_to(out, checkout)
    assert secret.read_bytes() == b"z\n"


def test_a_patch_edited_by_hand_is_refused(out: Path, tmp_path: Path) -> None:
    checkout = lay_out(tmp_path / "src", PIN)
    edit(out / "slime.patch", b"+twenty", b"+forty")
    with pytest.raises(NeedsPerson, match="SHA-256"):
        export.apply_to(out, checkout)


def test_one_fork_of_several_has_to_be_named(objects: Objects, tmp_path: Path) -> None:
    forks = [fork_of(objects, PIN, *STEPS[:n], name=name) for n, name in ((1, "a"), (2, "b"))]
    write(objects, tmp_path / "out", *forks)
    checkout = lay_out(tmp_path / "src", PIN)
    with pytest.raises(UsageError) as caught:
        export.apply_to(tmp_path / "out", checkout)
    assert caught.value.todo == "Name one of: a, b."
    export.apply_to(tmp_path / "out", checkout, "a")
    assert files_in(checkout) == STEPS[0]


def test_a_submodule_cannot_be_written(objects: Objects, tmp_path: Path) -> None:
    moved = [{b"sub": (SUBMODULE, digit * 40)} for digit in (b"1", b"2")]
    write(objects, tmp_path / "out", fork_of(objects, *moved))
    with pytest.raises(UsageError, match="the submodule sub"):
        export.apply_to(tmp_path / "out", lay_out(tmp_path / "src", PIN))


@pytest.mark.parametrize("operation", ["replace", "unlink", "mkdir", "write_bytes"])
def test_where_writing_fails_everything_is_as_it_was(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    """The disk is full at the first such operation in the checkout, at the second, …"""
    original = getattr(Path, operation)
    checkout = tmp_path / "src"
    left = 0

    def run_out(self: Path, *args: object, **options: object) -> object:
        nonlocal left
        if checkout in self.parents:
            left -= 1
            if left == 0:
                raise OSError(28, "No space left on device", str(self))
        return original(self, *args, **options)

    for failing in range(1, 20):
        lay_out(checkout, PIN)
        left = failing
        with monkeypatch.context() as patched:
            patched.setattr(Path, operation, run_out)
            try:
                export.apply_to(out, checkout)
            except EnvironmentFault as error:
                assert "No space left on device" in error.what
                assert files_in(checkout) == PIN
            else:
                break
    assert failing > 1
    assert files_in(checkout) == STEPS[-1]


NAMES = [b"a", b"d", b"d/b", b"d/e/c", b"two words", b"caf\xe9", b"new\nline"]
content = st.one_of(
    st.binary(max_size=20),
    st.lists(st.sampled_from([b"x\n", b"y\r\n", b"\n"]), max_size=8).map(b"".join),
)
file = st.one_of(
    content,
    st.tuples(st.just(EXECUTABLE), content),
    st.tuples(st.just(SYMLINK), st.sampled_from([b"a", b"/etc/passwd"])),
)


@st.composite
def trees(draw: st.DrawFn) -> dict[bytes, bytes | tuple[int, bytes]]:
    files = draw(st.dictionaries(st.sampled_from(NAMES), file, max_size=5))
    if b"d" in files:
        files = {path: file for path, file in files.items() if not path.startswith(b"d/")}
    return files


@settings(max_examples=40, deadline=None)
@given(before=trees(), after=trees())
def test_applying_gives_the_tip_and_taking_back_the_pin(
    shared: Objects, tmp_path_factory: pytest.TempPathFactory, before: Files, after: Files
) -> None:
    folder = tmp_path_factory.mktemp("law")
    fork = fork_of(shared, before, after)
    write(shared, folder / "out", fork)
    assert export.verify(shared, folder / "out", "slime", fork.base).findings == ()
    checkout = lay_out(folder / "src", before)
    export.apply_to(folder / "out", checkout)
    assert files_in(checkout) == after
    export.apply_to(folder / "out", checkout, reverse=True)
    assert files_in(checkout) == before


def test_every_refusal_says_what_is_kept(out: Path, tmp_path: Path) -> None:
    for wrong in (tmp_path / "nowhere", out / "index.json"):
        with pytest.raises(ForkmanError, match="is no directory") as caught:
            export.apply_to(out, wrong)
        assert caught.value.kept == "Nothing was changed."
