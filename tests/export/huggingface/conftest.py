"""`transformers` reads folders here and asks nobody."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when it is imported
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
