"""Random pictures as clients send them."""

from __future__ import annotations

import base64
import io

import numpy as np

SIZE = 56  # pixels


def png(number: int) -> bytes:
    """Return the picture of that number."""
    from PIL import Image

    pixels = np.random.default_rng(number).integers(0, 255, (SIZE, SIZE, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def data_url(number: int) -> str:
    """Return the picture of that number as a URL that holds it."""
    return f"data:image/png;base64,{base64.b64encode(png(number)).decode()}"
