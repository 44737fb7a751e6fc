"""What an engine's own settings make of the media and adapters of its prompts.

vLLM's hashes cover what a request says of its media, and Adapters what an adapter's files say. An
engine adds settings of its own to both, so two engines may have other KV of one prompt.
"""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import NamedTuple

from vllm.config import ModelConfig, VllmConfig

from kvconnect.cache.model_identity import model_folder

_OF_PROCESSORS = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)


class PromptSettings(NamedTuple):
    """Digests of an engine's settings.

    Attributes:
        media: of how it makes inputs of the model from media; empty if the model takes none.
        modules: of the modules to which alone it applies adapters; empty if there is no such limit.
    """

    media: bytes = b""
    modules: str = ""


DEFAULTS = PromptSettings()
"""Of an engine without such settings."""


def prompt_settings(config: VllmConfig) -> PromptSettings:
    """Return the digests of an engine's settings. Reads files that vLLM has read before.

    Raises:
        OSError: one of them cannot be read.
    """
    modules = getattr(config.lora_config, "target_modules", None)
    limit = "" if modules is None else _digest(b"kvconnect.lora1", sorted(modules)).hex()
    return PromptSettings(_media(config.model_config), limit)


def _media(model: ModelConfig) -> bytes:
    """Return a digest of the settings and files of the processors of media."""
    own = model.multimodal_config
    if own is None:
        return b""
    told = dict(own.mm_processor_kwargs or {})
    told.pop("device", None)  # where a processor runs is not what it makes
    folder = model_folder(str(model.model), model.revision)
    paths = [folder / name for name in _OF_PROCESSORS] if folder else []
    files = {path.name: path.read_bytes().hex() for path in paths if path.is_file()}
    settings = [told, own.get_video_pruning_spec(), own.mm_encoder_attn_dtype, files]
    return _digest(b"kvconnect.media1", settings)


def _digest(person: bytes, settings: object) -> bytes:
    text = json.dumps(settings, sort_keys=True, default=str)
    return blake2b(text.encode(), digest_size=16, person=person).digest()
