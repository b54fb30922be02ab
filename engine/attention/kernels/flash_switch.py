"""Which library computes torch's FlashAttention operators: FlashAttention-2, its own, or one that was put in its place.

torch.nn.attention.activate_flash_attention_impl("FA3") replaces `aten::_flash_attention_forward` and `_backward` in
the dispatcher of the whole process, until another one is activated or torch's own is restored. So a kernel that means
one of them says so before every call: a look at a variable, unless the last call was another kernel's.
"""

from __future__ import annotations

import importlib.util

import torch
import torch.nn.attention as torch_attention

_NEEDED = (
    "activate_flash_attention_impl",
    "current_flash_attention_impl",
    "list_flash_attention_impls",
    "restore_flash_attention_impl",
)


def use_flash_implementation(name: str | None) -> None:
    """From now on torch's FlashAttention operators are those of implementation `name`; None: torch's own.

    ImportError or RuntimeError if its package cannot be loaded, and ValueError if torch does not know it: torch's own
    are active then.
    """
    current = getattr(torch_attention, "current_flash_attention_impl", None)
    if current is None:
        return  # a torch that cannot switch: `implementation_problem` says so
    if current() == name:
        return
    if name is None:
        torch_attention.restore_flash_attention_impl()
    else:
        torch_attention.activate_flash_attention_impl(name)


def implementation_problem(name: str, module: str, package: str) -> str | None:
    """Why implementation `name` cannot be used here, or None; `module` is what torch imports of `package`.

    Loads the library: a package that is installed for another torch or CUDA shows itself only then.
    """
    if any(not hasattr(torch_attention, function) for function in _NEEDED):
        return f"torch {torch.__version__} cannot switch to it (torch.nn.attention.{_NEEDED[0]} is missing)"
    if name not in torch_attention.list_flash_attention_impls():
        return f"torch {torch.__version__} does not know the implementation {name}"
    if not is_importable(module):
        return f"{package} is not installed (no module {module})"
    before = torch_attention.current_flash_attention_impl()
    try:
        use_flash_implementation(name)
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        return f"{package} is installed, but cannot be loaded ({type(error).__name__}: {error})"
    finally:
        use_flash_implementation(before)
    return None


def is_importable(module: str) -> bool:
    """Whether a module, which may be part of a package, can be found."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False
