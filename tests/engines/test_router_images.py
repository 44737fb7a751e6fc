"""Prompts with images through routers: who names an image of another tenant gets nothing of it, and
decode's answer is about the image that prefill has seen."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines.models import VOCAB_SIZE, model_dir
from tests.engines.pd import pair, received_bytes, side_by_side
from tests.engines.scenario import HOST
from tests.engines.server import Client, Router, Server, kv_transfer
from tests.pictures import SIZE, data_url

KEYS = ("sk-0123456789abcdef", "sk-4a7f0c2be19d4e5f")
TIMES = 4  # each question, so that it reaches both engines


def write_model(folder: Path) -> str:
    """Make a small random model of images and text, with the tokenizer of the other models."""
    import transformers

    small = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
    small |= {"intermediate_size": 128}
    text = {
        **{"vocab_size": VOCAB_SIZE + 64, "hidden_size": 256, "word_embed_proj_dim": 256},
        **{"ffn_dim": 512, "num_hidden_layers": 4, "num_attention_heads": 8},
        **{"max_position_embeddings": 2048, "model_type": "opt"},
        **{"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None},
    }
    config = transformers.Blip2Config(
        vision_config={**small, "image_size": SIZE, "patch_size": 14},
        qformer_config={**small, "vocab_size": VOCAB_SIZE, "encoder_hidden_size": 64},
        text_config=text,
        num_query_tokens=8,
        image_token_index=VOCAB_SIZE,
    )
    model = transformers.Blip2ForConditionalGeneration(config)
    rng = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 2.0 / parameter.shape[-1] ** 0.5, generator=rng)
    model.save_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir("llama"))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    images = transformers.BlipImageProcessor(size={"height": SIZE, "width": SIZE})
    transformers.Blip2Processor(images, tokenizer, num_query_tokens=8).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("images") / "model")


@pytest.fixture(scope="module")
def servers(model: str) -> Iterator[tuple[Server, Server]]:
    one, other = (
        Server("llama", kv_transfer(host_bytes=HOST), args=("--model", model)) for _ in range(2)
    )
    with side_by_side(one, other):
        yield one, other


def see(client: Client, picture: int, uuid: str | None = None) -> tuple[int, ...]:
    """Return what a model says of a random picture that the client calls ``uuid``."""
    image: dict[str, Any] = {"type": "image_url", "image_url": {"url": data_url(picture)}}
    image |= {"uuid": uuid} if uuid else {}
    parts: list[Any] = [image, {"type": "text", "text": "What do you see in this picture? " * 4}]
    body = client.body([], 12, messages=[{"role": "user", "content": parts}])
    del body["prompt"]
    answer = json.loads(client.post("/v1/chat/completions", body))
    return tuple(answer["choices"][0]["token_ids"])


def test_a_tenants_images_are_its_own_whatever_others_call_theirs(
    servers: tuple[Server, Server], tmp_path: Path
) -> None:
    right = {picture: see(servers[0], picture) for picture in (1, 2)}
    assert right[1] != right[2]
    assert see(servers[0], 1, "dog") == see(servers[0], 2, "dog") == right[1], "control"
    path = tmp_path / "keys"
    path.write_text("".join(f"{key}\n" for key in KEYS))
    path.chmod(0o600)
    with Router([], servers, ("--unified", "--api-key-file", str(path))) as router:
        a, b = (
            Client(port=router.port, headers={"Authorization": f"Bearer {key}"}) for key in KEYS
        )
        for client, picture in ((b, 1), (a, 2), (b, 1)):
            for _ in range(TIMES):
                assert see(client, picture, "cat") == right[picture]


def test_images_are_handed_off(servers: tuple[Server, Server], model: str) -> None:
    """In both modes, chats whose decode engine gets prefill's token ids included."""
    right = [see(servers[0], picture) for picture in range(6)]
    assert len({*right}) == len(right)
    with pair(args=("--model", model)) as (p, d):
        for mode, pictures in (((), range(3)), (("--pull",), range(3, 6))):
            before = received_bytes(d)
            with Router([p], [d], mode) as router:
                assert [see(router, picture) for picture in pictures] == right[
                    pictures.start : pictures.stop
                ]
            assert received_bytes(d) > before, "decode computed none of them"
