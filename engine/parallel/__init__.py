"""How a model is distributed over ranks: device meshes, FSDP2, tensor parallelism, and row sharding."""
