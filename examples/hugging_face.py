"""A transformers Llama whose sequences are shared by all ranks: torchrun --nproc-per-node 2 examples/hugging_face.py"""

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from engine.attention import ContextParallel
from engine.attention.hugging_face import enable_context_parallel

dist.init_process_group("gloo")
torch.manual_seed(0)  # the same weights on every rank
shape = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=100, num_hidden_layers=2, **shape))
tokens = torch.randint(100, (1, 999))  # the same tokens on every rank

parallel = ContextParallel(num_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32)
sharder = enable_context_parallel(model, parallel)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(3):
    loss = model(**sharder.shard_inputs(tokens, labels=tokens)).loss  # this rank's share of the mean
    loss.backward()
    parallel.sum_gradients(model.parameters())
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(loss.detach_())
    print(f"loss {loss:.4f}")
dist.destroy_process_group()
