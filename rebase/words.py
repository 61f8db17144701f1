"""Words from elsewhere (messages, paths, code, what the system said), for people and in lines."""

import io
import os


def visible(text: str | bytes) -> str:
    r"""`text` in one line of printable characters, tabs expanded.

    Anything else is shown as an escape: `\x1b` and `\u202e` for characters, `\xe9` for a byte
    that is no UTF-8 (or its surrogate, where the text was decoded with `surrogateescape`).
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8", "surrogateescape")
    text = text.expandtabs(4)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\u3000" else _escape(c) for c in text)


def split_lines(content: bytes) -> list[bytes]:
    """Lines as git has them: split after line feeds only."""
    return io.BytesIO(content).readlines()


def reason(error: OSError) -> str:
    """What the system refused, in its words, with the file where it names one."""
    words = error.strerror or str(error)
    return f"{visible(os.fsdecode(error.filename))}: {words}" if error.filename else words


def _escape(character: str) -> str:
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:
        return f"\\x{code - 0xDC00:02x}"
    if code < 0x80:
        return {"\n": "\\n", "\r": "\\r"}.get(character, f"\\x{code:02x}")
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
