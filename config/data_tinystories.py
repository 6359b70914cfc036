# TinyStories: short stories in small words, the cheapest real English that shows whether a model learns to write
sources = [dict(name="stories", path="roneneldan/TinyStories")]
data_dir = "data/tinystories"
vocab_size = 8192
budget_tokens = 400_000_000
