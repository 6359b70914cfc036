# The demo: train.py's defaults on the demo's data. Under four minutes on two cores. After
#   python prepare.py config/data_demo.py
data_dir = "data/demo"
out_dir = "out/demo"
compile = False  # on two cores compiling takes longer than it gives back in so short a run
max_steps = 720
eval_interval = 180
eval_tokens = 16_384
save_interval = 360
log_interval = 20
