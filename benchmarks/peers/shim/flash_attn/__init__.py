"""Stands in for flash-attn where there is no GPU, so that packages that import it run their own code on CPUs.

The kernel is the one that this project's CPU tiles use; shapes, argument names, causal alignment and results follow
flash-attn 2.8. Only what the compared packages call exists; everything else is refused.
"""

from flash_attn.flash_attn_interface import flash_attn_func

__all__ = ["flash_attn_func"]
__version__ = "2.8.3"
