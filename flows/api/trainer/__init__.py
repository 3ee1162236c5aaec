"""`stow`: a Hugging Face Trainer within a memory budget."""
