# The reference run: 502,193,664 parameters, 10B tokens, 4 GPUs of one host.
#   torchrun --standalone --nproc_per_node=4 train.py config/train_0p5b.py
n_layer = 18
n_head = 12
n_kv_head = 4
n_embd = 1536
ffn_hidden = 4096
block_size = 2048
expect_params = 502_193_664  # with the 32,000-id vocabulary

global_batch_tokens = 1_048_576  # 512 windows of 2048
micro_batch_size = 8
max_steps = 9536  # 10B tokens
max_epochs = 1

# Published runs between 100M and 1B peak at 2e-4 to 5e-4: Pythia-410M at 3e-4, TinyLlama-1.1B and OLMo-1B at 4e-4.
# With a batch of 1M tokens 4e-4 is inside that practice. 1,000 steps of warm-up are the lower end of the usual 1,000
# to 2,000, and a tenth of this short run.
learning_rate = 4e-4
min_lr = 4e-5
warmup_steps = 1000
lr_schedule = "cosine"
weight_decay = 0.1
beta1 = 0.9
beta2 = 0.95
grad_clip = 1.0

log_interval = 10
eval_interval = 200
save_interval = 250  # 27 minutes at 163,399 tokens/s: what a killed machine can cost
weights_interval = 0
keep_last = 2
keep_every = 0
