"""A process that hands out pages over NIXL till killed: ``python -m tests.fakes.nixl_source BYTES``

Prints the port it listens at. A message holds a read id: all pages of that read are sent, in order.
"""

from __future__ import annotations

import sys
from array import array

from kvconnect.testing.page_memory import PageMemory, plain_unit
from kvconnect.transport import make_transport
from kvconnect.transport.base import MessageReceived, OutgoingPages, Security
from tests.links import NIXL_QUICK

BLOCK = 64 << 10


def main() -> None:
    memory = PageMemory(int(sys.argv[1]))
    memory.data[:] = b"\xa5" * len(memory.data)
    transport = make_transport("nixl", Security(), NIXL_QUICK)
    transport.register(memory)
    sys.stdout.write(f"{transport.listen('127.0.0.1', 0)[1]}\n")
    sys.stdout.flush()
    unit = plain_unit(BLOCK)
    ids = array("q", range(len(memory.data) // BLOCK))
    while True:
        for event in transport.poll(1.0):
            if isinstance(event, MessageReceived):
                read_id = int(event.payload)
                transport.submit(OutgoingPages(event.peer, read_id, 0, unit, 0, ids))


if __name__ == "__main__":
    main()
