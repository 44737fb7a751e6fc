"""All settings of an engine: what users may write, where it is found, and how it is checked.

:class:`Settings` is the whole of it, one flat struct. :func:`find_settings` puts it together from
an engine's flag, the environment and a file; :func:`check_settings` turns plain values into it, or
names all that is wrong with them. Nothing is allocated or connected to here.
"""

from kvconnect.settings.fields import (
    DigestMode,
    KVLayout,
    LoadWhen,
    PolicyName,
    Settings,
    Spill,
    TransportName,
)
from kvconnect.settings.sources import FoundSettings, find_settings
from kvconnect.settings.validation import check_settings, check_struct

__all__ = [
    "DigestMode",
    "FoundSettings",
    "KVLayout",
    "LoadWhen",
    "PolicyName",
    "Settings",
    "Spill",
    "TransportName",
    "check_settings",
    "check_struct",
    "find_settings",
]
