"""The one error a person sees: what they did, where, and what to do instead."""


class GptcliError(Exception):
    """A mistake that the person at the keyboard can mend. Shown as one line, without a traceback; exit status 2.

    message: what was done and where it went wrong; hint: what to do instead; code: a stable word for JSON.
    """

    def __init__(self, message: str, hint: str = "", code: str = "usage"):
        super().__init__(message)
        self.message, self.hint, self.code = message, hint, code

    def __str__(self) -> str:
        return f"{self.message}; {self.hint}" if self.hint else self.message


def nearest(word: str, words) -> str:
    """`did you mean "x"?` when one of the words is close to the given one, else an empty string."""
    from difflib import get_close_matches

    folded = {str(w).casefold(): str(w) for w in words}
    close = get_close_matches(str(word).casefold(), folded, n=1, cutoff=0.6)
    return f'did you mean "{folded[close[0]]}"?' if close else ""
