"""The stages that plan and train, and what they share; `ir` is what passes between them."""
