"""From the PyTorch reference to two ONNX graphs, checked against it."""
