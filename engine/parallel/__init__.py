"""How ranks are divided: one object that owns the meshes, and FSDP2 over them."""
