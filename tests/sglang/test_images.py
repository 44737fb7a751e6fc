"""Prompts with images: each tenant of a router has its own, and both halves of a hand-off see the
same."""

from __future__ import annotations

import hashlib
import json
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines.models import VOCAB_SIZE, model_dir
from tests.engines.ranks import until
from tests.pictures import SIZE, data_url, png
from tests.sglang.pd import decode_server, prefill_server, room, side_by_side
from tests.sglang.scenario import moved_bytes
from tests.sglang.server import GenerateClient, GenerateRouter, SglangServer

KEYS = ("sk-0123456789abcdef", "sk-4a7f0c2be19d4e5f")
IMAGE = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    f"{{% if part['type'] == 'image' %}}{''.join(IMAGE)}{{% else %}}{{{{ part['text'] }}}}"
    "{% endif %}{% endfor %}{% endfor %}"
)
QUESTION = "What do you see in this picture? " * 8
NEW = 12  # tokens of an answer
TIMES = 4  # each question, so that it reaches both servers
Trio = tuple[SglangServer, SglangServer, SglangServer]


def write_model(folder: Path) -> str:
    """Make a small random model of images and text, with the tokenizer of the other models."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir("llama"))
    tokenizer.add_special_tokens({"additional_special_tokens": [*IMAGE, "<|video_pad|>"]})
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.chat_template = CHAT_TEMPLATE
    start, image, end, video = tokenizer.convert_tokens_to_ids([*IMAGE, "<|video_pad|>"])
    text = {
        **{"vocab_size": VOCAB_SIZE + 64, "hidden_size": 256, "intermediate_size": 512},
        **{"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2},
        **{"max_position_embeddings": 4096, "bos_token_id": 0, "eos_token_id": 1},
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]},
    }
    vision = {"depth": 2, "embed_dim": 64, "hidden_size": 256, "num_heads": 4, "mlp_ratio": 2}
    config = transformers.Qwen2VLConfig(
        text_config=text,
        vision_config={**vision, "in_chans": 3, "patch_size": 14},
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=False,
    )
    model = transformers.Qwen2VLForConditionalGeneration(config)
    rng = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 2.0 / parameter.shape[-1] ** 0.5, generator=rng)
    model.save_pretrained(folder)
    images = transformers.Qwen2VLImageProcessor(min_pixels=SIZE * SIZE, max_pixels=SIZE * SIZE)
    videos = transformers.Qwen2VLVideoProcessor()
    transformers.Qwen2VLProcessor(images, tokenizer, videos).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("images") / "model")


def chat(client: GenerateClient, number: int, **named: str) -> str:
    """Return what a model says of the picture of that number, with other fields of its part."""
    image = {"type": "image_url", "image_url": {"url": data_url(number), **named}}
    parts = [image, {"type": "text", "text": QUESTION}]
    body = {"model": "model", "messages": [{"role": "user", "content": parts}]}
    body |= {"max_tokens": NEW, "temperature": 0, "ignore_eos": True}
    with client.open("/v1/chat/completions", body) as answer:
        return str(json.load(answer)["choices"][0]["message"]["content"])


def see(client: GenerateClient, number: int, **extra: Any) -> tuple[int, ...]:
    """Return the tokens that a model says of the picture of that number."""
    text, images = "".join(IMAGE) + QUESTION, [data_url(number)]
    body = client.body([], NEW, text=text, image_data=images, **extra)
    del body["input_ids"]
    with client.open("/generate", body) as answer:
        return tuple(json.load(answer)["output_ids"])


def test_a_tenants_images_are_its_own_whatever_others_name(model: str, tmp_path: Path) -> None:
    # As an operator starts servers whose callers can be trusted with hashes of contents.
    trusting = ("--trust-mm-content-hashes", "--mm-preprocess-cache-size-mb", "64")
    servers = [SglangServer(texts=True, args=("--model-path", model, *trusting)) for _ in "12"]
    victims = f"sha256:{hashlib.sha256(png(1)).hexdigest()}"
    path = tmp_path / "keys"
    path.write_text("".join(f"{key}\n" for key in KEYS))
    path.chmod(0o600)
    args = ("--unified", "--api-key-file", str(path))
    with side_by_side(*servers), GenerateRouter([], servers, args) as router:
        right = {number: chat(servers[0], number) for number in (1, 2)}
        assert right[1] != right[2]
        assert chat(servers[0], 2, content_hash=victims) == right[1], "control: the name decides"
        a, b = (
            GenerateClient(port=router.port, headers={"Authorization": f"Bearer {key}"})
            for key in KEYS
        )
        for _ in range(TIMES):
            assert chat(b, 1) == right[1]
            assert chat(a, 2, content_hash=victims) == right[2]
            assert chat(b, 1, content_hash=victims) == right[1]


@pytest.fixture(scope="module")
def trio(model: str) -> Iterator[Trio]:
    args = ("--model-path", model)
    p, d = prefill_server(texts=True, args=args), decode_server(texts=True, args=args)
    single = SglangServer(texts=True, args=args)
    with side_by_side(p, d, single):
        yield p, d, single


def hand_off(p: SglangServer, d: SglangServer, prefills: int, decodes: int) -> tuple[int, ...]:
    """Return decode's answer to a picture, while prefill is asked for the one of another number."""
    meeting = room(p)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(see, p, prefills, **meeting)
        try:
            return see(d, decodes, **meeting)
        finally:
            failed = first.exception()
            if isinstance(failed, urllib.error.HTTPError):
                failed.close()


def test_images_are_handed_off(trio: Trio) -> None:
    p, d, single = trio
    right = [see(single, number) for number in range(3)]
    assert len({*right}) == len(right)
    assert [hand_off(p, d, number, number) for number in range(3)] == right
    until(lambda: moved_bytes(d, "RECV") > 0, "decode has received pages")


def test_another_image_is_refused_before_it_counts(trio: Trio) -> None:
    p, d, single = trio
    with pytest.raises(urllib.error.HTTPError) as refused:
        hand_off(p, d, prefills=4, decodes=5)
    with refused.value as error:
        assert "media" in error.read().decode()
    assert hand_off(p, d, 6, 6) == see(single, 6), "the pair still serves"
