r"""A change as mail: the format of queue files and of the exported series for `git am`.

    From 0000000000000000000000000000000000000000 Mon Sep 17 00:00:00 2001
    From: Li <li@example.com>
    Date: Wed, 15 Nov 2023 06:13:20 +0800
    Subject: [NPU] Keep the mask
    MIME-Version: 1.0                              these three where the body is not ASCII
    Content-Type: text/plain; charset=UTF-8
    Content-Transfer-Encoding: 8bit

    The body of the message.

    Forkman-Author: "Li <li@example.com> 1700000000 +0800"
    Forkman-Message: "[NPU] Keep the mask\n\nThe body of the message.\n"
    ---
    diff --git a/mask.py b/mask.py
    ...
    <"-- ", git's mark of a signature>
    forkman

An empty change ends after its body. A patch whose last line is cut short has no signature.

**The law**: whoever applies such a mail, with `git am` or `git am --keep`, gets a commit from which
`original` and `original_author` give back the message and the author the mail was written from,
byte for byte. A plain message is its own original. `git am` changes the others: it takes
`[NPU]` and `Re:` off a subject, ends the message at `---`, strips white space. Those get, as their
last paragraph, the trailer `Forkman-Message`, a JSON string in ASCII that holds the message exactly
(bytes that are not UTF-8 as lone surrogates, as Python's surrogateescape does); what is seen above
it is as near as mail can come, with the lines git would misread indented by a space.
`Forkman-Author` is added before it where git would change the author. A trailer counts only while
what is above it is what was written with it: after somebody has edited the message, the edit is
what stands, and the trailer goes.

`read` also takes what `git format-patch` and people write: `[PATCH 1/2]`, diffstats, signatures,
headers in the body, any declared charset and transfer encoding, attachments. Patch text is never
decoded.
"""

import io
import json
import re
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from email import message_from_bytes
from email.errors import HeaderParseError
from email.header import decode_header
from email.message import Message
from email.utils import format_datetime, mktime_tz, parseaddr, parsedate_tz, unquote

_MAGIC = b"From " + b"0" * 40 + b" Mon Sep 17 00:00:00 2001\n"  # git's own: "this is no real mbox"
_SIGNATURE = b"-- \nforkman\n"
_MIME = (
    "MIME-Version: 1.0\nContent-Type: text/plain; charset=UTF-8\nContent-Transfer-Encoding: 8bit\n"
)

_IDENT = re.compile(rb"([^<>\0\n]*?) ?<([^<>\0\n]*)> ([0-9]{1,18}) ([+-][0-9]{4})")
_PATCH_START = re.compile(rb"^(?:diff -|Index: |--- [^\n]*\n\+\+\+ )", re.MULTILINE)


class BadMail(ValueError):
    """A mail that cannot be used; its text says what is missing or wrong."""


class NotMail(BadMail):
    """No mail at all: a bare diff, for instance."""


@dataclass(frozen=True)
class Mail:
    """One change.

    author: as in a commit, `Name <email> seconds zone`, UTF-8.
    message: as in a commit, byte for byte; may be empty, lack a final newline, be no UTF-8.
    diff: the patch text from its first line on (`diff --git …`); empty for an empty change.
    """

    author: bytes
    message: bytes
    diff: bytes

    def __post_init__(self) -> None:
        if not _IDENT.fullmatch(self.author) or not _is_utf8(self.author):
            raise ValueError(f"not an author: {self.author!r}")
        if self.diff and not _PATCH_START.match(self.diff):
            raise ValueError(f"not the start of a patch: {self.diff[:40]!r}")

    @property
    def subject(self) -> str:
        """The message's first line, as text."""
        return self.message.lstrip().partition(b"\n")[0].decode("utf-8", "replace").rstrip()


# -- writing -------------------------------------------------------------------------------------


def write(mail: Mail) -> bytes:
    """The mail, for a file; the same bytes everywhere."""
    subject, body = _visible(mail.message)
    name, email = _visible_author(mail.author)
    seconds, zone = mail.author.split(b" ")[-2:]

    trailer = ""
    survives = _survives(mail.author)
    if not survives:
        trailer += f"Forkman-Author: {_json(mail.author)}\n"
    after_am = {_after_am(how(subject), body) for how in (_kept, _cleaned)}
    if not survives or after_am != {mail.message} or original(mail.message) != mail.message:
        trailer += f"Forkman-Message: {_json(mail.message)}\n"

    text = f"From: {_address(name, email)}\nDate: {_rfc2822(int(seconds), zone.decode())}\n"
    if subject:
        text += f"Subject: {_header(subject.decode())}\n"
    if not body.isascii():
        text += _MIME
    text += "\n" + body.decode() + ("\n\n" if body and trailer else "\n" if body else "") + trailer
    if not mail.diff:
        return _MAGIC + text.encode()
    signature = _SIGNATURE if mail.diff.endswith(b"\n") else b""
    return _MAGIC + text.encode() + b"---\n" + mail.diff + signature


def _json(content: bytes) -> str:
    text = json.dumps(content.decode("utf-8", "surrogateescape"))
    # git cuts a message at scissors (>8, %<, …) where it is configured to; none in a trailer.
    return text.replace("<", "\\u003c").replace(">", "\\u003e")


def _header(text: str) -> str:
    """A header's value: as it is where it is short and plain, else in RFC 2047 encoded words."""
    if re.fullmatch(r"[ -~]{1,900}", text) and "=?" not in text:
        return text
    words = [""]
    for char in text:
        plain = char.isascii() and (char.isalnum() or char in "-!*+/")
        piece = char if plain else "".join(f"={byte:02X}" for byte in char.encode())
        if len(words[-1] + piece) > 52:  # a line is then at most 76 columns, as the RFC asks
            words.append("")
        words[-1] += piece
    return "\n ".join(f"=?UTF-8?q?{word}?=" for word in words)


def _address(name: str, email: str) -> str:
    phrase = _header(name) if name else ""
    if phrase == name and re.search(r"[][:;,.]", name):
        phrase = f'"{name}"'
    return f"{phrase} <{email}>".lstrip()


_DAY, _YEAR_2100 = 86400, 4102444800  # git reads calendar dates from 1970 to 2099


def _rfc2822(seconds: int, zone: str) -> str:
    """The date as mail has it; as `@seconds zone` where git could not read it back."""
    hours, minutes = int(zone[1:3]), int(zone[3:])
    if hours > 23 or minutes > 59:
        return f"@{seconds} +0000"
    if not _DAY <= seconds < _YEAR_2100 - _DAY:
        return f"@{seconds} {zone}"
    offset = timedelta(hours=hours, minutes=minutes)
    where = timezone(-offset if zone[0] == "-" else offset)
    return format_datetime(datetime.fromtimestamp(seconds, where))


# -- what git makes of a mail (its mailinfo.c, strbuf.c, ident.c) ----------------------------------

_SPACE = b" \t\n\r"  # what git's isspace() knows
# What ends the message: patchbreak().
_BREAK = rb"^(?:diff -|Index: |---(?: [^ \t\r\n]|[ \t\r]*$))"
_MESSAGE_END = re.compile(_BREAK, re.MULTILINE)
# Where one mail of an mbox ends and the next begins: is_from_line().
_FROM_LINE = rb"^From (?=.{14}).*[0-9].[0-9][0-9]:[0-9][0-9][ \t]*\+?0*(?:9[1-9]|[1-9][0-9]{2,})"
_NEXT_MAIL = re.compile(_FROM_LINE, re.MULTILINE)
_MISREAD = re.compile(_BREAK + rb"|" + _FROM_LINE, re.MULTILINE)
# A header of the mail, given at the start of its body: check_inbody_header().
_IN_BODY = re.compile(rb"(?i:from|subject|date):|>From[ \t]|\[PATCH\](?!\S)")
_SCISSORS = re.compile(r"(>|8|%)(?=[8<%])")
# verify_utf8() takes these code points for broken UTF-8; a commit cannot hold a NUL.
_UNFIT = re.compile(
    "[\0\ufdd0-\ufdef" + "".join(chr(plane << 16 | 0xFFFE) + chr(plane << 16 | 0xFFFF)
                                 for plane in range(17)) + "]"
)  # fmt: skip


def _readable(content: bytes) -> str:
    """As text, with what git would not keep replaced."""
    return _UNFIT.sub("\ufffd", content.decode("utf-8", "replace"))


def _is_utf8(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def _visible(message: bytes) -> tuple[bytes, bytes]:
    """What a mail shows of a message: subject and body, such that git keeps each line of it.

    The subject is the first paragraph (more than one line, rarely). No final newlines.
    """
    text = _stripspace(_readable(message).encode())
    subject, _, body = text.rstrip(b"\n").partition(b"\n\n")
    body = _MISREAD.sub(rb" \g<0>", body)
    if _IN_BODY.match(body):
        body = b" " + body
    return subject.strip(_SPACE), b"\n".join(_unscissored(line) for line in body.split(b"\n"))


def _unscissored(line: bytes) -> bytes:
    """A line like `-- >8 --` with its scissors opened; is_scissors_line(), a little wider."""
    visible = line.strip(_SPACE).decode()
    marks = len(re.findall(r">8|8<|>%|%<", visible))
    if not marks or not 8 <= len(visible.encode()) < 6 * (visible.count("-") + 2 * marks):
        return line
    return _SCISSORS.sub(r"\1 ", line.decode()).encode()


def _stripspace(text: bytes) -> bytes:
    lines = b"\n".join(line.rstrip(_SPACE) for line in text.split(b"\n")).strip(b"\n")
    return re.sub(rb"\n{3,}", b"\n\n", lines) + b"\n" if lines else b""


def _after_am(subject: bytes, body: bytes) -> bytes:
    """The message of the commit that `git am` makes."""
    return _stripspace(subject + b"\n\n" + body)


def _kept(subject: bytes) -> bytes:
    """The subject after `git am --keep`."""
    return subject


def _cleaned(subject: bytes, keep_tags: bool = False) -> bytes:
    """The subject after `git am`; keep_tags: after `git am --keep-non-patch`."""
    tags = b""
    while True:
        subject = subject.lstrip(b" \t:")
        close = subject.find(b"]") + 1
        if len(subject) > 3 and subject[:3].lower() == b"re:":
            subject = subject[3:]
        elif subject[:1] == b"[" and close:
            if keep_tags and not (close >= 7 and b"PATCH" in subject[:close]):
                close += subject[close : close + 1] in (b" ", b"\t")
                tags += subject[:close]
            subject = subject[close:]
        else:
            break
    return re.sub(rb"[ \t\n\r]+", b" ", (tags + subject).strip(_SPACE))


def _tags_kept(subject: bytes) -> bytes:
    """The subject after `git am --keep-non-patch`, and after format-patch and `git am`."""
    return _cleaned(subject, keep_tags=True)


def _unprefixed(subject: bytes) -> bytes:
    """The subject without what `git format-patch` puts before it."""
    return re.sub(rb"\A(?:Re: *)?\[[^]]*PATCH[^]]*\] *", b"", subject)


# Taken off both ends of names and emails: crud(); the dot until git 2.46.
_CRUD = bytes(range(33)) + b".,:;<>\"\\'"
_PINE = "Mail System Internal Data"  # an author whose mails git skips


def _visible_author(author: bytes) -> tuple[str, str]:
    """What a mail shows of an author: name and email, such that git takes them for these.

    For a name that it finds too short or too long git puts the email, and stops without one.
    """
    name, email = (_readable(part) for part in author.rsplit(b"> ", 1)[0].split(b"<"))
    name = re.sub(r'[\0-\x20\x7f()<>@"\\]+', " ", name).strip(" ")
    email = re.sub(r'[^!-~]|[()<>"\\]', "", email)
    if email.count("@") > 1:
        email = email.replace("@", ".")
    if name == _PINE or not name.encode().strip(_CRUD):
        name = ""
    if not email.encode().strip(_CRUD) and not _is_name(name):
        name = "unknown"
    return name, email


def _is_name(name: str) -> bool:
    """get_sane_name(), which counts the quotes."""
    return 3 <= len(name.encode()) <= 58


def _survives(author: bytes) -> bool:
    """Whether git certainly keeps this author as it is."""
    name, email = _visible_author(author)
    seconds, zone = author.split(b" ")[-2:]
    shown = f"{name} <{email}> {int(seconds)} {zone.decode()}".encode()
    return (
        shown == author
        and _is_name(name)
        and all(part.strip(_CRUD) == part for part in (name.encode(), email.encode()))
        and zone != b"-0000"
        and int(zone[3:]) < 60
        and int(zone[1:3]) < 24
    )


# -- back from a commit ----------------------------------------------------------------------------

_TRAILER = re.compile(
    rb'(?:\A|\n\n)(?:Forkman-Author: (".*")\n)?Forkman-Message: (".*")\n((?:.+\n)*)\Z'
)


def original(message: bytes) -> bytes:
    """The message that a commit's message was before it went through mail."""
    return _untrailed(message)[0]


def original_author(author: bytes, message: bytes) -> bytes:
    """The author that a commit's author was before it went through mail.

    message: the commit's, as it is.
    """
    recorded = _untrailed(message)[1]
    ours, theirs = _IDENT.fullmatch(author), _IDENT.fullmatch(recorded or b"")
    if not recorded or not ours or not theirs:
        return author
    shown = [part.encode().strip(_CRUD) for part in _visible_author(recorded)]
    unchanged = (
        ours[1].strip(_CRUD) in shown
        and ours[2].strip(_CRUD) == shown[1]
        and int(ours[3]) == int(theirs[3])
    )
    return recorded if unchanged else author


def _untrailed(message: bytes) -> tuple[bytes, bytes | None]:
    """A commit's message before it went through mail, and its author if that was recorded."""
    found = _TRAILER.search(message.rstrip(b"\n") + b"\n")
    if not found:
        return message, None
    above = message[: found.start()] + b"\n" if found.start() else b""
    if found[3]:  # somebody added trailers, as `git am --signoff` does
        above += b"\n" * bool(above) + found[3]
    try:
        recorded, author = (
            json.loads(part).encode("utf-8", "surrogateescape")
            for part in (found[2], found[1] or b'""')
        )
    except ValueError:  # of JSON or UTF-8: not written by us
        return message, None
    subject, body = _visible(recorded)
    for how in (_kept, _cleaned, _tags_kept, _unprefixed):
        if above == _after_am(how(subject), body):
            return recorded, author or None
    return above, author or None


# -- reading -------------------------------------------------------------------------------------

_HUNK = re.compile(rb"@@ -[0-9]+(?:,([0-9]+))? \+[0-9]+(?:,([0-9]+))? @@")
_WORD = r"=\?[^?\s]+\?[bBqQ]\?[^?]*\?="
_WORDS = re.compile(rf"{_WORD}(?:\s*{_WORD})*")


def read(raw: bytes) -> Mail:
    """The change in a file that holds one mail. Raises BadMail, NotMail for a bare diff."""
    mails = read_all(raw)
    if len(mails) != 1:
        raise BadMail(f"it holds {len(mails)} mails, not one")
    return mails[0]


def read_all(raw: bytes) -> list[Mail]:
    """The changes in a file that holds any number of mails (mbox, as git splits it).

    Raises BadMail, NotMail for a bare diff.
    """
    raw = raw.lstrip(_SPACE)
    if raw.partition(b"\n")[0].endswith(b"\r"):  # the mail's own line ends, not its content's
        raw = raw.replace(b"\r\n", b"\n")
    starts = [0]
    if _NEXT_MAIL.match(raw):
        starts = [found.start() for found in _NEXT_MAIL.finditer(raw)]
    ends = [*starts[1:], len(raw)]
    try:
        return [_read(raw[start:end]) for start, end in zip(starts, ends, strict=True)]
    except BadMail:
        raise
    except (ValueError, OverflowError) as error:  # dates and names that only look like some
        raise BadMail(f"it cannot be read: {error}") from None


def _read(raw: bytes) -> Mail:
    parsed = message_from_bytes(raw)
    headers = {name.lower(): _utf8(_as_bytes(value), None) for name, value in parsed.raw_items()}
    if not headers.keys() & {"from", "date", "subject"}:
        raise NotMail("it is no mail: it has no From:, Date: and Subject:")

    parts = [part for part in parsed.walk() if not part.is_multipart()]
    text = b"\n".join(_content(part) for part in parts)
    end = _MESSAGE_END.search(text) or re.search(rb"^-- $", text, re.MULTILINE)
    body, rest = (text[: end.start()], text[end.start() :]) if end else (text, b"")
    patch = _PATCH_START.search(rest)
    more, body = _in_body_headers(_utf8(body, parts[0].get_content_charset()).encode())
    headers |= more

    missing = [name for name in ("From", "Date") if not headers.get(name.lower(), "").strip()]
    if missing:
        raise BadMail(f"it has no {': and no '.join(missing)}:")
    subject = _decoded(_unfolded(headers.get("subject", ""))).encode()
    message = _after_am(_unprefixed(subject), body)
    author = _author(_unfolded(headers["from"]), _unfolded(headers["date"]))
    return Mail(
        original_author(author, message),
        original(message),
        _unsigned(rest[patch.start() :]) if patch else b"",
    )


def _as_bytes(value: object) -> bytes:
    return str(value).encode("utf-8", "surrogateescape")  # the email package keeps bytes so


def _content(part: Message) -> bytes:
    content = part.get_payload(decode=True)
    assert isinstance(content, bytes)
    return content


def _utf8(content: bytes, charset: str | None) -> str:
    """As text. Without a charset Latin-1 is what is no UTF-8, as git has it."""
    if charset in (None, "utf-8", "us-ascii"):
        charset = "utf-8" if _is_utf8(content) else "latin-1"
    try:
        return content.decode(charset or "")
    except (LookupError, ValueError):
        raise BadMail(f"it says it is in {charset!r}, but cannot be read as that") from None


def _unfolded(value: str) -> str:
    return re.sub(r"[ \t\r]*\n[ \t]", " ", value).strip(" \t\r\n")


def _decoded(value: str) -> str:
    """A header's value with its encoded words read."""

    def decode(words: re.Match[str]) -> str:
        try:
            return "".join(_utf8(content, charset) for content, charset in decode_header(words[0]))
        except HeaderParseError:
            raise BadMail(f"a header cannot be decoded: {words[0]}") from None

    return _WORDS.sub(decode, value)


def _in_body_headers(body: bytes) -> tuple[dict[str, str], bytes]:
    """The headers that the body begins with, which stand above the mail's own, and the rest."""
    headers: dict[str, str] = {}
    body = body.lstrip(b"\n")
    header = re.compile(rb"(From|Date|Subject):[ \t]+(.*(?:\n[ \t].*)*)\n?", re.IGNORECASE)
    while (found := header.match(body)) and (name := found[1].decode().lower()) not in headers:
        headers[name] = found[2].decode()
        body = body[found.end() :]
    return headers, body


def _author(sender: str, date: str) -> bytes:
    """The author as a commit has it, of a mail's From and Date."""
    found = re.fullmatch(r"([^<]*)<([^<>]*)>.*", sender)
    name, email = (found[1].strip(" \t"), found[2]) if found else parseaddr(sender)
    name = re.sub(r"[<>\n\0]", "", _decoded(unquote(name))).strip(" \t\r")
    exact = re.fullmatch(r"@?([0-9]{1,18}) ([+-][0-9]{4})", date)
    if exact:
        seconds, zone = int(exact[1]), exact[2]
    elif parsed := parsedate_tz(date):
        offset = (parsed[9] or 0) // 60
        zone = f"{'-' if offset < 0 else '+'}{abs(offset) // 60:02}{abs(offset) % 60:02}"
        seconds = mktime_tz(parsed)
    else:
        raise BadMail(f"its Date: cannot be read: {date}")
    return f"{name} <{re.sub(r'[<>]', '', email)}> {seconds} {zone}".encode()


def _unsigned(patch: bytes) -> bytes:
    """A patch without the mail's signature after it.

    `-- ` is a signature only outside of hunks: inside, it deletes the line `- `.
    """
    if patch.endswith(_SIGNATURE):
        return patch[: -len(_SIGNATURE)]
    at, end = 0, len(patch)
    old = new = 0  # the lines that the hunk still has to bring
    for line in io.BytesIO(patch):
        kind = line[:1]
        if (old > 0 or new > 0) and kind in b" +-\\\r\n":
            old -= kind not in b"+\\"
            new -= kind not in b"-\\"
        elif hunk := _HUNK.match(line):
            old, new = (1 if count is None else int(count) for count in hunk.groups())
        elif line.startswith(b"diff --git "):
            old = new = 0
            end = len(patch)
        elif line.rstrip(b"\r\n") == b"-- " and end == len(patch):
            end = at
        at += len(line)
    return patch[:end]
