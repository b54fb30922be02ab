"""How a model runs on many ranks: FSDP2, tensor parallelism, and the order in which they are composed."""
