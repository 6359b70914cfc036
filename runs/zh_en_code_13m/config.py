# 12.6M parameters, 17M tokens of Chinese, English and code: three quarters of an hour on two cores with bfloat16.
# After: python prepare.py --docs=docs --data_dir=data/zh_en_code --vocab_size=8192
data_dir = "data/zh_en_code"
out_dir = "out/zh_en_code_13m"
question = "How far do 50 minutes on two cores carry a base model of Chinese, English and code? Did the forecast hold?"
expect_params = 12_587_904  # with 8,192 ids

n_layer = 6
n_head = 6
n_kv_head = 2
n_embd = 384
ffn_hidden = 1024
block_size = 512

global_batch_tokens = 8192
micro_batch_size = 8
max_steps = 2100  # 17.2M tokens, 0.89 of an epoch
max_epochs = 1

optimizer = "muon"  # after 90 steps of these shapes, one seed each: 6.03 nats at 3e-3, 5.90 at 8e-3; AdamW 6.77 at 2e-3
learning_rate = 6e-3
min_lr = 2e-4
warmup_steps = 100

log_interval = 10
eval_interval = 300
eval_tokens = 120_000
save_interval = 300
sample_interval = 300
