"""What people import: `fit`, `best_batch`, `stow`, and the training step that they return."""
