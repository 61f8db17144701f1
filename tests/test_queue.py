"""A queue is a folder that is kept byte for byte, or a range of commits."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rebase import mail, queue
from rebase.errors import UsageError
from rebase.git import EMPTY_TREE, Git, ObjectId
from rebase.mail import Mail
from rebase.queue import Patch, Queue, RecipeFile

ANN = b"Ann Author <ann@example.com> 1700000000 +0800"
DIFF = b"diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\r\n+b\xe9\r\n"
BY_HAND = (
    b"Subject: [PATCH 1/2] [NPU] x\nFrom: A B <a@b.c>\nDate: 15 Nov 2023 06:13:20 +0800\n\n"
    b"---\n x | 2 +-\n\n" + DIFF + b"-- \n2.39.5\n\n"
)


def change(message: bytes) -> Mail:
    return Mail(ANN, message, DIFF)


def save(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A queue with comments, a recipe and a patch whose bytes `mail.write` would not write."""
    return save(
        tmp_path / "forks" / "slime",
        {
            "series": b"# The queue of slime\r\n\n# why b\nb.patch\n  eager.py  \n\n#end\na.patch",
            "a.patch": mail.write(change(b"a\n")),
            "b.patch": BY_HAND,
            "eager.py": b"from rebase import recipe\n",
        },
    )


def names(loaded: Queue) -> list[str]:
    return [change.name for change in loaded.changes]


def messages(loaded: Queue) -> list[bytes]:
    return [change.mail.message for change in loaded.changes if isinstance(change, Patch)]


# -- load and files ------------------------------------------------------------------------------


def test_changes_are_in_the_order_of_series(folder: Path) -> None:
    loaded = queue.load(folder)
    assert names(loaded) == ["b.patch", "eager.py", "a.patch"]
    assert messages(loaded) == [b"[NPU] x\n", b"a\n"]
    assert loaded["eager.py"] == RecipeFile(
        "eager.py", b"from rebase import recipe\n", folder / "eager.py"
    )


def test_loading_and_saving_keeps_every_byte(folder: Path) -> None:
    assert queue.load(folder).files() == {file.name: file.read_bytes() for file in folder.iterdir()}


def test_an_empty_queue_is_a_queue(tmp_path: Path) -> None:
    assert queue.load(save(tmp_path, {"series": b""})).changes == ()


SUBJECTS = [
    "[NPU] x",
    ":tag: x",
    "Re: x",
    "two\nlines",
    "掩码",
    "fix npu",
    "Fix NPU!",
    "",
    "FIX npu",
]
BODIES = ["", "\n", "\n\nbody", "\n\n---\n", "\n\ndiff --git a/x b/x\n", "\n\nFrom: x\n", "\r\n",
          "\n\nFrom a Tue Nov 14 22:13:20 2023\n", "\n\n-- >8 --\n", "\n\n a \n\n\n",
          "\n\n-- \nx\n", "\n\nForkman-Message: \"x\"\n"]  # fmt: skip
MESSAGES = st.builds(
    lambda subject, body: (subject + body).encode(),
    st.sampled_from(SUBJECTS) | st.text(st.characters(codec="utf-8"), max_size=9),
    st.sampled_from(BODIES),
) | st.binary(max_size=12)


@settings(max_examples=60, deadline=None)
@given(st.lists(MESSAGES, max_size=7), st.sampled_from([b"", b"#\n", b"\n# a\r\n\n", b"#"]))
def test_saving_and_loading_is_a_fixed_point(
    tmp_path_factory: pytest.TempPathFactory, texts: list[bytes], comment: bytes
) -> None:
    made = Queue(comment, ())
    for text in texts:
        made = made.with_added(change(text))
    loaded = queue.load(save(tmp_path_factory.mktemp("forks"), made.files()))
    assert loaded == made
    assert messages(loaded) == texts
    assert loaded.files() == made.files()


# -- mistakes ------------------------------------------------------------------------------------


def test_all_mistakes_are_told_at_once(folder: Path) -> None:
    (folder / "series").write_bytes(
        b"a.patch\n../up.patch\n/etc/x.patch\n.git/x.py\n-x.patch\nx.diff\nA.patch\na.patch\n"
        b"\xe9.patch\ngone.patch\nbare.patch\nx\x1b.py\neager.py\n"
    )
    save(folder, {"bare.patch": DIFF, "unlisted.patch": b"", ".hidden.py": b"", "notes.txt": b""})
    with pytest.raises(UsageError) as error:
        queue.load(folder)
    cannot = (
        "cannot name a change; a name begins with a letter or digit, holds no slash and no "
        "control character, and ends in .patch or .py"
    )
    assert error.value.what.splitlines() == [
        f"forks/slime/series:2: '../up.patch' {cannot}",
        f"forks/slime/series:3: '/etc/x.patch' {cannot}",
        f"forks/slime/series:4: '.git/x.py' {cannot}",
        f"forks/slime/series:5: '-x.patch' {cannot}",
        f"forks/slime/series:6: 'x.diff' {cannot}",
        "forks/slime/series:7: A.patch and a.patch are one file where case does not matter",
        "forks/slime/series:8: a.patch is listed twice",
        "forks/slime/series:9: not UTF-8",
        "forks/slime/gone.patch: No such file or directory",
        "forks/slime/bare.patch: it is no mail: it has no From:, Date: and Subject:",
        f"forks/slime/series:12: 'x\\x1b.py' {cannot}",
        "forks/slime/b.patch: not listed in series, so it would not be applied",
        "forks/slime/unlisted.patch: not listed in series, so it would not be applied",
    ]
    assert error.value.todo


@pytest.mark.parametrize("name", ["series", "a.patch", "eager.py"])
def test_a_symbolic_link_is_refused(folder: Path, name: str) -> None:
    (folder / name).rename(folder / "elsewhere")
    (folder / name).symlink_to("elsewhere")
    with pytest.raises(UsageError, match=rf"{name}: a symbolic link"):
        queue.load(folder)


def test_a_folder_without_series_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"slime/series: No such file") as error:
        queue.load(tmp_path / "forks" / "slime")
    assert "may be empty" in error.value.todo


def test_the_same_name_in_two_unicode_forms_is_told(folder: Path) -> None:
    save(
        folder, {"series": "\u00e9.py\ne\u0301.py\n".encode(), "\u00e9.py": b"", "e\u0301.py": b""}
    )
    for name in ("a.patch", "b.patch", "eager.py"):
        (folder / name).unlink()
    with pytest.raises(UsageError, match=r"series:2: .* one file"):
        queue.load(folder)


# -- new queues ----------------------------------------------------------------------------------


def test_a_changed_change_is_written_anew_and_nothing_else(folder: Path) -> None:
    loaded = queue.load(folder)
    changed = loaded.with_change("a.patch", change(b"[NPU] a\n"))
    assert changed.files() == loaded.files() | {"a.patch": mail.write(change(b"[NPU] a\n"))}


def test_a_change_that_says_the_same_keeps_its_bytes(folder: Path) -> None:
    loaded = queue.load(folder)
    patch = loaded["b.patch"]
    assert isinstance(patch, Patch)
    same = Mail(patch.mail.author, patch.mail.message, patch.mail.diff)
    assert loaded.with_change("b.patch", same).files()["b.patch"] == BY_HAND != mail.write(same)


def test_a_recipe_cannot_become_a_patch(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"eager.py is a recipe"):
        queue.load(folder).with_change("eager.py", change(b"x\n"))


def test_a_change_taken_out_leaves_comments_and_order(folder: Path) -> None:
    left = queue.load(folder).without("eager.py")
    assert left.series == b"# The queue of slime\r\n\n# why b\nb.patch\n\n#end\na.patch"
    assert names(left) == ["b.patch", "a.patch"]
    assert set(left.files()) == {"series", "a.patch", "b.patch"}


def test_a_change_taken_out_takes_the_comment_right_above_it_along(folder: Path) -> None:
    loaded = queue.load(folder)
    assert (
        loaded.without("b.patch").series
        == b"# The queue of slime\r\n\n  eager.py  \n\n#end\na.patch"
    )
    assert loaded.without("a.patch").series == (
        b"# The queue of slime\r\n\n# why b\nb.patch\n  eager.py  \n\n"
    )
    series = b"# of all\n\n# about a\n#\n  # more about a\na.patch\n# about b\nb.patch\n"
    save(folder, {"series": series})
    (folder / "eager.py").unlink()
    assert queue.load(folder).without("a.patch").series == b"# of all\n\n# about b\nb.patch\n"


def test_a_new_change_goes_to_the_end(folder: Path) -> None:
    grown = queue.load(folder).with_added(change(b"New one\n"))
    assert grown.series.endswith(b"#end\na.patch\nnew-one.patch\n")
    assert names(grown) == ["b.patch", "eager.py", "a.patch", "new-one.patch"]


def test_a_new_change_goes_where_it_is_told(folder: Path) -> None:
    grown = queue.load(folder).with_added(change(b"New one\n"), after="b.patch")
    assert b"# why b\nb.patch\nnew-one.patch\n  eager.py  \n" in grown.series
    assert names(grown) == ["b.patch", "new-one.patch", "eager.py", "a.patch"]
    save(folder, grown.files())
    assert queue.load(folder) == grown


def test_a_new_order_moves_each_change_with_its_comment(folder: Path) -> None:
    loaded = queue.load(folder)
    moved = loaded.with_order(["a.patch", "b.patch", "eager.py"])
    assert moved.series == (
        b"# The queue of slime\r\n\n#end\na.patch\n# why b\nb.patch\n\n  eager.py  \n"
    )
    assert names(moved) == ["a.patch", "b.patch", "eager.py"]
    assert loaded.with_order(names(loaded)) == loaded
    with pytest.raises(ValueError, match="not an order"):
        loaded.with_order(["a.patch"])


@pytest.mark.parametrize("call", ["with_change", "without", "with_added"])
def test_a_change_that_is_not_there_is_named(folder: Path, call: str) -> None:
    arguments = {
        "with_change": ("no.patch", change(b"x")),
        "without": ("no.patch",),
        "with_added": (change(b"x"), "no.patch"),
    }
    with pytest.raises(UsageError, match=r"no change 'no.patch'") as error:
        getattr(queue.load(folder), call)(*arguments[call])
    assert "b.patch, eager.py, a.patch" in error.value.todo


def test_the_key_is_of_changes_and_their_order_only(folder: Path) -> None:
    loaded = queue.load(folder)
    assert Queue(b"# other\n" + loaded.series, loaded.changes).key() == loaded.key()
    others = [
        loaded.without("a.patch"),
        loaded.with_order(["a.patch", "b.patch", "eager.py"]),
        loaded.with_change("a.patch", change(b"other\n")),
    ]
    assert len({loaded.key(), *(other.key() for other in others)}) == 4


# -- slugs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "subject, slug",
    [
        ("fix npu", "fix-npu"),
        ("Fix NPU!", "fix-npu"),
        ("[NPU] x", "npu-x"),
        (":tag: x", "tag-x"),
        ("掩码", "change"),
        ("", "change"),
        ("../../etc/passwd\0", "etc-passwd"),
        ("a" * 49 + " " + "b" * 49, "a" * 49),
    ],
)
def test_a_slug_is_portable(subject: str, slug: str) -> None:
    assert queue.slug(subject, ()) == slug


def test_slugs_are_unique() -> None:
    assert queue.slug("Fix NPU!", {"fix-npu", "fix-npu-2"}) == "fix-npu-3"


# -- a queue that is a branch --------------------------------------------------------------------


@pytest.fixture
def git(tmp_path: Path) -> Git:
    repository = Git(tmp_path)
    repository.run("init", "--quiet", "--bare")
    return repository


def commit(
    git: Git, message: bytes, *parents: ObjectId, author: bytes = ANN, encoding: bytes = b""
) -> ObjectId:
    content = b"tree %s\n" % EMPTY_TREE.encode()
    content += b"".join(b"parent %s\n" % parent.encode() for parent in parents)
    content += b"author %s\ncommitter %s\n%s\n%s" % (author, ANN, encoding, message)
    git.run("mktree")
    written = git.run("hash-object", "-t", "commit", "-w", "--stdin", "--literally", input=content)
    return ObjectId(written.decode().strip())


def no_diff(old: ObjectId, new: ObjectId) -> bytes:
    return b""


def test_commits_are_changes_oldest_first_without_merges(git: Git) -> None:
    base = commit(git, b"base\n")
    one = commit(git, b"one\n", base)
    side = commit(git, b"side\n", base)
    merge = commit(git, b"merge\n", one, side)
    two = commit(git, b"two", merge)
    asked = []

    def diff(old: ObjectId, new: ObjectId) -> bytes:
        asked.append((old, new))
        return DIFF

    branch = queue.from_commits(git, base, two, diff)
    rebased = git.text("rev-list", "--topo-order", "--reverse", "--no-merges", f"{base}..{two}")
    assert branch.commits == rebased.split()
    assert branch.merges == [merge]
    by_commit = dict(zip(branch.commits, branch.mails, strict=True))
    assert by_commit == {
        one: change(b"one\n"), side: change(b"side\n"), two: change(b"two")
    }  # fmt: skip
    assert sorted(asked) == sorted([(base, one), (base, side), (merge, two)])


def test_a_root_is_a_change_to_the_empty_tree(git: Git) -> None:
    base, root = commit(git, b"base\n"), commit(git, b"root\n")
    asked = []
    queue.from_commits(git, base, root, lambda old, new: asked.append((old, new)) or b"")
    assert asked == [(EMPTY_TREE, root)]


def test_no_commits_are_no_changes(git: Git) -> None:
    base = commit(git, b"base\n")
    assert queue.from_commits(git, base, base, no_diff) == ([], [], [])


@pytest.mark.parametrize(
    "author, message, encoding, read",
    [
        (b"\xe9va", b"caf\xe9\n", b"encoding ISO-8859-1\n", ("éva", "café\n".encode())),
        (b"\xd1\xda", b"\xd1\xda\xc2\xeb", b"encoding GB18030\n", ("掩", "掩码".encode())),
        (b"\xe9va", b"caf\xe9\n", b"", ("éva", b"caf\xe9\n")),
        (b"Eva", b"caf\xe9\n", b"encoding klingon\n", ("Eva", b"caf\xe9\n")),
        (b"Eva", b"x\n", b"gpgsig -----\n encoding ISO-8859-1\n author x\n", ("Eva", b"x\n")),
    ],
)
def test_messages_and_authors_become_utf8(
    git: Git, author: bytes, message: bytes, encoding: bytes, read: tuple[str, bytes]
) -> None:
    base = commit(git, b"base\n")
    ident = b" <e@b.c> 1700000000 +0800"
    tip = commit(git, message, base, author=author + ident, encoding=encoding)
    [made] = queue.from_commits(git, base, tip, no_diff).mails
    assert made == Mail(read[0].encode() + ident, read[1], b"")
    assert mail.read(mail.write(made)) == made


def test_commits_that_were_mails_are_the_changes_they_were(git: Git) -> None:
    base = commit(git, b"base\n")
    sent = Mail(b"Li <l@b.c> 1700000000 +0800", b"[NPU] x", b"")
    message = mail.write(sent).partition(b"\n\n")[2]
    tip = commit(git, b"x\n\n" + message, base, author=b"l@b.c <l@b.c> 1700000000 +0800")
    assert queue.from_commits(git, base, tip, no_diff).mails == [sent]


def test_a_commit_without_a_proper_author_is_named(git: Git) -> None:
    base = commit(git, b"base\n")
    tip = commit(git, b"x\n", base, author=b"nobody")
    with pytest.raises(UsageError, match=rf"{tip} .* not an author: b'nobody'"):
        queue.from_commits(git, base, tip, no_diff)


def test_a_long_path_keeps_its_end_in_the_slug() -> None:
    path = "python/sglang/srt/hardware_backend/npu/attention/ascend_backend.py"
    assert queue.slug(path, set()) == "hardware-backend-npu-attention-ascend-backend-py"
