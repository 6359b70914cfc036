# A GPT-2-small-sized run for one GPU: 109,529,856 parameters with the 32,000-id vocabulary, 2.6B tokens.
n_layer = 12
n_head = 12
n_kv_head = 12
n_embd = 768
ffn_hidden = 2048
block_size = 512

global_batch_tokens = 131_072  # 8 x 32 windows of 512
micro_batch_size = 32
max_steps = 20_000

learning_rate = 3e-4
min_lr = 3e-5
warmup_steps = 2000
weight_decay = 0.1
beta1 = 0.9
beta2 = 0.95
adam_eps = 1e-6

eval_interval = 500
save_interval = 1000
