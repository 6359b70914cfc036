# make demo: the standard library of this machine, no network, well under a minute
sources = "embedded"
data_dir = "data/demo"
vocab_size = 4096
