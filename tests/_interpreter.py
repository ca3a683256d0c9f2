"""Triton's interpreter, which runs kernels for CUDA devices on a processor."""

from __future__ import annotations

import numpy as np
import pytest
import torch


@pytest.fixture
def bfloat16_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter keeps bfloat16 as whole numbers: it would multiply these, and cuts digits off."""
    tl = pytest.importorskip(
        "triton.language", reason="Triton is not installed here; the kernels are for CUDA devices"
    )
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def widened(handle: TensorHandle) -> TensorHandle:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def cast(builder: InterpreterBuilder, handle: TensorHandle, to: tl.dtype) -> TensorHandle:
        if (handle.dtype.scalar, to.scalar) != (tl.float32, tl.bfloat16):
            return cast_as_it_is(builder, handle, to)
        rounded = torch.tensor(handle.data).to(torch.bfloat16).view(torch.int16).numpy()
        return TensorHandle(rounded.view(np.uint16), tl.bfloat16)

    cast_as_it_is = InterpreterBuilder.cast_impl
    monkeypatch.setattr(InterpreterBuilder, "cast_impl", cast)
    dot = InterpreterBuilder.create_dot
    monkeypatch.setattr(
        InterpreterBuilder, "create_dot", lambda self, a, b, *rest: dot(self, widened(a), widened(b), *rest)
    )
