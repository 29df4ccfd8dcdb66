"""Messages, framing and tensors: pure functions of bytes."""
