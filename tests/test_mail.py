"""Mail carries a change through `git am` and back without losing a byte."""

import shutil

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rebase import mail
from rebase.git import Git
from rebase.mail import BadMail, Mail, NotMail

ANN = b"Ann Author <ann@example.com> 1700000000 +0800"
DIFF = b"""\
diff --git a/mask.py b/mask.py
new file mode 100644
index 0000000..9daeafb
--- /dev/null
+++ b/mask.py
@@ -0,0 +1 @@
+test
"""
COMMITTER = {"GIT_COMMITTER_NAME": "C", "GIT_COMMITTER_EMAIL": "c@example.com"}

PLAIN = [
    b"Keep the mask\n",
    b"Keep the mask\n\nBecause it is needed.\n\n  indented\n\nSigned-off-by: A <a@b.c>\n",
    "保留掩码\n\n因为需要。\n".encode(),
    b"Fix =?UTF-8?q?literal?= words\n",
    b"diff --git a/x b/x\n",
    b"From: here to there\n",
    b"a" * 2000 + b"\n",
    b"x\n\nFrom what we know, it is fine.\n",
    b"",
]
NASTY = [
    b"[NPU] x\n",
    b"[PATCH] x\n",
    b":tag: x\n",
    b"Re: x\n",
    b"Re: [PATCH 1/2] [NPU] x\n",
    b"two\nlines\n\nbody\n",
    b"two\n  lines\n",
    "【NPU】 \n 掩码\n".encode(),
    b"double  space\n",
    b"x\n\n---\n",
    b"x\n\nbefore\n---\nafter\n",
    b"x\n\n--- a/file\n",
    b"x\n\ndiff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n",
    b"x\n\nIndex: y\n",
    b"x\n\nFrom " + b"0" * 40 + b" Mon Sep 17 00:00:00 2001\n",
    b"x\n\na\nFrom a@b.c Tue Nov 14 22:13:20 2023\nFrom: b\n",
    b"x\n\nFrom: Somebody Else <else@example.com>\n\nbody\n",
    b"x\n\nfrom:nobody\n",
    b"x\n\nSubject: y\nDate: now\n",
    b"x\n\n>From " + b"0" * 40 + b" Mon Sep 17 00:00:00 2001\n",
    b"x\n\n[PATCH] y\n",
    b"x\n\nabove\n-- >8 --\nbelow\n",
    b"x\n\n-- \nsignature\n",
    b"   leading space\n",
    b"x\n\ntrailing space  \n",
    b"x\n\n\n\nbody\n\n\n",
    b"\n\nx\n",
    b"x\nbody without a blank line\n",
    b"no final newline",
    b"\n",
    b" ",
    b"x\r\n\r\nCRLF\r\n",
    b"x\n\na\rb\n",
    b"caf\xe9\n\nLatin-1 \xff\n",
    "x\n\n\ufffe \ufdd0 \U0001ffff\n".encode(),
    b"x\n\n\0\x1b[31m\n",
    b"x\n\nForkman-Message: \"y\\n\"\n",
    b"x\n\nForkman-Author: \"y\"\nForkman-Message: \"y\\n\"\n",
    b"Forkman-Message: \"\"\n",
    b"x\n\nForkman-Message: {}\n",
    b"[NPU]\n",
    b"b" * 2000 + b"\n \n" + b"c" * 2000,
]  # fmt: skip
AUTHORS = [
    b"\xe6\x9d\x8e\xe6\x98\x8e <li@example.com> 1700000000 +0800",
    b"Smith, J. [bot] <49+bot[bot]@example.com> 1700000000 -0330",
    b"Li <li@example.com> 1700000000 +0000",
    b"ann@example.com <ann@example.com> 1700000000 +0000",
    b"Ann (NPU) \"A\" Jr. <ann@example.com> 1700000000 +0000",
    b"Mail System Internal Data <m@example.com> 1700000000 +0000",
    b"no mail address <root> 1700000000 +0000",
    b"no mail <> 1700000000 +0000",
    b" <ann@example.com> 1700000000 +0000",
    b" <> 1700000000 +0000",
    b". <.> 1700000000 +0000",
    b"=?UTF-8?q?word?= <a@b@c> 1700000000 +0000",
    "Ω ÷ <ω@example.com> 1700000000 +0000".encode(),
    b"a name much longer than git likes an author's name to be, really <a@b.c> 1 +0000",
    b"  Two  Spaces  <a@b.c> 1700000000 +0000",
    b"Epoch <e@b.c> 0 -0800",
    b"Far <f@b.c> 99999999999 +0000",
    b"Zone <z@b.c> 1700000000 -0000",
    b"Zone <z@b.c> 1700000000 +9999",
]  # fmt: skip


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Git:
    directory = tmp_path_factory.mktemp("repository")
    git = Git(directory)
    git.run("init", "--quiet", "--initial-branch=main")
    git.run("config", "core.autocrlf", "false")
    git.run(
        "-c", "user.name=R", "-c", "user.email=r@b.c",
        "commit", "--quiet", "--allow-empty", "-m", "root",
    )  # fmt: skip
    git.run("tag", "root")
    return git


def am(git: Git, mails: list[bytes], *options: str) -> list[tuple[bytes, bytes]]:
    """The author and message of each commit that `git am` makes of the mails."""
    shutil.rmtree(git.directory / ".git" / "rebase-apply", ignore_errors=True)  # of a failed run
    git.run("reset", "--quiet", "--hard", "root")
    git.run("clean", "--quiet", "-fdx")
    files = []
    for number, raw in enumerate(mails):
        file = git.directory / ".git" / f"{number}.mail"
        file.write_bytes(raw)
        files.append(str(file))
    git.run("am", "--quiet", "--empty=keep", *options, *files, env=COMMITTER)
    made = []
    for id in git.text("rev-list", "--reverse", "root..HEAD").split():
        headers, _, message = git.run("cat-file", "commit", id).partition(b"\n\n")
        made.append((headers.split(b"\nauthor ")[1].split(b"\n")[0], message))
    return made


def numbered(number: int) -> bytes:
    return DIFF.replace(b"mask", b"mask%d" % number)


def assert_law(git: Git, changes: list[tuple[bytes, bytes]]) -> None:
    """export → git am → export gives the same bytes, however `git am` is told to treat subjects."""
    sent = [Mail(author, text, numbered(n)) for n, (author, text) in enumerate(changes)]
    exported = [mail.write(change) for change in sent]
    assert [mail.read(raw) for raw in exported] == sent
    for options in ((), ("--keep",), ("--keep-non-patch",), ("--keep-cr",), ("--scissors",)):
        made = am(git, exported, *options)
        assert len(made) == len(sent), options
        for change, (author, message) in zip(sent, made, strict=True):
            assert mail.original(message) == change.message, options
            assert mail.original_author(author, message) == change.author, options


def test_every_nasty_message_comes_back_from_git_am(repository: Git) -> None:
    assert_law(repository, [(ANN, message) for message in PLAIN + NASTY])


def test_every_author_comes_back_from_git_am(repository: Git) -> None:
    assert_law(repository, [(author, b"x\n") for author in [ANN, *AUTHORS]])


@pytest.mark.parametrize("message", PLAIN)
def test_a_plain_message_has_no_trailer(message: bytes) -> None:
    assert b"Forkman-" not in mail.write(Mail(ANN, message, DIFF))


@pytest.mark.parametrize("author", [ANN, *AUTHORS[:2]])
def test_an_ordinary_author_has_no_trailer(author: bytes) -> None:
    assert b"Forkman-" not in mail.write(Mail(author, b"x\n", DIFF))


LINES = st.one_of(
    st.sampled_from(sorted({line for text in PLAIN + NASTY for line in text.split(b"\n")})),
    st.text(st.characters(codec="utf-8"), max_size=12).map(str.encode),
    st.text("[]:Rr e=?-<>8%\t\r", max_size=12).map(str.encode),
    st.just(b""),
)
MESSAGES = st.lists(LINES, max_size=7).map(b"\n".join) | st.binary(max_size=30)
NAMES = st.text(st.characters(codec="utf-8", exclude_characters="<>\n\0"), max_size=65)
IDENTS = st.sampled_from([ANN, *AUTHORS]) | st.builds(
    lambda name, email, seconds, zone: f"{name} <{email}> {seconds} {zone}".encode(),
    NAMES,
    NAMES | st.from_regex(r"[a-z.]+@[a-z]+\.org", fullmatch=True),
    st.integers(0, 5_000_000_000),
    st.from_regex(r"[+-](0[0-9]|1[0-4])[0-5][0-9]", fullmatch=True) | st.just("+9999"),
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.just(ANN) | IDENTS, MESSAGES), max_size=25))
def test_any_message_of_any_author_comes_back_from_git_am(
    repository: Git, changes: list[tuple[bytes, bytes]]
) -> None:
    assert_law(repository, changes)


PATCH_LINES = st.sampled_from(
    [b"-- \n", b"-- foo\n", b"@@ -1,2 +1 @@\n", b" a\r\n", b"\\ No newline at end of file\n", b"\n",
     b"diff --git a/y b/y\n", b"---\n", b"\xff\0\n", b"GIT binary patch\n", b"+++ b\n"]
)  # fmt: skip
DIFFS = st.just(b"") | st.lists(PATCH_LINES, max_size=8).map(
    lambda lines: b"diff --git a/x b/x\n" + b"".join(lines)
)


@settings(deadline=None)
@given(IDENTS, MESSAGES, DIFFS)
@example(ANN, b"", b"")
@example(ANN, b"x", DIFF[:-1])
def test_what_is_written_is_read_back(author: bytes, message: bytes, diff: bytes) -> None:
    change = Mail(author, message, diff)
    assert mail.read(mail.write(change)) == change


@pytest.mark.parametrize("message", [b"", b"x\n", b"[NPU] x\n\n---\n"])
def test_an_empty_change_is_an_empty_commit(repository: Git, message: bytes) -> None:
    sent = Mail(ANN, message, b"")
    [(author, made)] = am(repository, [mail.write(sent)])
    assert (mail.original(made), author) == (message, ANN)
    assert repository.text("rev-parse", "HEAD^{tree}") == repository.text(
        "rev-parse", "root^{tree}"
    )


def test_the_format_is_this() -> None:
    raw = mail.write(Mail(ANN, "[NPU] 掩码\n\nBody — here.\n".encode(), DIFF))
    assert raw.decode() == (
        "From 0000000000000000000000000000000000000000 Mon Sep 17 00:00:00 2001\n"
        "From: Ann Author <ann@example.com>\n"
        "Date: Wed, 15 Nov 2023 06:13:20 +0800\n"
        "Subject: =?UTF-8?q?=5BNPU=5D=20=E6=8E=A9=E7=A0=81?=\n"
        "MIME-Version: 1.0\n"
        "Content-Type: text/plain; charset=UTF-8\n"
        "Content-Transfer-Encoding: 8bit\n"
        "\n"
        "Body — here.\n"
        "\n"
        'Forkman-Message: "[NPU] \\u63a9\\u7801\\n\\nBody \\u2014 here.\\n"\n'
        "---\n" + DIFF.decode() + "-- \nforkman\n"
    )


def test_a_subject_with_a_tag_stays_readable() -> None:
    assert b"\nSubject: [NPU] Keep the mask\n" in mail.write(Mail(ANN, b"[NPU] Keep the mask", b""))


def test_no_header_is_longer_than_mail_allows() -> None:
    raw = mail.write(Mail("长".encode() * 19 + ANN[10:], "掩码".encode() * 90 + b"\n", DIFF))
    assert max(len(line) for line in raw.partition(b"\n\n")[0].split(b"\n")) <= 76


# -- a person edits ------------------------------------------------------------------------------


def test_an_edit_of_the_commit_wins_over_the_trailer(repository: Git) -> None:
    am(repository, [mail.write(Mail(ANN, b"[NPU] x\n\nbody\n", DIFF))], "--keep")
    message = repository.run("cat-file", "commit", "HEAD").partition(b"\n\n")[2]
    edited = message.replace(b"body", b"better body")
    assert mail.original(edited) == b"[NPU] x\n\nbetter body\n"


def test_an_edit_of_the_file_wins_over_the_trailer() -> None:
    raw = mail.write(Mail(ANN, b"[NPU] x\n\nbody\n", DIFF))
    assert mail.read(raw.replace(b"] x\n", b"] y\n", 1)).message == b"[NPU] y\n\nbody\n"


def test_a_sign_off_added_by_git_am_is_kept(repository: Git) -> None:
    [(_, message)] = am(
        repository, [mail.write(Mail(ANN, b"two\nlines\n", DIFF))], "--keep", "--signoff"
    )
    assert mail.original(message) == b"two\nlines\n\nSigned-off-by: C <c@example.com>\n"


def test_an_author_that_was_set_anew_wins_over_the_trailer() -> None:
    message = mail.write(Mail(AUTHORS[2], b"x\n", b"")).partition(b"\n\n")[2]
    message = b"x\n\n" + message[message.index(b"Forkman-Author") :]
    assert mail.original_author(b"li@example.com" + AUTHORS[2][2:], message) == AUTHORS[2]
    assert mail.original_author(ANN, message) == ANN


@pytest.mark.parametrize(
    "message", [b"", b"x\n", b"x\n\nForkman-Message: y\n", b'x\n\nForkman-Message: "\\ud800"\n']
)
def test_a_message_without_a_trailer_is_its_own_original(message: bytes) -> None:
    assert mail.original(message) == message


# -- mails that others wrote ---------------------------------------------------------------------


def commit(git: Git, message: bytes, content: bytes = b"text\n", *options: str) -> bytes:
    git.run("reset", "--quiet", "--hard", "root")
    (git.directory / "file").write_bytes(content)
    git.run("add", "file")
    git.run(
        "-c", "user.name=Änne Öst", "-c", "user.email=ann@example.com", *options,
        "commit", "--quiet", "--cleanup=verbatim", "-F-", "--date=1700000000 +0800", input=message,
        env=COMMITTER,
    )  # fmt: skip
    return git.run("diff-tree", "-p", "--full-index", "--binary", "root", "HEAD")


FORMAT_PATCH = ("format-patch", "--stdout", "--full-index", "--binary", "-1")


@pytest.mark.parametrize("options", [[], ["-n"], ["--attach"], ["--inline"], ["--no-stat"]])
@pytest.mark.parametrize(
    "message", [b"[NPU] x\n\nbody\n", b":tag: x\n", "掩码掩码掩码掩码掩码掩码掩码\n\n体\n".encode()]
)
def test_a_mail_of_format_patch_is_read(
    repository: Git, message: bytes, options: list[str]
) -> None:
    diff = commit(repository, message)
    read = mail.read(repository.run(*FORMAT_PATCH, *options))
    assert read.author == "Änne Öst <ann@example.com> 1700000000 +0800".encode()
    assert read.message == message
    assert read.diff == diff


def test_the_author_and_subject_in_the_body_count_as_in_git_am(repository: Git) -> None:
    commit(repository, b"x\n\nbody\n")
    raw = repository.run(*FORMAT_PATCH, "--from=Sender <sender@example.com>")
    assert raw.count(b"sender@example.com") == 1
    assert mail.read(raw).author.startswith("Änne Öst <ann@".encode())
    assert mail.read(raw).message == b"x\n\nbody\n"


def test_a_mail_of_format_patch_from_a_commit_that_was_a_mail_is_the_change(
    repository: Git,
) -> None:
    sent = Mail(ANN, b"[NPU] two\nlines\n\nbody\n---\n", DIFF)
    am(repository, [mail.write(sent)], "--keep")
    read = mail.read(repository.run(*FORMAT_PATCH))
    assert (read.author, read.message) == (sent.author, sent.message)


@pytest.mark.parametrize(
    "content",
    [
        b"a\r\nb\r\n",
        b"no final newline",
        b"caf\xe9\n",
        bytes(range(256)) * 4,
        b"- \n- foo\n",
    ],
)
def test_patch_text_is_never_changed(repository: Git, content: bytes) -> None:
    commit(repository, b"x\n", content)
    back = repository.run("diff-tree", "-p", "--full-index", "--binary", "HEAD", "root")
    for diff in (back, commit(repository, b"x\n", content)):
        assert mail.read(mail.write(Mail(ANN, b"x\n", diff))).diff == diff
    assert mail.read(repository.run(*FORMAT_PATCH)).diff == diff
    am(repository, [mail.write(Mail(ANN, b"x\n", diff))], "--keep-cr")
    assert (repository.directory / "file").read_bytes() == content


def test_a_series_in_one_file_is_read_in_order(repository: Git) -> None:
    raws = [mail.write(Mail(ANN, text, numbered(n))) for n, text in enumerate([b"one\n", b"two"])]
    assert [change.message for change in mail.read_all(b"".join(raws))] == [b"one\n", b"two"]
    with pytest.raises(BadMail, match="2 mails"):
        mail.read(b"".join(raws))


HAND = b"From: A B <a@b.c>\nDate: Wed, 15 Nov 2023 06:13:20 +0800\nSubject: %s\n%s\n%s---\n" + DIFF


@pytest.mark.parametrize(
    "headers, body, message",
    [
        (b"", b"plain\n", "x\n\nplain\n"),
        (b"Content-Type: text/plain; charset=gb18030\n", "掩码\n".encode("gb18030"), "x\n\n掩码\n"),
        (b"Content-Transfer-Encoding: quoted-printable\n", b"a =3D b=\n c\n", "x\n\na = b c\n"),
        (b"", b"caf\xe9\n", "x\n\ncafé\n"),
    ],
)
def test_a_declared_encoding_is_read(headers: bytes, body: bytes, message: str) -> None:
    assert mail.read(HAND % (b"[PATCH v2 03/17] x", headers, body)).message.decode() == message


def test_a_base64_mail_is_read() -> None:
    import base64

    headers, _, body = (HAND % (b"x", b"Content-Transfer-Encoding: base64\n", b"b\n")).partition(
        b"\n\n"
    )
    assert mail.read(headers + b"\n\n" + base64.encodebytes(body)) == mail.read(
        HAND % (b"x", b"", b"b\n")
    )


@pytest.mark.parametrize(
    "subject, read",
    [
        (b"=?ISO-8859-1?Q?caf=E9_=5B?= =?utf-8?b?5o6p?= x", "café [掩 x"),
        ("raw 掩码".encode(), "raw 掩码"),
        (b"[PATCH] folded\n line", "folded line"),
        (b"[RFC PATCH 1/2] [NPU] x", "[NPU] x"),
    ],
)
def test_a_subject_is_decoded(subject: bytes, read: str) -> None:
    assert mail.read(HAND % (subject, b"", b"")).message.decode() == read + "\n"


def test_a_mail_with_crlf_throughout_is_read_as_git_am_reads_it() -> None:
    raw = HAND % (b"x", b"", b"body\n")
    assert mail.read(raw.replace(b"\n", b"\r\n")) == mail.read(raw)


def test_a_patch_without_git_headers_is_kept() -> None:
    diff = b"--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n"
    raw = (HAND % (b"x", b"", b"body\n")).replace(DIFF, b" x | 2 +-\n\n" + diff)
    assert mail.read(raw) == Mail(mail.read(raw).author, b"x\n\nbody\n", diff)


@pytest.mark.parametrize(
    "raw, said",
    [
        (DIFF, "no mail"),
        (b"", "no mail"),
        (b"Subject: x\n\n" + DIFF, "no From: and no Date:"),
        (b"From: a <a@b>\nSubject: x\n\n" + DIFF, "no Date:"),
        (b"From: a <a@b>\nDate: soon\n\n" + DIFF, "soon"),
        (b"From: a <a@b>\nDate: Mon, 9 Feb 99999999999 9:9:9 +0000\n\n", "cannot be read"),
        (b"From: a <a@b>\nDate: Mon, 9 Feb 1969 9:9:9 +0000\n\n", "not an author"),
        (b"From: a <a@b>\nDate: 1 +0000\nSubject: =?klingon?q?=FF?=\n\n", "klingon"),
        (b"From: a <a@b>\nDate: 1 +0000\nContent-Type: text/plain; charset=x-y\n\na\n", "x-y"),
    ],
)
def test_a_mail_that_cannot_be_used_says_why(raw: bytes, said: str) -> None:
    with pytest.raises(BadMail, match=said) as error:
        mail.read(raw)
    assert isinstance(error.value, NotMail) == (said == "no mail")


HOSTILE = st.sampled_from(
    [b"From: a <a@b>\n", b"From: =?utf-7?q?+2AA-?= <a\xe9\0@b>\n", b"From: <\n", b"Date: 1 +0000\n",
     b"Date: Mon, 99 Feb 99999999999 99:99:99 +999999\n", b"Subject: =?utf-8?b?!!a?=\n", b"\r\n",
     b"From a Tue Nov 14 22:13:20 2023\n", b"Content-Type: multipart/mixed; boundary=x\n", b"--x\n",
     b"--x--\n", b"Content-Type: message/rfc822\n", b"Content-Type: text/plain; charset=utf-16\n",
     b'Content-Type: text/plain; charset="\0"\n', b"Content-Transfer-Encoding: base64\n", b"---\n",
     b"\n", b"diff --git a/x b/x\n", b"-- \n", b"@@ -1 +1 @@\n", b"Forkman-Message: \"x\"\n"]
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.lists(HOSTILE | st.binary(max_size=8), max_size=12).map(b"".join))
def test_any_bytes_are_mails_or_an_error(raw: bytes) -> None:
    try:
        changes = mail.read_all(raw)
    except BadMail:
        return
    for change in changes:
        assert mail.read(mail.write(change)) == change


@pytest.mark.parametrize(
    "author", [b"", b"A <a@b.c>", b"A <a@b.c> 1 0", b"A\n <a@b.c> 1 +0000", b"\xe9 <a@b.c> 1 +0000"]
)
def test_an_author_must_be_as_in_a_commit(author: bytes) -> None:
    with pytest.raises(ValueError, match="author"):
        Mail(author, b"x\n", DIFF)
