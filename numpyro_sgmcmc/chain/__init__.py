"""One chain: its state, its steps, and what they leave behind."""
