"""Attention over a sequence that all ranks share: torchrun --nproc-per-node 2 examples/attention.py"""

import torch
import torch.distributed as dist

from engine.attention import ContextParallel, attention

dist.init_process_group("gloo")
parallel = ContextParallel(num_heads=8, num_kv_heads=2, head_dim=64, preset="burst", dtype=torch.float32)
context = parallel.context(seq_len=1000)
hidden = torch.randn(1, 1000, 12, 64, generator=torch.Generator().manual_seed(0))  # the whole sequence, as data
q, k, v = context.shard(hidden).requires_grad_().split([8, 2, 2], dim=2)  # this rank's rows
out = attention(q, k, v, context)
out.square().sum().backward()
whole = context.gather(out)  # [1, 1000, 8, 64] in the order of positions
dist.destroy_process_group()
print(f"mean of out: {whole.mean():.6f} rows of this rank: {context.local_len} of {context.padded_len}")
