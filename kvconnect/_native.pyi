"""Byte loops in C. Every function but ``run_addresses`` releases the GIL for the whole of its
work."""

from array import array

def gather(
    area: tuple[int, int],
    arena: tuple[int, int],
    slot_bytes: int,
    segments: array[int],
    block_ids: array[int],
    slots: array[int],
) -> None:
    """Copy blocks of an area into slots of an arena.

    ``area`` and ``arena`` are (address, bytes). The rest are contiguous int64 buffers:
    ``segments`` is n x (offset, stride, length); ``block_ids[i]`` goes to ``slots[i]``.
    ValueError for malformed arguments, IndexError for a block, slot or segment that reaches
    outside its memory; nothing has been copied then.
    """

def scatter(
    area: tuple[int, int],
    arena: tuple[int, int],
    slot_bytes: int,
    segments: array[int],
    block_ids: array[int],
    slots: array[int],
) -> None:
    """Copy slots of an arena back into blocks of an area. Arguments and errors as ``gather``."""

def run_addresses(starts: array[int], strides: array[int], ids: array[int], limit: int) -> bytes:
    """Return ``starts[r] + id * strides[r]`` as int64, for each id all runs ``r``.

    Keeps the GIL; takes microseconds for a thousand ids. IndexError for an id that is not in
    [0, ``limit``), ValueError for malformed arguments or an address that does not fit.
    """

def populate(address: int, nbytes: int) -> None:
    """Have every page of writable memory backed by real memory; contents stay.

    ``address`` must be page-aligned. OSError if the kernel cannot provide the pages.
    """

def send_pages(
    fd: int,
    head: bytes | bytearray | memoryview,
    memory: tuple[int, int],
    segments: array[int],
    phases: int,
    ids: array[int],
    digest: tuple[int, int],
    stall_ms: int,
    stop: bytearray,
) -> bytes:
    """Send ``head``, then wire blocks from where they lie, through a socket of any mode.

    ``memory`` is (address, bytes). ``segments`` holds ``phases`` times n triples (offset, stride,
    length); wire block ``w`` is the n runs ``[offset + (w // phases) * stride, + length)`` of
    phase ``w % phases``. ``digest`` is (period, phase0): the XXH3-64 digests (u64, little-endian)
    of the blocks ``ids[i]`` with ``(phase0 + i) % period == 0`` are returned; period 0 means none.
    The socket and ``stop`` must stay open and in place until the call is over.

    ValueError for malformed arguments and IndexError for a block outside the memory, before a
    byte moved. TimeoutError when no byte moved for ``stall_ms``, InterruptedError once ``stop[0]``
    is not 0, OSError for what the socket says: the connection is then of no use any more.
    """

def recv_pages(
    fd: int,
    memory: tuple[int, int],
    segments: array[int],
    phases: int,
    ids: array[int],
    digest: tuple[int, int],
    stall_ms: int,
    stop: bytearray,
) -> tuple[bytes, int]:
    """Receive wire blocks to where they belong. Return (digests, whole blocks that landed).

    Arguments and errors as ``send_pages``; ConnectionError where the stream ends too early. Once
    ``stop[0]`` is seen not to be 0 no page is written any more, the rest is received and thrown
    away, and the digests are those of the blocks that had landed.
    """

def digest_pages(
    memory: tuple[int, int], segments: array[int], phases: int, ids: array[int]
) -> bytes:
    """Return the XXH3-64 digest of every block. Arguments and errors as ``send_pages``."""

class Relay:
    """Passes streams of HTTP/1.1 chunks from engines to clients in a thread of its own.

    Only whole chunks that are not the last are passed, as they are. At anything else the stream
    comes back, with the bytes that were read from the engine and not sent. Both sockets are
    duplicated. One thread uses an object.

    Of a stream that is journaled, only chunks of events of one form are passed: ``head``, a JSON
    string (the text), ``middle``, a list of numbers (the token ids) and ``tail``. Notes are made of
    them: ``[[ids],"text"],`` for each event, with ids and text as the engine wrote them. A client
    that did not ask for ids gets ``null`` instead.

    A record of a stream is (key, reason, bytes of content, chunks, time.monotonic() when the
    engine last sent something, the last two bytes of content, unsent, rest, notes). ``unsent``
    belongs to chunks that count as passed, ``rest`` follows them. Reasons: ``ended`` (engine closed
    or broken), ``full`` (the client does not take more, or is gone), ``bytes`` (something else than
    a whole chunk), ``memory`` (none; bytes are lost), ``removed``.
    """

    def __init__(self, most_fd: int) -> None:
        """``most_fd``: the highest descriptor that a duplicate may have. OSError without thread or
        descriptors."""

    def add(
        self,
        engine: int,
        client: int,
        events_only: bool,
        form: tuple[bytes, bytes, bytes, int, bool] | None,
    ) -> int:
        """Relay from one socket to another; return the stream's key.

        ``events_only``: a chunk must end with an event that is an object (``}`` and an empty line).
        ``form``: of the events of a stream that is journaled: (head, middle, tail, bytes of notes
        at most, whether the client asked for ids). OSError for descriptors that cannot be
        duplicated or watched.
        """

    def take(self) -> tuple[int, str, int, int, float, bytes, bytes, bytes, bytes] | None:
        """Return the record of a stream that came back, or None."""

    def remove(
        self, key: int
    ) -> tuple[int, str, int, int, float, bytes, bytes, bytes, bytes] | None:
        """Take a stream away now; return its record, or None if it was returned already."""

    def heard(self, key: int) -> float:
        """Return when the engine last sent something; 0 for a stream that is not here."""

    def fileno(self) -> int:
        """Return a descriptor that is readable while streams came back."""

    def close(self) -> None:
        """End the thread; forget all streams."""
