"""SGLang's own suite for sessions, which checks its memory at every step, with the linker."""

from __future__ import annotations

from typing import ClassVar

from sglang.test.kits.streaming_session_kit import StreamingSessionKitMixin
from sglang.test.server_fixtures import streaming_session_fixture

from tests.outside.sglang import servers


class TestSessions(StreamingSessionKitMixin, streaming_session_fixture.StreamingSessionServerBase):
    model = servers.MODEL
    extra_args: ClassVar = [*servers.ON_CPU, *servers.LINKER]
