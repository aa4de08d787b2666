"""Text that a stream can show: no control characters, and only signs that its encoding has. Loads no rich."""

# What to print where the terminal's encoding has no such sign.
ASCII = {
    "·": "-", "…": "...", "–": "-", "→": "->", "█": "#", "␣": r"\s", "√": "sqrt", "ε": "eps", "²": "^2", "−": "-",
    "Σ": "sum ", "θ": "theta", "×": "x", "∞": "inf", "≤": "<=",
    "≠": "!=", "⊕": "+", "─": "-", "│": "|", "┼": "+", "▼": "v", "◄": "<", "►": ">",
    **dict.fromkeys("┌┐└┘├┤┬┴╭╮╰╯", "+"),
}  # fmt: skip
ASCII_SIGNS = str.maketrans(ASCII)


def harmless(text: str, keep: str = "") -> str:
    """The text with every letter that can't be seen escaped, but those in `keep`.

    Names from files and from the command line may hold escape sequences that a terminal would obey.
    """
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() or letter in keep else repr(letter)[1:-1] for letter in text)


def printable(text: str, encoding: str | None) -> str:
    """The text in signs that the encoding has: ASCII look-alikes, then escapes."""
    encoding = encoding or "utf-8"
    try:
        text.encode(encoding)
        return text
    except UnicodeEncodeError:
        return text.translate(ASCII_SIGNS).encode(encoding, "backslashreplace").decode(encoding)
