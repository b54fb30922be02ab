"""The fixture `interpreter`: a process in which the kernels run on CPU tensors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kernel_interpreter import Interpreter


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Interpreter]:
    """Started by the first test that asks for it; needs Triton."""
    pytest.importorskip("triton")
    interpreter = Interpreter()
    yield interpreter
    interpreter.close()
