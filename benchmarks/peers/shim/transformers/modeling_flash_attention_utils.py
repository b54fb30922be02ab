"""What the adapter of ring-flash-attn imports."""


def is_flash_attn_greater_or_equal_2_10() -> bool:
    """Never called here."""
    raise NotImplementedError
