"""Server-sent events: from a byte stream cut anywhere to whole events, and from an event to its data.

Promises: bytes are never changed, dropped or reordered (the blocks that `EventReader` gives out, and what is
left at the end, joined, are the input); all three line ends and mixtures of them are understood.
Never waits, never reads a socket, never looks inside the data of an event.

An event ends with a blank line: a line end directly behind a line end, where a line end is LF, CR LF or CR.
A blank line at the very front of an event carries no meaning; it stays with the event that follows, or goes
out alone when it comes alone (the late LF of a CR LF that was cut in two).
"""

import re

# The most bytes of one unfinished event that are held before the stream is given up.
EVENT_BYTES_MAX = 1 << 20

# The blank line that ends an event, from the last byte of the line end before it. CR LF is one line end, so a
# pair (CR, LF) alone is none of these; a CR that ends the pair takes the LF behind it along.
_BLANK_LINE = re.compile(rb"\n\n|[\n\r]\r\n?")

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_DATA_NAMES = (b"data", _BYTE_ORDER_MARK + b"data")
_DATA_STARTS = (b"data:", _BYTE_ORDER_MARK + b"data:")


class EventTooLarge(ValueError):
    """A worker sent the start of an event that is longer than we are willing to hold."""


class EventReader:
    """Cuts one stream into runs of whole events, whatever the splits it arrives in."""

    __slots__ = ("_bytes_max", "_held")

    def __init__(self, bytes_max: int = EVENT_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        # The start of an event whose end has not come; never begins with a line end.
        self._held = bytearray()

    @property
    def held(self) -> int:
        """Bytes that wait for the end of their event."""
        return len(self._held)

    def feed(self, data: bytes) -> bytes:
        """The longest run of whole events that is complete with `data`; b"" if there is none.

        Raises EventTooLarge when nothing is complete and more than the limit is held.
        """
        if not self._held:
            if data.endswith(b"\n\n"):
                return data
            end = _complete_end(data, 0) or len(data) - len(data.lstrip(b"\r\n"))
            self._held += data[end:]
            block = data[:end]
        else:
            # The search starts one byte early: the held bytes may end with the first line end of the pair.
            searched = len(self._held) - 1
            self._held += data
            end = _complete_end(self._held, searched)
            block = bytes(self._held[:end])
            del self._held[:end]
        if not block and len(self._held) > self._bytes_max:
            raise EventTooLarge(f"an event of more than {self._bytes_max} bytes has no end yet")
        return block

    def take_rest(self) -> bytes:
        """What is left at the end of the stream; not empty means that it was cut inside an event."""
        rest = bytes(self._held)
        self._held.clear()
        return rest


def split_events(block: bytes) -> list[bytes]:
    """The events of a block, each with its terminator; joined they are the block again.

    Bytes behind the last terminator, which blocks of an EventReader do not have, come as a last item.
    """
    if b"\r" not in block:
        pieces = block.split(b"\n\n")
        rest = pieces.pop()
        events = [piece + b"\n\n" for piece in pieces]
    else:
        events = []
        start = 0
        for blank_line in _BLANK_LINE.finditer(block):
            events.append(block[start : blank_line.end()])
            start = blank_line.end()
        rest = block[start:]
    if rest:
        events.append(rest)
    return events


def payload(event: bytes) -> bytes | None:
    """The data of one event, its `data` lines joined by LF; None when it has none (comments, ids, blanks)."""
    if event.startswith(b"data: ") and event.find(b"\n") == len(event) - 2 and b"\r" not in event:
        return event[6:-2]
    lines = []
    for line in event.removeprefix(_BYTE_ORDER_MARK).splitlines():
        if line.startswith(b"data:"):
            lines.append(line[6:] if line.startswith(b"data: ") else line[5:])
        elif line == b"data":
            lines.append(b"")
    return b"\n".join(lines) if lines else None


def count_events(block: bytes) -> int:
    """How many events of the block carry data; comments and keep-alives do not count."""
    starts = block.startswith(_DATA_STARTS)
    lines = block.count(b"\ndata:") + starts
    with_cr = b"\r" in block
    # Counting is enough unless there are data lines without a colon or lines that end with CR alone, and
    # if each data line begins an event of its own.
    if block.count(b"\ndata") + block.startswith(_DATA_NAMES) == lines and not (
        with_cr and block.count(b"\r") != block.count(b"\r\n")
    ):
        blank = b"\n\r\ndata:" if with_cr else b"\n\ndata:"
        if lines < 2 or block.count(blank) + starts == lines:
            return lines
    return sum(payload(event) is not None for event in split_events(block))


def _complete_end(data: bytes | bytearray, start: int) -> int:
    """Where the last whole event in `data` ends, looking at no byte before `start`; 0 if there is none."""
    last = max(data.rfind(b"\n\n", start), data.rfind(b"\n\r", start), data.rfind(b"\r\r", start))
    if last < 0:
        return 0
    end = last + 2
    if data[last + 1] == 0x0D and data[end : end + 1] == b"\n":
        end += 1
    return end
