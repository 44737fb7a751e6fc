"""What of an answer's text a client has, and where its tokens end in it. Pure.

The next engine must begin where a token's text ends. An event with one token and with text ends
there; one without text may end within a character; one with several tokens may too, and a parser
may hold back a part of any token's text. Whether text ends at such a place, an engine can say
(:meth:`SentText.settle`). Text that an engine holds back for stop strings is not sent, though its
tokens are known. So such places are kept, and the text since the first of them, to be compared
with what the next engine generates.
"""

from __future__ import annotations

from typing import NamedTuple

MOST_OVERLAP = 4096  # characters that are kept to be compared
_DOUBTFUL = 8  # places that are kept although it is not sure that text ends there


class TextEnd(NamedTuple):
    """Where the text of so many tokens ends. ``sure``: it ends there, not within a character."""

    tokens: int
    chars: int
    sure: bool = True


class SentText:
    """The text of one answer, from one engine after another.

    Attributes:
        sent: characters that the client has.
    """

    def __init__(self, *, held: int, reach: int, before: int = 0) -> None:
        """See :class:`StreamTerms`. ``before``: characters that are kept before the places."""
        self._held, self._reach, self._before = held, reach, before
        self.sent = 0
        self._ends = [TextEnd(0, 0)]  # the last sure one whose text was sent, and later ones
        self._kept, self._kept_at = "", 0  # what was sent since the first of them, and before it
        self._at = 0  # characters that this engine has sent, and those before it

    def new(self, text: str) -> str | None:
        """Take text of an engine; return what of it the client does not have, and gets now. None:
        what it has was different."""
        begin, self._at = self._at, self._at + len(text)
        known = min(len(text), max(0, self.sent - begin))
        offset = begin - self._kept_at
        if text[:known] != self._kept[offset : offset + known]:
            return None
        new = text[known:]
        self.sent += len(new)
        self._kept += new
        return new

    def lacks(self, text: str) -> bool:
        """Return whether an engine that ends with a text has not sent all that the client has."""
        return self._at + len(text) < self.sent

    def ends(self, tokens: int, *, sure: bool) -> None:
        """Note that the text of the engine ends with so many tokens."""
        self._ends.append(TextEnd(tokens, self._at + self._held, sure))

    def usable(self) -> list[TextEnd]:
        """Return the places whose text was sent, the last one last."""
        usable = max(0, self.sent - self._reach)
        return [place for place in self._ends if place.chars <= usable]

    def last(self) -> str:
        """Return the end of the text before the last usable place."""
        return self._kept[: self.usable()[-1].chars - self._kept_at]

    def settle(self, *, sure: bool) -> None:
        """Say whether text ends at the last usable place; if not, it is none."""
        at = len(self.usable()) - 1
        if sure:
            self._ends[at] = self._ends[at]._replace(sure=True)
        else:
            del self._ends[at]

    def go_on(self, place: TextEnd) -> None:
        """Have the next engine begin at a place."""
        self._ends, self._at = [place], place.chars
        self.forget()

    def forget(self) -> None:
        """Forget the places, and the text, that are no longer of use."""
        usable = max(0, self.sent - self._reach)
        count = sure = 0
        for number, place in enumerate(self._ends):
            if place.chars > usable:
                break
            count = number + 1
            if place.sure:
                sure = number
        del self._ends[:sure]
        if count - sure > 1 + _DOUBTFUL:
            del self._ends[int(self._ends[0].sure)]
        while self._ends and self.sent - self._ends[0].chars > MOST_OVERLAP:
            del self._ends[0]
        # From where the engine that continues the stream is, too: its text is still compared.
        begins = min(self._at, self._ends[0].chars if self._ends else self.sent)
        begins = max(self._kept_at, begins - self._before)
        self._kept, self._kept_at = self._kept[begins - self._kept_at :], begins
