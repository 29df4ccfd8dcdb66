"""Start workers and supervise them."""
