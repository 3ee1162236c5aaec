"""A machine with a GPU: measured, planned for, and raced on."""
