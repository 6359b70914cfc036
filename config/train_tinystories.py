# The smoke test on real prose: about 13M parameters that write short English stories. After
#   python prepare.py config/data_tinystories.py
data_dir = "data/tinystories"
out_dir = "out/tinystories"

n_layer = 6
n_head = 6
n_kv_head = 2
n_embd = 384
ffn_hidden = 1024
block_size = 512

global_batch_tokens = 65_536
micro_batch_size = 32
max_steps = 2000

learning_rate = 1e-3
min_lr = 1e-4
warmup_steps = 100

eval_interval = 200
save_interval = 500
