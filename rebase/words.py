"""Words from elsewhere (messages, paths, code, what git said), made safe to show to a person."""


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


def _escape(character: str) -> str:
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:
        return f"\\x{code - 0xDC00:02x}"
    if code < 0x80:
        return {"\n": "\\n", "\r": "\\r"}.get(character, f"\\x{code:02x}")
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
