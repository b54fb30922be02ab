"""How a model runs on many ranks: FSDP2, tensor parallelism, row sharding, and the order of composition."""
