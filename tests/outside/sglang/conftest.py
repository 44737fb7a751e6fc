"""What SGLang imports without a GPU crashes at exit; leave as the project's own tests do."""

from tests.sglang.conftest import pytest_sessionfinish, pytest_unconfigure  # noqa: F401
